"""Configuration of the training-free SpecAttn draft."""

from ..configuration_base import DraftConfig


class SpecAttnConfig(DraftConfig):
    """Configuration of [`SpecAttnDraftModel`]: the target's shapes only, as there are no weights."""

    model_type = "specattn"
