"""TokenSwift: heads on the last hidden state of the target."""

from ..register_draft import register_draft
from .modeling_tokenswift import TokenSwiftConfig, TokenSwiftDraftModel

__all__ = ["TokenSwiftConfig", "TokenSwiftDraftModel"]

register_draft(
    TokenSwiftConfig,
    TokenSwiftDraftModel,
    training="hf_longspec.modeling.tokenswift.training_tokenswift:TokenSwiftMethod",
    convert="hf_longspec.modeling.tokenswift.convert_tokenswift:TOKENSWIFT",
    card="hf_longspec.hub:templates/tokenswift.md",
)
