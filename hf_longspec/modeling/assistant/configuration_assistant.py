"""Configuration of a draft by another causal language model."""

from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from ..configuration_base import DraftConfig, text_config


class AssistantConfig(DraftConfig):
    """
    Configuration of [`AssistantDraftModel`].

    Args:
        assistant_name_or_path (`str`, *optional*): Hub id or folder of the model that drafts; `"./assistant"` if it is
            part of the saved draft. By default the target drafts for itself.
        pard_token (`int`, *optional*): Mask token of a model that was trained with PARD, which then proposes all tokens
            in one forward.
    """

    model_type = "longspec_assistant"

    assistant_name_or_path: str | None = None
    pard_token: int | None = None

    @classmethod
    def describe(cls, target: PreTrainedModel | PreTrainedConfig) -> dict[str, Any]:
        """Return the vocabulary size of a target, which is all that the draft depends on."""
        return {"vocab_size": text_config(target).vocab_size}
