"""Configuration of the draft made of n-grams."""

from ..configuration_base import DraftConfig


class NgramConfig(DraftConfig):
    """Configuration of [`NgramDraftModel`]: the target's shapes only, as there are no weights."""

    model_type = "longspec_ngram"
