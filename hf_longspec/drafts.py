"""Every draft; importing it registers the attention backends, the Auto classes and the route of `generate`."""

from .modeling.assistant import AssistantConfig, AssistantDraftModel
from .modeling.base import DraftModel
from .modeling.configuration_base import DraftConfig
from .modeling.dflash import DFlashConfig, DFlashDraftModel
from .modeling.eagle3 import Eagle3Config, Eagle3DraftModel
from .modeling.gemma4_assistant import Gemma4AssistantDraftConfig, Gemma4AssistantDraftModel
from .modeling.longspec import LongSpecConfig, LongSpecDraftModel
from .modeling.mtp import MtpConfig, MtpDraftModel
from .modeling.ngram import NgramConfig, NgramDraftModel
from .modeling.plain import GrammarConfig, GrammarDraftModel, PlainConfig, PlainDraftModel
from .modeling.register_draft import register_draft
from .modeling.specattn import SpecAttnConfig, SpecAttnDraftModel
from .modeling.tokenswift import TokenSwiftConfig, TokenSwiftDraftModel

__all__ = [
    "AssistantConfig",
    "AssistantDraftModel",
    "DFlashConfig",
    "DFlashDraftModel",
    "DraftConfig",
    "DraftModel",
    "Eagle3Config",
    "Eagle3DraftModel",
    "Gemma4AssistantDraftConfig",
    "Gemma4AssistantDraftModel",
    "GrammarConfig",
    "GrammarDraftModel",
    "LongSpecConfig",
    "LongSpecDraftModel",
    "MtpConfig",
    "MtpDraftModel",
    "NgramConfig",
    "NgramDraftModel",
    "PlainConfig",
    "PlainDraftModel",
    "SpecAttnConfig",
    "SpecAttnDraftModel",
    "TokenSwiftConfig",
    "TokenSwiftDraftModel",
    "register_draft",
]
