"""hf_longspec: lossless speculative decoding at long context inside plain `model.generate()`.

Importing it registers the attention backends, the Auto classes and the route of `generate(assistant_model=draft)`.
"""

from importlib import import_module
from typing import Any

from .modeling.ngram import NgramConfig, NgramDraftModel  # first: modeling.base imports from this folder

# isort: split
from .modeling.assistant import AssistantConfig, AssistantDraftModel
from .modeling.base import DraftModel
from .modeling.configuration_base import DraftConfig
from .modeling.eagle3 import Eagle3Config, Eagle3DraftModel
from .modeling.longspec import LongSpecConfig, LongSpecDraftModel
from .modeling.plain import PlainConfig, PlainDraftModel
from .modeling.quest import QuestConfig, QuestDraftModel
from .modeling.register_draft import register_draft
from .modeling.specattn import SpecAttnConfig, SpecAttnDraftModel
from .modeling.token_recycling import TokenRecyclingConfig, TokenRecyclingDraftModel
from .modeling.tokenswift import TokenSwiftConfig, TokenSwiftDraftModel

__version__ = "0.1.0"

_LAZY = {
    "AuditReport": "auditing",
    "ContextualPenaltyLogitsProcessor": "generation.contextual_penalty",
    "DraftTree": "generation.draft_tree",
    "Drafter": "generation.drafter",
    "FileStreamer": "streaming",
    "IncrementalDecoder": "streaming",
    "SamplingReport": "auditing_sampling",
    "audit": "auditing",
    "audit_sampling": "auditing_sampling",
    "SpeculationStats": "generation.stats",
    "SpeculativeCache": "generation.cache",
}
__all__ = [
    "AssistantConfig",
    "AssistantDraftModel",
    "DraftConfig",
    "DraftModel",
    "Eagle3Config",
    "Eagle3DraftModel",
    "LongSpecConfig",
    "LongSpecDraftModel",
    "NgramConfig",
    "NgramDraftModel",
    "PlainConfig",
    "PlainDraftModel",
    "QuestConfig",
    "QuestDraftModel",
    "SpecAttnConfig",
    "SpecAttnDraftModel",
    "TokenRecyclingConfig",
    "TokenRecyclingDraftModel",
    "TokenSwiftConfig",
    "TokenSwiftDraftModel",
    "register_draft",
    *_LAZY,
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
