"""Gemma 4 assistants: small models without keys of their own, which attend to the cache of their target."""

from ..register_draft import register_draft
from .modeling_gemma4_assistant import Gemma4AssistantDraftConfig, Gemma4AssistantDraftModel

__all__ = ["Gemma4AssistantDraftConfig", "Gemma4AssistantDraftModel"]

register_draft(
    Gemma4AssistantDraftConfig,
    Gemma4AssistantDraftModel,
    convert="hf_longspec.modeling.gemma4_assistant.convert_gemma4_assistant:GEMMA4_ASSISTANT",
    reads="hf_longspec.modeling.gemma4_assistant.convert_gemma4_assistant:is_gemma4_assistant",
    card="hf_longspec.hub:templates/gemma4_assistant.md",
)
