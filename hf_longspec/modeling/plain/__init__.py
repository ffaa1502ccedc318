"""The plain loop: a draft that proposes nothing."""

from ..register_draft import register_draft
from .configuration_plain import PlainConfig
from .modeling_plain import PlainDraftModel

__all__ = ["PlainConfig", "PlainDraftModel"]

register_draft(
    PlainConfig,
    PlainDraftModel,
    card="hf_longspec.hub:templates/longspec_plain.md",
)
