"""Base of all draft configurations, with the fields that describe the target."""

from inspect import get_annotations
from types import NoneType, UnionType
from typing import Any, Self, get_args, get_origin

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN

from ..generation.target_modules import shape_of

# Fields that a draft copies from the target's text config. A target that differs in one of them is refused.
TARGET_SHAPES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


# Largest value of each size in a config.json, far above those of any model, so that a damaged file cannot take all
# memory.
MOST = {
    "vocab_size": 2**24,
    "hidden_size": 2**17,
    "intermediate_size": 2**20,
    "num_attention_heads": 2**12,
    "num_key_value_heads": 2**12,
    "head_dim": 2**13,
    "window": 2**20,
    "kv_layer": 2**12,
    "noise_range": 2**12,
    "num_heads": 2**8,
}


def is_packaged(cls: type) -> bool:
    """Return whether a class is part of the installed package, not of a copy that transformers loaded."""
    return cls.__module__.split(".")[0] == "hf_longspec"


class DraftConfig(PreTrainedConfig):
    """
    Configuration of a draft.

    Args:
        vocab_size (`int`, *optional*, defaults to 0): Vocabulary size of the target, which transformers compares before
            assisted decoding.
        target (`dict[str, Any]`, *optional*): Shapes and `model_type` of the target.
        target_name_or_path (`str`, *optional*): Id or folder that the target was loaded from.
    """

    model_type = "longspec_draft"

    # Fields instead of an __init__, as transformers turns every subclass into a dataclass, which replaces __init__.
    vocab_size: int = 0
    target: dict[str, Any] | None = None
    target_name_or_path: str | None = None

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Let `save_pretrained` write the code too, except for a class of the installed package."""
        if not is_packaged(cls):
            super().register_for_auto_class(auto_class)

    @classmethod
    def from_target(cls, target: PreTrainedModel | PreTrainedConfig, **overrides: Any) -> Self:
        """Return the configuration of a draft for `target`.

        Args:
            target (`PreTrainedModel` or `PreTrainedConfig`): The target or its configuration.
            overrides (`Any`): Fields of the configuration by name.
        """
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

    def check_types(self) -> None:
        """Check the types of all fields, as a config.json may hold values of any type.

        Raises:
            ValueError: If a field has a wrong type or a negative value, or `hidden_act` is no known activation.
        """
        for kind in type(self).__mro__:
            if not issubclass(kind, DraftConfig):
                break
            for name, hint in get_annotations(kind).items():
                if name != "model_type":
                    _check_type(name, getattr(self, name), hint)
                    _check_size(name, getattr(self, name))
        if (activation := getattr(self, "hidden_act", "silu")) not in ACT2FN:
            raise ValueError(
                f"hidden_act={activation!r} in the draft's config.json: expected the name of an activation of "
                "transformers, such as 'silu'."
            )

    @classmethod
    def describe(cls, target: PreTrainedModel | PreTrainedConfig) -> dict[str, Any]:
        """Return model type and shapes of a target, which a draft records and compares before drafting."""
        text = text_config(target)
        return {"model_type": text.model_type} | {name: shape_of(text, name) for name in TARGET_SHAPES}


def _check_type(name: str, value: Any, hint: Any) -> None:
    choices = get_args(hint) if get_origin(hint) is UnionType else (hint,)
    kinds = tuple(get_origin(choice) or choice for choice in choices)
    fits = isinstance(value, (*kinds, int) if float in kinds else kinds)
    if isinstance(value, bool) and bool not in kinds:
        fits = False
    if not fits or (isinstance(value, int) and value < 0):
        names = " or ".join("null" if kind is NoneType else kind.__name__ for kind in kinds)
        rule = f"{names} of at least 0" if kinds == (int,) else names
        raise ValueError(f"{name}={value!r} in the draft's config.json: expected {rule}. Correct the file.")


def _check_size(name: str, value: Any) -> None:
    sizes = value if isinstance(value, list | tuple) else [value]
    if name in MOST and any(isinstance(size, int) and size > MOST[name] for size in sizes):
        raise ValueError(
            f"{name}={value!r} in the draft's config.json: expected at most {MOST[name]:,}. Correct the file."
        )


def text_config(target: PreTrainedModel | PreTrainedConfig) -> Any:
    """Return the part of a model's configuration that describes its language model."""
    return getattr(target, "config", target).get_text_config(decoder=True)
