"""Quest: the target drafts for itself over the pages that fit each query."""

from ..register_draft import register_draft
from .modeling_quest import QuestConfig, QuestDraftModel

__all__ = ["QuestConfig", "QuestDraftModel"]

register_draft(
    QuestConfig,
    QuestDraftModel,
    tune="hf_longspec.cli.tune:tune_self_draft",
    card="hf_longspec.hub:templates/quest.md",
    aliases=("magicdec",),  # self-speculation with Quest's selection
)
