"""Random weights of any causal language model under which the text depends on the context.

As in `tests/tiny_targets.py`, without knowing what the modules are called: attention is peaked, norms are not at their
initial values, and the logits have a standard deviation of `LOGIT_STD`.
"""

import math
from typing import Any

import torch
from torch import nn

from tests.tiny_targets import LOGIT_STD, tiny_prompts

# Scale of the projections, seed by seed. Norms before or after the residual stream, biases and activations decide under
# which of them the last token, the text before it, or nothing at all matters most.
SCALES = 1.5, 2.5, 1.0, 0.6

_PEAKED = ("q_norm.weight", "k_norm.weight", "q_layernorm.weight", "k_layernorm.weight")
_ROUNDS = 3  # of scaling: a softcap or a bias bends what the output makes of its scale


@torch.no_grad()
def peak(model: Any, vocab_size: int, seed: int = 0) -> None:
    """Draw every weight of a float32 model anew, and scale its output on a prompt of tokens below `vocab_size`."""
    generator = torch.Generator().manual_seed(seed)
    scale = SCALES[seed % len(SCALES)]
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is model.get_input_embeddings().weight
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    offset = {id(weight) for weight in model.parameters() if weight.ndim == 1 and not weight.any()}
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith(_PEAKED):
            parameter.add_(0.5 + 0.3 * noise)  # no projection can sharpen attention after these norms
        elif "sink" in name:
            parameter.copy_(2.0 + noise)  # as heavy as several keys
        elif name.endswith("bias"):  # large ones would say more of the next token than the text does
            parameter.add_(0.05 * noise)
        elif parameter.ndim < 2:  # other norms and gates: around their initial value
            parameter.add_(0.3 * noise)
        elif id(parameter) in embeddings:
            # Small beside what the layers add to it: with tied embeddings a token would otherwise predict itself.
            parameter.copy_((0.02 if tied else 0.1) * noise)
        else:
            parameter.copy_(noise * (scale / math.sqrt(parameter.shape[-1])))
    if head is not None:
        _spread_logits(model, head, tied, tiny_prompts(vocab_size, [64])[0], offset)


def _spread_logits(model: Any, head: Any, tied: bool, input_ids: torch.Tensor, offset: set[int]) -> None:
    """Scale the head, or the norm before a tied one, until logits spread, without the direction of all states."""
    for _ in range(_ROUNDS):
        logits, hidden, norm = _watched(model, head, input_ids)
        scaled, shift = head.weight, 0.0
        if tied and norm is not None:
            scaled, shift = norm, 1.0 if id(norm) in offset else 0.0  # gemma multiplies by 1 + weight
        std = logits.std(1).mean().item()  # over positions
        if not math.isfinite(std) or std == 0:
            return
        gain = round(LOGIT_STD / std, 2)  # rounded: the order of summation must not reach the weights
        scaled.add_(shift).mul_(gain).sub_(shift)
        if hidden is not None:
            common = nn.functional.normalize(hidden.flatten(0, -2).mean(0), dim=0)
            head.weight.sub_((head.weight @ common)[:, None] * common)


def _watched(model: Any, head: nn.Module, input_ids: torch.Tensor) -> tuple[torch.Tensor, Any, Any]:
    """Logits, what the head was given, and the weight of the norm that ran last before it."""
    norms = [module for module in model.modules() if getattr(getattr(module, "weight", None), "ndim", 0) == 1]
    ran: list[torch.Tensor] = []
    given: list[torch.Tensor] = []
    handles = [norm.register_forward_hook(lambda module, *_: ran.append(module.weight)) for norm in norms]
    handles.append(head.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0])))
    logits = model(input_ids, use_cache=False).logits
    for handle in handles:
        handle.remove()
    return logits, given[-1] if given else None, ran[-1] if ran else None
