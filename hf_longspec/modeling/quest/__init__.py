"""Quest: the target drafts for itself over the pages that fit each query."""

from ..register_draft import register_draft
from .configuration_quest import QuestConfig
from .modeling_quest import QuestDraftModel

__all__ = ["QuestConfig", "QuestDraftModel"]

register_draft(
    QuestConfig,
    QuestDraftModel,
    card="hf_longspec.hub:templates/quest.md",
    aliases=("magicdec",),  # self-speculation with Quest's selection
)
