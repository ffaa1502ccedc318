"""LongSpec: a draft of one block that reads the cache of its target."""

from ..register_draft import register_draft
from .modeling_longspec import LongSpecConfig, LongSpecDraftModel

__all__ = ["LongSpecConfig", "LongSpecDraftModel"]

register_draft(
    LongSpecConfig,
    LongSpecDraftModel,
    training="hf_longspec.modeling.longspec.training_longspec:LongSpecMethod",
    convert="hf_longspec.modeling.longspec.convert_longspec:LONGSPEC",
    card="hf_longspec.hub:templates/longspec.md",
)
