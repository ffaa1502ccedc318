"""N-grams: a draft without a model."""

from ..register_draft import register_draft
from .modeling_ngram import NgramConfig, NgramDraftModel

__all__ = ["NgramConfig", "NgramDraftModel"]

register_draft(NgramConfig, NgramDraftModel, card="hf_longspec.hub:templates/longspec_ngram.md")
