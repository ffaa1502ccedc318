"""Grammar: the tokens that a structured output forces, a draft without a model."""

from ..register_draft import register_draft
from .modeling_grammar import GrammarConfig, GrammarDraftModel

__all__ = ["GrammarConfig", "GrammarDraftModel"]

register_draft(
    GrammarConfig,
    GrammarDraftModel,
    card="hf_longspec.hub:templates/longspec_grammar.md",
)
