"""Token Recycling: candidates from the target's own logits at earlier occurrences of a token."""

from ..register_draft import register_draft
from .modeling_token_recycling import TokenRecyclingConfig, TokenRecyclingDraftModel

__all__ = ["TokenRecyclingConfig", "TokenRecyclingDraftModel"]

register_draft(
    TokenRecyclingConfig,
    TokenRecyclingDraftModel,
    card="hf_longspec.hub:templates/token_recycling.md",
    aliases=("recycling",),
)
