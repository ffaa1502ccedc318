"""Configuration of an MTP draft."""

from typing import Any, ClassVar, Self

from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from ...generation.target_modules import last_full_layer
from ..configuration_base import DraftConfig, check_sizes, text_config
from ..saved_config import readable


class MtpConfig(DraftConfig):
    """Configuration of [`MtpDraftModel`]."""

    model_type = "longspec_mtp"
    sizes: ClassVar[dict[str, tuple[int, int]]] = {"num_mtp_layers": (1, 2**8)}

    layer_config: dict[str, Any] | None = None  # the target's text config, by which its decoder layers are built
    layer_idx: int = 0  # the layer of the target that the MTP layers are of the kind of
    num_mtp_layers: int = 1  # one is run for every drafted token; of several, each is run once
    hidden_states_first: bool = False  # whether the state comes before the embedding in the input of the projection
    zero_first_embedding: bool = False  # whether the embedding at position 0 is zero
    final_norm: bool = True  # whether a norm follows the layer
    training_steps: int = 3  # number of chained steps in training, if there is one layer

    @classmethod
    def from_target(cls, target: PreTrainedModel | PreTrainedConfig, **overrides: Any) -> Self:
        """Return the configuration of one layer like the target's last one with full attention."""
        text = text_config(target)
        # the config class of a model with code of its own may extend one of transformers, whose layers it then has
        names = (getattr(kind, "model_type", "") for kind in type(text).__mro__)
        kinds = [name for name in names if name in CONFIG_MAPPING]
        layer_config = text.to_dict() | {"model_type": (kinds or [text.model_type])[0]}
        for name in ("quantization_config", "auto_map", "dtype", "architectures", "_name_or_path"):
            layer_config.pop(name, None)
        values = {"layer_config": layer_config, "layer_idx": last_full_layer(text)}
        return super().from_target(target, **(values | overrides))

    @property
    def layer(self) -> PreTrainedConfig:
        fields = dict(self.layer_config or {})
        return CONFIG_MAPPING[fields.pop("model_type")].from_dict(fields)

    @property
    def head_dim(self) -> int:
        config: Any = self.layer
        return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    def check_types(self) -> None:
        super().check_types()
        fields, where = self.layer_config or {}, "layer_config in the draft's config.json"
        if not isinstance(kind := fields.get("model_type"), str) or kind not in CONFIG_MAPPING:
            raise ValueError(
                f"{where} has model_type={kind!r}, which this version of transformers does not know. Make the draft "
                "with from_target(target), or install the version that wrote it."
            )
        check_sizes(where, fields)
        with readable(where, fields, CONFIG_MAPPING[kind].from_dict):
            self.layer  # noqa: B018
        if not 0 <= self.layer_idx < (layers := fields.get("num_hidden_layers", 0)) or self.num_mtp_layers < 1:
            raise ValueError(
                f"layer_idx={self.layer_idx} and num_mtp_layers={self.num_mtp_layers} in the draft's config.json: "
                f"expected a layer from 0 to {layers - 1} and at least one MTP layer. Correct the file."
            )
