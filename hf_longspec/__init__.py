"""hf_longspec: lossless speculative decoding at long context inside plain `model.generate()`.

Importing it registers the attention backends, the Auto classes and the route of `generate(assistant_model=draft)`.
"""

from importlib import import_module
from typing import Any

from transformers import AutoConfig, AutoModel

from .modeling.base import DraftModel
from .modeling.longspec.configuration_longspec import LongSpecConfig
from .modeling.longspec.modeling_longspec import LongSpecDraftModel
from .modeling.ngram.configuration_ngram import NgramConfig
from .modeling.ngram.modeling_ngram import NgramDraftModel
from .modeling.plain.configuration_plain import PlainConfig
from .modeling.plain.modeling_plain import PlainDraftModel
from .modeling.specattn.configuration_specattn import SpecAttnConfig
from .modeling.specattn.modeling_specattn import SpecAttnDraftModel
from .modeling.tokenswift.configuration_tokenswift import TokenSwiftConfig
from .modeling.tokenswift.modeling_tokenswift import TokenSwiftDraftModel

__version__ = "0.1.0"

_LAZY = {
    "AuditReport": "auditing",
    "ContextualPenaltyLogitsProcessor": "generation.contextual_penalty",
    "FileStreamer": "streaming",
    "IncrementalDecoder": "streaming",
    "SamplingReport": "auditing",
    "audit": "auditing",
    "audit_sampling": "auditing",
    "SpeculationStats": "generation.stats",
    "SpeculativeCache": "generation.cache",
}
_DRAFTS = {
    PlainConfig: PlainDraftModel,
    NgramConfig: NgramDraftModel,
    SpecAttnConfig: SpecAttnDraftModel,
    LongSpecConfig: LongSpecDraftModel,
    TokenSwiftConfig: TokenSwiftDraftModel,
}
__all__ = [
    "DraftModel",
    "LongSpecConfig",
    "LongSpecDraftModel",
    "NgramConfig",
    "NgramDraftModel",
    "PlainConfig",
    "PlainDraftModel",
    "SpecAttnConfig",
    "SpecAttnDraftModel",
    "TokenSwiftConfig",
    "TokenSwiftDraftModel",
    *_LAZY,
]

for _config, _model in _DRAFTS.items():
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
    AutoModel.register(_config, _model, exist_ok=True)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
