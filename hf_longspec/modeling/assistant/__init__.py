"""Any causal language model as a draft."""

from ..register_draft import register_draft
from .modeling_assistant import AssistantConfig, AssistantDraftModel

__all__ = ["AssistantConfig", "AssistantDraftModel"]

register_draft(AssistantConfig, AssistantDraftModel, card="hf_longspec.hub:templates/assistant.md")
