"""The drafts of examples/drafts, registered as a user's drafts are, and then taken out of the registry.

So a test that takes all drafts from the registry sees those of the package alone, whatever was imported before.
"""

from hf_longspec.modeling.register_draft import DRAFTS

_before = set(DRAFTS)
from examples.drafts.quest import PagedCache, QuestDrafter, QuestDraftModel, page_bounds  # noqa: E402
from examples.drafts.token_recycling import (  # noqa: E402
    CHANCES,
    TokenRecyclingDrafter,
    TokenRecyclingDraftModel,
    likely_tree,
    successors,
)

__all__ = [
    "CHANCES",
    "EXAMPLES",
    "PagedCache",
    "QuestDraftModel",
    "QuestDrafter",
    "TokenRecyclingDraftModel",
    "TokenRecyclingDrafter",
    "likely_tree",
    "page_bounds",
    "successors",
]

# By `config.model_type`, as in the registry.
EXAMPLES = {kind: DRAFTS.pop(kind) for kind in sorted(DRAFTS.keys() - _before)}
