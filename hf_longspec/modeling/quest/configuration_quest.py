"""Configuration of the training-free Quest draft."""

from ..configuration_base import DraftConfig


class QuestConfig(DraftConfig):
    """Configuration of [`QuestDraftModel`]: the target's shapes only, as there are no weights."""

    model_type = "longspec_quest"
