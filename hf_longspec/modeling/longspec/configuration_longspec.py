"""Configuration of a LongSpec draft."""

from typing import Any, ClassVar, Self

from transformers import PreTrainedConfig, PreTrainedModel

from ...generation.target_modules import last_full_layer, shape_of
from ..configuration_base import text_config
from ..shared.vocabulary import VocabularyConfig


class LongSpecConfig(VocabularyConfig):
    """Configuration of [`LongSpecDraftModel`]: shape of its one block, and the target layer that it reads."""

    model_type = "longspec"
    sizes: ClassVar[dict[str, tuple[int, int]]] = VocabularyConfig.sizes | {
        "window": (0, 2**20),
        "kv_layer": (0, 2**12),
        "noise_range": (0, 2**12),
    }

    hidden_size: int = 0  # width of the target's embeddings
    intermediate_size: int = 0  # width of the SwiGLU
    num_attention_heads: int = 1  # number of query heads of both attentions
    num_key_value_heads: int = 1  # number of key/value heads, equal to the target's
    head_dim: int = 0  # size of a head, equal to the target's
    hidden_act: str = "silu"  # activation of the SwiGLU
    rms_norm_eps: float = 1e-6  # epsilon of the three norms
    initializer_range: float = 0.02  # standard deviation of the initial weights
    qkv_bias: bool = False  # whether the query, key and value projections have a bias, as in the authors' checkpoints
    window: int = 512  # number of positions that a self-attention query attends to, its own included
    kv_layer: int = 0  # index of the target's layer whose keys and values are read
    # whether the draft attends to the target's cache. Otherwise it attends to its window only.
    cross_attention: bool = True
    # smallest and largest gap between a query and its newest visible target key in training. Drafting at depth d has
    # gap d + 1, so the second number is the depth of the tree.
    noise_range: list[int] | tuple[int, ...] = (1, 5)
    trained_max_length: int | None = None  # largest position in training

    @classmethod
    def from_target(cls, target: PreTrainedModel | PreTrainedConfig, **overrides: Any) -> Self:
        text = text_config(target)
        kv_layer = overrides.get("kv_layer", last_full_layer(text))
        # shapes of the layer that is read, if layers differ
        layer = text.per_layer_config[kv_layer] if kv_layer in range(text.num_hidden_layers) else text
        values = {
            "hidden_size": text.hidden_size,
            "intermediate_size": _intermediate_size(layer, kv_layer),
            "num_attention_heads": layer.num_attention_heads,
            "num_key_value_heads": getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads,
            "head_dim": getattr(layer, "head_dim", None) or text.hidden_size // layer.num_attention_heads,
            "hidden_act": getattr(text, "hidden_act", None) or getattr(text, "hidden_activation", None) or "silu",
            "rms_norm_eps": getattr(text, "rms_norm_eps", None) or cls.rms_norm_eps,
            "kv_layer": kv_layer,
        }
        return super().from_target(target, **(values | overrides))

    @classmethod
    def describe(cls, target: PreTrainedModel | PreTrainedConfig) -> dict[str, Any]:
        text = text_config(target)
        rotary = getattr(text, "rope_parameters", None)
        head_dim = shape_of(text, "head_dim") or text.hidden_size // text.num_attention_heads
        return super().describe(target) | {"head_dim": head_dim, "rope_parameters": rotary}


def _intermediate_size(layer: Any, index: int) -> int:
    """Return the width of a target's feed-forward layer, or the usual one of a gated layer if it has experts only."""
    size = getattr(layer, "intermediate_size", None) or 8 * layer.hidden_size // 3  # arXiv:2002.05202, section 3.2
    return int(size[index] if isinstance(size, list | tuple) else size)
