"""The plain loop, and the loop with tokens that a grammar forces: drafts that propose nothing by themselves."""

from ..register_draft import register_draft
from .modeling_plain import GrammarConfig, GrammarDraftModel, PlainConfig, PlainDraftModel

__all__ = ["GrammarConfig", "GrammarDraftModel", "PlainConfig", "PlainDraftModel"]

register_draft(PlainConfig, PlainDraftModel, card="hf_longspec.hub:templates/longspec_plain.md")
register_draft(GrammarConfig, GrammarDraftModel, card="hf_longspec.hub:templates/longspec_grammar.md")
