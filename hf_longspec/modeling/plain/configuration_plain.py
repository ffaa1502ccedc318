"""Configuration of the draft that drafts nothing."""

from ..configuration_base import DraftConfig


class PlainConfig(DraftConfig):
    """Configuration of [`PlainDraftModel`]."""

    model_type = "longspec_plain"
