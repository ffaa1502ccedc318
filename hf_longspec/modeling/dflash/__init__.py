"""DFlash and its kin: a draft of a few layers fills in a block of tokens in one forward."""

from ..register_draft import register_draft
from .modeling_dflash import DFlashConfig, DFlashDraftModel

__all__ = ["DFlashConfig", "DFlashDraftModel"]

register_draft(
    DFlashConfig,
    DFlashDraftModel,
    training="hf_longspec.modeling.dflash.training_dflash:DFlashMethod",
    convert="hf_longspec.modeling.dflash.convert_dflash:DFLASH",
    reads="hf_longspec.modeling.dflash.convert_dflash:is_dflash",
    card="hf_longspec.hub:templates/dflash.md",
)
