"""Base of all draft configurations, with the fields that describe the target."""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from math import inf
from typing import Any, ClassVar, Self

import torch
from huggingface_hub.dataclasses import type_validator
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN

from ..generation.target_modules import shape_of
from .saved_config import FORMAT_FIELD, readable, require_version

# Fields that a draft copies from the target's text config. A target that differs in one of them is refused.
TARGET_SHAPES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")

# Smallest and largest value of each size in a config.json. The largest are far above those of any model, so that a
# damaged file cannot take all memory. Other integers are at least 0.
SIZES = {
    "vocab_size": (0, 2**24),
    "hidden_size": (0, 2**17),
    "intermediate_size": (0, 2**20),
    "num_hidden_layers": (1, 2**12),
    "num_attention_heads": (1, 2**12),
    "num_key_value_heads": (1, 2**12),
    "head_dim": (1, 2**13),
}
# Likewise in the configuration of a layer or a model of transformers.
LAYER_SIZES = SIZES | {
    "kv_lora_rank": (0, 2**17),
    "q_lora_rank": (0, 2**17),
    "qk_rope_head_dim": (0, 2**13),
    "qk_nope_head_dim": (0, 2**13),
    "v_head_dim": (0, 2**13),
    "moe_intermediate_size": (0, 2**20),
    "n_routed_experts": (0, 2**14),
    "num_experts": (0, 2**14),
}


def check_sizes(name: str, sizes: Mapping[str, Any]) -> None:
    """Refuse sizes out of range in a field of a config.json that holds the configuration of a layer."""
    for field, (least, most) in LAYER_SIZES.items():
        size = sizes.get(field, least)
        if isinstance(size, int) and not least <= size <= most:
            raise ValueError(f"{name} has {field}={size!r}: expected from {least} to {most:,}. Correct the file.")


def refuse_other_sizes(sizes: Mapping[str, tuple[int, int]]) -> None:
    """Refuse a target if a size of the draft, by name, is not that of the target."""
    for name, (recorded, size) in sizes.items():
        if recorded != size:
            raise ValueError(
                f"the draft has {name}={recorded}, but the target has {size}. Pass the target that the draft was "
                "trained for."
            )


class DraftConfig(PreTrainedConfig):
    """Configuration of a draft: the target's shapes, which are all that drafts without weights need.

    `sizes` are the ranges of a subclass's own fields, in addition to `SIZES`.
    """

    model_type = "longspec_draft"
    sizes: ClassVar[dict[str, tuple[int, int]]] = {}

    # Fields instead of an __init__, as transformers turns every subclass into a dataclass, which replaces __init__.
    vocab_size: int = 0
    target: dict[str, Any] | None = None
    target_name_or_path: str | None = None
    mean_acceptance_length: float | None = None  # tau on held-out text, from which the gate begins

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Return the configuration of a config.json.

        Raises:
            ValueError: If a field has a value that no configuration can have; the message names it. If the draft was
                published for a newer version of the package.
        """
        config_dict = dict(config_dict)
        if (version := config_dict.pop(FORMAT_FIELD, None)) is not None:
            require_version(version)

        def read(fields: dict[str, Any]) -> Any:
            loaded = super(DraftConfig, cls).from_dict(fields, **kwargs)
            config = loaded[0] if isinstance(loaded, tuple) else loaded
            config.to_dict()  # what cannot be written again
            if not isinstance(config.dtype, torch.dtype | str | None):
                raise TypeError("expected the name of a type, such as 'float32'")
            return loaded

        with readable("the draft's config.json", config_dict, read):
            return read(config_dict)

    @classmethod
    def short_name(cls) -> str:
        """Return the name of the draft on the command line and in messages."""
        return cls.model_type.removeprefix("longspec_")

    @classmethod
    def from_target(cls, target: PreTrainedModel | PreTrainedConfig, **overrides: Any) -> Self:
        return cls(**(cls.facts_of(target) | overrides))

    @classmethod
    def facts_of(cls, target: PreTrainedModel | PreTrainedConfig) -> dict[str, Any]:
        """Return the fields of a draft's configuration that follow from its target alone."""
        text = text_config(target)
        facts: dict[str, Any] = {
            "vocab_size": text.vocab_size,
            "target": cls.describe(target),
            "target_name_or_path": getattr(target, "config", target)._name_or_path or None,
        }
        # pipelines read these fields from the assistant's config
        return facts | {name: getattr(text, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}

    def refuse_other_target(self, target: PreTrainedModel | PreTrainedConfig) -> None:
        """Refuse a target that this draft was not made for, by the target's configuration."""
        shapes = self.describe(target)
        for name, recorded in (self.target or {}).items():
            if recorded != shapes.get(name):
                raise ValueError(
                    f"the draft was made for a target with {name}={recorded}, and this target has "
                    f"{name}={shapes.get(name)}. Load the draft of this target, or make one with from_target(target)."
                )

    def check_types(self) -> None:
        """Refuse fields of a wrong type, out of range, or that do not fit together: a config.json may hold anything."""
        of_all = {field.name for field in fields(PreTrainedConfig)}
        for name, hint in ((field.name, field.type) for field in fields(self) if field.name not in of_all):
            value, (least, most) = getattr(self, name), (SIZES | self.sizes).get(name, (0, inf))
            numbers = [n for n in (value if isinstance(value, list | tuple) else [value]) if isinstance(n, int)]
            rule = f"at least {least}" if any(n < least for n in numbers) else ""
            rule = f"at most {most:,}" if any(n > most for n in numbers) else rule
            try:
                type_validator(name, value, float | int if hint is float else hint)
            except TypeError:
                rule = getattr(hint, "__name__", "") or str(hint).replace("typing.", "")
            if rule:
                raise ValueError(f"{name}={value!r} in the draft's config.json: expected {rule}. Correct the file.")
        if (activation := getattr(self, "hidden_act", "silu")) not in ACT2FN:
            raise ValueError(
                f"hidden_act={activation!r} in the draft's config.json: expected the name of an activation of "
                "transformers, such as 'silu'."
            )
        for reason in self.contradictions():
            raise ValueError(f"{reason}. Correct the draft's config.json, or use another draft.")

    def contradictions(self) -> Iterable[str]:
        """Yield which fields of the right types do not fit together, and the rule."""
        return ()

    @classmethod
    def describe(cls, target: PreTrainedModel | PreTrainedConfig) -> dict[str, Any]:
        """Return model type and shapes of a target, which a draft records and compares before drafting."""
        text = text_config(target)
        return {"model_type": text.model_type} | {name: shape_of(text, name) for name in TARGET_SHAPES}


def text_config(target: PreTrainedModel | PreTrainedConfig) -> Any:
    """Return the part of a model's configuration that describes its language model."""
    return getattr(target, "config", target).get_text_config(decoder=True)
