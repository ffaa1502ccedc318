"""An MTP layer: two norms and a projection before a decoder layer of the target's own class."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import MODEL_MAPPING, AutoModel, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ...attention_backends.interface import AUTOMATIC, differentiable_attention
from ...attention_backends.registry import merge_attention_states
from ...generation.cache import CACHE_NAME
from ...generation.special_cases.masked import INDEXED_LAYERS
from ...generation.special_cases.recurrent_states import HYBRID_LAYERS, STATE_LAYERS
from ...generation.target_modules import attention_of, decoder_of, final_norm_of, layer_at
from .configuration_mtp import MtpConfig

Rotary = tuple[torch.Tensor, torch.Tensor]
# From new keys and values `(B, K, n, D)` to all that are attended to, `(B, K, M, D)`, under a mask `(B, n, M)`. Without
# a mask nothing is attended to: the new keys and values are stored alone.
Store = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]

# What a decoder layer is made of, and what its forward gets from an MTP layer or can do without.
MADE_OF = {"config", "layer_idx"}
GIVEN = {"hidden_states", "position_embeddings", "position_ids", "attention_mask", CACHE_NAME, "use_cache"}
GIVEN |= {"output_attentions"}


def decoder_like(config: MtpConfig) -> PreTrainedModel:
    """Return a decoder of the target's class without memory. Its parts have the classes that a draft is built of.

    Raises:
        ValueError: If a layer of this class cannot be an MTP layer.
    """
    layer_config, reason = config.layer, None
    kind = MODEL_MAPPING.get(type(layer_config), None)
    if kind is None:
        reason = "transformers has no class for its language model alone"
    elif not kind._can_set_attn_implementation():
        reason = "its attention does not go through transformers' AttentionInterface"
    else:
        try:
            with torch.device("meta"):
                decoder: PreTrainedModel = AutoModel.from_config(layer_config, attn_implementation=AUTOMATIC)
        except Exception as error:  # whatever a class of another project raises
            reason = (
                f"its class cannot be built of config alone ({type(error).__name__}: {' '.join(str(error).split())})"
            )
        else:
            reason = _why_not(decoder, config.layer_idx)
    if reason is not None:
        raise ValueError(
            f"a layer of model_type={layer_config.model_type!r} cannot be used as an MTP layer: "
            f"{reason}. Use another draft, such as NgramDraftModel."
        )
    return decoder


def _why_not(decoder: PreTrainedModel, index: int) -> str | None:
    """Return why a layer of a decoder cannot be an MTP layer; `None` if it can."""
    layers, kinds = decoder_of(decoder).layers, getattr(decoder.config, "layer_types", None) or ()
    if len(layers) != decoder.config.num_hidden_layers:
        return f"the model has {len(layers)} layers, and its config counts {decoder.config.num_hidden_layers}"
    kind, layer = kinds[index] if index < len(kinds) else "", type(layer_at(decoder, index))
    if kind in HYBRID_LAYERS | STATE_LAYERS:
        return f"it is a layer of type {kind}, which keeps recurrent states"
    if kind in INDEXED_LAYERS:
        return f"it is a layer of type {kind}, whose indexer keeps keys of its own"
    if others := sorted(set(inspect.signature(layer).parameters) - MADE_OF):
        return f"it is made with {', '.join(others)} in addition to its config and index"
    parameters = inspect.signature(layer.forward).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
    if others := [name for name in names[1:] if name not in GIVEN]:  # after self
        return f"its forward also takes {', '.join(others)}"
    try:
        attention_of(decoder_of(decoder), index)
    except ValueError:
        return "its attention has no function of its own to rotate queries and keys"
    return None


class LayerForward:
    """The cache and the attention context of one forward of one layer.

    Args:
        store (`Callable`): Keeps keys and values, see `Store`. A layer may cache latents in their place (MLA).
    """

    def __init__(self, store: Store):
        self._store = store
        self._mask: torch.Tensor | None = None

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Store keys and values, as a cache of transformers does, and return those that are attended to."""
        keys, values, self._mask = self._store(keys, values)
        return keys, values

    def attend(
        self,
        backend: Any,
        layer_idx: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the attention output `(B, H, n, Dv)` under the mask of the last `update`; zeros without one."""
        if self._mask is None:
            return query.new_zeros(*query.shape[:3], value.shape[3])
        options: dict[str, Any] = {"scaling": scaling, "softcap": softcap}
        if torch.is_grad_enabled() and query.requires_grad:
            mask = self._mask[:, None]
            return differentiable_attention(query, key, value, mask, causal=False, sinks=sinks, **options)
        state = backend.tree_attention(query, key, value, self._mask, **options)
        return state[0] if sinks is None else merge_attention_states([state], sinks)[0]


class MtpLayer(GradientCheckpointingLayer):
    """Joins a state with the embedding of the token after it, and runs a decoder layer on the projection.

    The names are those of transformers' own class.
    """

    def __init__(self, config: MtpConfig, decoder: PreTrainedModel):
        super().__init__()
        self.hidden_states_first = config.hidden_states_first
        self.zero_first_embedding = config.zero_first_embedding
        norm, layer, size = final_norm_of(decoder), layer_at(decoder, config.layer_idx), decoder.config.hidden_size
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        device = self.eh_proj.weight.device
        self.enorm, self.hnorm, self.norm = (copy.deepcopy(norm).to_empty(device=device) for _ in range(3))
        if not config.final_norm:
            self.norm = None  # type: ignore[assignment]
        self.block = type(layer)(decoder.config, config.layer_idx)

    def forward(
        self, states: torch.Tensor, embedded: torch.Tensor, positions: torch.Tensor, angles: Rotary, store: Store
    ) -> torch.Tensor:
        """Return outputs `(B, n, hidden)`, which are the states of the next step and the input of the target's head.

        Args:
            states (`torch.Tensor` of shape `(B, n, hidden)`): Output of the target's final norm at the tokens before,
                or outputs of the step before.
            embedded (`torch.Tensor` of shape `(B, n, hidden)`): Embeddings of the tokens.
            positions (`torch.LongTensor` of shape `(B, n)`): Positions of the states.
            angles (`tuple[torch.Tensor, torch.Tensor]`): Cosines and sines of these positions.
            store (`Callable`): See `Store`.
        """
        if self.zero_first_embedding:
            embedded = embedded * (positions > 0)[..., None]
        parts = self.enorm(embedded), self.hnorm(states)
        step = LayerForward(store)
        outputs = self.block(
            self.eh_proj(torch.cat(parts[::-1] if self.hidden_states_first else parts, -1)),
            position_embeddings=angles,
            position_ids=positions,
            attention_mask=None,
            **{CACHE_NAME: step},
            use_cache=True,
            tree=step,
        )
        outputs = outputs[0] if isinstance(outputs, tuple) else outputs
        return outputs if self.norm is None else self.norm(outputs)
