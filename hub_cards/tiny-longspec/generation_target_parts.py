# Published with a draft by hf_longspec, Apache-2.0.
"""What a draft with attention borrows from its target: embedding, language-model head, rotary embedding.

The modules and functions are the target's own, found and called, never copied. What differs between architectures
outside of them is the rows of data below; tests/generation/test_target_parts.py compares each with the target's own
hidden states, queries and logits.
"""

import inspect
import sys
from typing import Any

import torch
from transformers import PreTrainedModel

from .generation_target_ends import TargetEnds, device_of

# Where some layers slide a window, layers of this type do not rotate queries and keys.
UNROTATED_LAYERS = dict.fromkeys(("cohere2", "cohere2_moe", "exaone4", "exaone_moe"), "full_attention")


class TargetParts(TargetEnds):
    """The modules of a target that a draft with attention uses, with the cache layer it reads.

    Args:
        model (`PreTrainedModel`): A causal language model, used as it is.
        kv_layer (`int`): The layer whose keys and values the draft attends to.
    """

    def __init__(self, model: PreTrainedModel, kv_layer: int):
        super().__init__(model)
        self.kv_layer = kv_layer
        self.decoder = decoder_of(model)
        self.attention = self.decoder.layers[kv_layer].self_attn
        self.rotates = rotates(self.config, kv_layer)
        self._rotation = vars(sys.modules[type(self.attention).__module__])["apply_rotary_pos_emb"]
        self._per_layer_type = "layer_type" in inspect.signature(self.decoder.rotary_emb.forward).parameters

    @property
    def place(self) -> tuple[torch.device, torch.dtype]:
        """Device and dtype of the keys that the KV layer computes."""
        weight = self.model.get_input_embeddings().weight
        return device_of(self.attention, weight.device), weight.dtype

    def rotary(self, positions: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of `positions` `(B, N)` at the KV layer, in the dtype and on the device of `like`."""
        extra: dict[str, Any] = {}
        if self._per_layer_type:
            extra["layer_type"] = self.config.layer_types[self.kv_layer]
        cos, sin = self.decoder.rotary_emb(like, positions, **extra)
        return cos, sin

    def rotate(
        self, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries `(B, H, N, D)` and keys `(B, K, N, D)` rotated as the target does."""
        rotated: tuple[torch.Tensor, torch.Tensor] = self._rotation(query, key, cos, sin)
        return rotated

    def rotate_query(self, query: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Queries for the cached keys of the KV layer, whose rotation they share or lack together."""
        return self.rotate(query, query[:, :0], cos, sin)[0] if self.rotates else query


def decoder_of(model: PreTrainedModel) -> Any:
    """The module with the layers and the rotary embedding.

    Raises:
        ValueError: If there is none, as in models with learned or ALiBi positions.
    """
    for module in model.get_decoder().modules():
        if hasattr(module, "rotary_emb") and hasattr(module, "layers"):
            return module
    raise ValueError(
        f"{type(model).__name__} has no rotary embedding beside its layers, and a trained draft rotates its queries "
        "as the target does. Use a training-free draft, such as SpecAttnDraftModel."
    )


def rotates(config: Any, layer: int) -> bool:
    """Whether layer `layer` of a target rotates its queries and keys."""
    unrotated = UNROTATED_LAYERS.get(config.model_type)
    if unrotated is not None and config.sliding_window is not None and config.layer_types[layer] == unrotated:
        return False
    no_rope_layers = getattr(config, "no_rope_layers", None)  # 1: the layer rotates
    return True if not no_rope_layers else bool(no_rope_layers[layer])


def last_full_layer(config: Any) -> int:
    """The last layer without a sliding window; the last one at all if every layer has one."""
    kinds = getattr(config, "layer_types", None) or []
    full = [index for index, kind in enumerate(kinds) if kind == "full_attention"]
    return full[-1] if full else int(config.num_hidden_layers) - 1
