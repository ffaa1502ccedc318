"""Configuration of the draft without drafted tokens."""

from ..configuration_base import DraftConfig


class PlainConfig(DraftConfig):
    """Configuration of [`PlainDraftModel`]: the target's shapes only."""

    model_type = "longspec_plain"
