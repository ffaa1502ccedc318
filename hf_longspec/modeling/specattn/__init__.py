"""SpecAttn: the target drafts for itself."""

from ..register_draft import register_draft
from .modeling_specattn import SpecAttnConfig, SpecAttnDraftModel

__all__ = ["SpecAttnConfig", "SpecAttnDraftModel"]

register_draft(
    SpecAttnConfig,
    SpecAttnDraftModel,
    card="hf_longspec.hub:templates/specattn.md",
    aliases=("vegas",),  # its authors renamed it
    presets={"self-int4": {"draft_weights": "int4", "num_assistant_tokens": 6}},
)
