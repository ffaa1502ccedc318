"""MTP: the layers for multi-token prediction that lie in the target's own checkpoint, as a draft."""

from ..register_draft import register_draft
from .modeling_mtp import MtpConfig, MtpDraftModel

__all__ = ["MtpConfig", "MtpDraftModel"]

register_draft(
    MtpConfig,
    MtpDraftModel,
    training="hf_longspec.modeling.mtp.training_mtp:MtpMethod",
    card="hf_longspec.hub:templates/mtp.md",
)
