"""What the target's final norm is given: the residual stream behind the last layer.

Transformers' `hidden_states[-1]` is what the norm returns, and `output_hidden_states` keeps every layer's.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

# Name of the norm behind the last layer, in the order of how common it is.
FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "norm_f", "ln_f")


def final_norm_of(model: PreTrainedModel) -> nn.Module:
    """The norm between the last layer and the language-model head.

    Raises:
        ValueError: If no module has one of the known names.
    """
    for module in model.get_decoder().modules():
        if hasattr(module, "layers") or hasattr(module, "h"):
            for name in FINAL_NORMS:
                if isinstance(norm := getattr(module, name, None), nn.Module):
                    return norm
    raise ValueError(
        f"{type(model).__name__} has no final norm under one of the names {', '.join(FINAL_NORMS)}, whose input the "
        "draft's heads read. Use a draft without heads, such as SpecAttnDraftModel."
    )


def refuse_compiled_forward(model: PreTrainedModel) -> None:
    """Raise ValueError if the final norm runs inside a graph of the user's own, which takes no hook."""
    for module in (model, model.get_decoder()):
        if module._compiled_call_impl is not None or hasattr(module.forward, "_torchdynamo_orig_callable"):
            raise ValueError(
                f"the forward of {type(module).__name__} is compiled, and a graph does not give out the final "
                "norm's input, "
                "which the draft's heads read. Use the model as it was before torch.compile (`del "
                "model.forward`), with "
                'draft.generation_config.compile = "compile".'
            )


class FinalNormInput:
    """Remembers what the final norm is given by this thread's forwards, while the context is open.

    Args:
        model (`PreTrainedModel`): A causal language model, used as it is.

    Attributes:
        hidden (`torch.Tensor` of shape `(B, N, hidden)`): Of the latest forward.
    """

    hidden: torch.Tensor

    def __init__(self, model: PreTrainedModel):
        self._norm = final_norm_of(model)

    def __enter__(self) -> "FinalNormInput":
        self._thread = threading.get_ident()  # another thread may be generating on the same model
        self._handle = self._norm.register_forward_pre_hook(self._catch)
        return self

    def __exit__(self, *error: Any) -> None:
        self._handle.remove()

    def _catch(self, module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if torch.compiler.is_compiling():
            if _traced.wanted:
                _traced.hidden = inputs[0]
        elif threading.get_ident() == self._thread:
            self.hidden = inputs[0]


class _Traced:
    """What the final norm is given in a forward that a graph is made of. Outside of the graph it never holds anything.

    A graph takes no part in hooks being set and removed, and cannot ask for its thread. A forward of another thread
    that is traced meanwhile meets the hook too, and has not asked.
    """

    wanted = False
    hidden: torch.Tensor | None = None


_traced = _Traced()


def with_final_norm_input(
    model: PreTrainedModel, forward: Callable[[], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `forward` returns, and what it gave the final norm `(B, N, hidden)`.

    May be part of a function that is compiled, if a [`FinalNormInput`] is open whenever that is called.
    """
    if not torch.compiler.is_compiling():
        with FinalNormInput(model) as caught:
            return forward(), caught.hidden
    _traced.wanted = True
    result = forward()
    hidden = _traced.hidden
    _traced.wanted, _traced.hidden = False, None
    assert hidden is not None
    return result, hidden
