"""Configuration of a Gemma 4 assistant as a draft."""

from typing import Any, ClassVar, Self

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig

from ...generation.target_modules import last_layer, shape_of
from ..configuration_base import DraftConfig, check_sizes, text_config
from ..saved_config import readable

# Parts of Gemma 4 that no assistant has, and the values of their fields that leave them out.
WITHOUT = {"hidden_size_per_layer_input": 0, "enable_moe_block": False, "use_double_wide_mlp": False}
FULL, SLIDING = "full_attention", "sliding_attention"


class SharedLayersConfig(Gemma4TextConfig):
    """Configuration of layers without keys and values of their own.

    The class of transformers 5.23 wants some layers to have them, and refuses every assistant.
    """

    @property
    def kv_sharing_modes(self) -> list[str | None]:
        return ["reuse"] * self.num_hidden_layers


class Gemma4AssistantDraftConfig(DraftConfig):
    """Configuration of [`Gemma4AssistantDraftModel`]."""

    model_type = "longspec_gemma4_assistant"
    sizes: ClassVar[dict[str, tuple[int, int]]] = {"backbone_hidden_size": (0, 2**17), "num_centroids": (0, 2**24)}

    layer_config: dict[str, Any] | None = None  # the `text_config` of an assistant in transformers
    backbone_hidden_size: int = 0  # width of the target
    use_ordered_embeddings: bool = False  # whether the head computes the logits of the tokens of some clusters only
    num_centroids: int = 2048  # number of clusters
    centroid_intermediate_top_k: int = 32  # number of clusters whose tokens have logits

    @classmethod
    def from_target(cls, target: PreTrainedModel | PreTrainedConfig, **overrides: Any) -> Self:
        """Return the configuration of one layer of each type that the target has, half as wide as the target."""
        text = text_config(target)
        layers = {kind: text.per_layer_config[index] for kind, index in layers_read(text).items()}
        full, sliding = layers[FULL], layers.get(SLIDING, layers[FULL])
        default_size = text.hidden_size // full.num_attention_heads
        layer_config = {
            "vocab_size": text.vocab_size,
            "hidden_size": text.hidden_size // 2,
            "intermediate_size": text.hidden_size,
            "num_hidden_layers": len(layers),
            "layer_types": [*layers],
            "num_attention_heads": full.num_attention_heads,
            "num_key_value_heads": getattr(full, "num_key_value_heads", None) or full.num_attention_heads,
            "head_dim": getattr(sliding, "head_dim", None) or default_size,
            "global_head_dim": getattr(full, "head_dim", None) or default_size,
            "sliding_window": getattr(text, "sliding_window", None) or Gemma4TextConfig.sliding_window,
        }
        values = {"layer_config": layer_config | WITHOUT, "backbone_hidden_size": text.hidden_size}
        return super().from_target(target, **(values | overrides))

    @property
    def layer(self) -> SharedLayersConfig:
        fields = WITHOUT | (self.layer_config or {})
        layers = fields.get("num_hidden_layers", 1)
        return SharedLayersConfig.from_dict(fields | {"num_kv_shared_layers": layers})

    @property
    def head_dim(self) -> int:
        """Size of the largest heads."""
        size = shape_of(self.layer, "head_dim")
        return int(max(size) if isinstance(size, list) else size)

    def check_types(self) -> None:
        super().check_types()
        fields = self.layer_config or {}
        check_sizes("layer_config in the draft's config.json", fields)
        with readable("layer_config in the draft's config.json", fields, SharedLayersConfig.from_dict):
            self.layer  # noqa: B018
        for name, value in WITHOUT.items():
            if fields.get(name, value) not in (None, value):
                raise ValueError(
                    f"layer_config has {name}={fields[name]!r}: expected {value!r}, as assistants of Gemma 4 have. "
                    "Use another draft."
                )
        if other := sorted(set(fields.get("layer_types") or ()) - {FULL, SLIDING}):
            raise ValueError(f"layer_config has layers of types {other}: expected {FULL} and {SLIDING}.")
        most = self.num_centroids
        if self.use_ordered_embeddings and not (
            most and self.vocab_size % most == 0 and 1 <= self.centroid_intermediate_top_k <= most
        ):
            raise ValueError(
                f"num_centroids={most}, centroid_intermediate_top_k={self.centroid_intermediate_top_k}: expected a "
                f"divisor of vocab_size={self.vocab_size}, as all clusters have the same size, and at most as many. "
                "Correct the draft's config.json."
            )


def layers_read(text: Any) -> dict[str, int]:
    """Return the target's layer whose keys and values are read, for each type of the draft's layers.

    It is the last layer of its type that has a cache of its own.
    """
    has_windows = SLIDING in (getattr(text, "layer_types", None) or ())
    return {kind: last_layer(text, kind) for kind in ((SLIDING, FULL) if has_windows else (FULL,))}
