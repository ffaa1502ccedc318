"""Configuration of the training-free Token Recycling draft."""

from ..configuration_base import DraftConfig


class TokenRecyclingConfig(DraftConfig):
    """Configuration of [`TokenRecyclingDraftModel`]: the target's shapes only, as there are no weights."""

    model_type = "longspec_token_recycling"
