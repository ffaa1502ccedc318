"""The plain loop: a draft that proposes nothing."""

from ..register_draft import register_draft
from .modeling_plain import PlainConfig, PlainDraftModel

__all__ = ["PlainConfig", "PlainDraftModel"]

register_draft(PlainConfig, PlainDraftModel, card="hf_longspec.hub:templates/longspec_plain.md")
