"""EAGLE-3: a draft of one layer that reads states of three layers of the target."""

from ..register_draft import register_draft
from .modeling_eagle3 import Eagle3Config, Eagle3DraftModel

__all__ = ["Eagle3Config", "Eagle3DraftModel"]

register_draft(
    Eagle3Config,
    Eagle3DraftModel,
    training="hf_longspec.modeling.eagle3.training_eagle3:Eagle3Method",
    convert="hf_longspec.modeling.eagle3.convert_eagle3:EAGLE3",
    reads="hf_longspec.modeling.eagle3.convert_eagle3:is_eagle3",
    card="hf_longspec.hub:templates/eagle3.md",
)
