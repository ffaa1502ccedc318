"""Drafts of every kind for the tests of this folder, small enough that something is drafted, refused and accepted."""

from typing import Any

from hf_longspec import (
    AssistantDraftModel,
    NgramDraftModel,
    PlainDraftModel,
    QuestDraftModel,
    SpecAttnDraftModel,
    TokenRecyclingDraftModel,
)
from tests.tiny_targets import random_eagle3_draft, random_longspec_draft, random_tokenswift_draft

SPECATTN = {"num_assistant_tokens": 3, "sparse_ratio": 0.5, "sparse_min_tokens": 6}
QUEST = SPECATTN | {"sparse_ratio": 0.3, "page_size": 3, "num_dense_layers": 0}

_MAKERS: dict[str, Any] = {
    "plain": PlainDraftModel.from_target,
    "ngram": NgramDraftModel.from_target,
    "specattn": lambda target, **settings: SpecAttnDraftModel.from_target(target, **(SPECATTN | settings)),
    "longspec": lambda target, **settings: random_longspec_draft(
        target, **({"window": 8, "tree_widths": [40, 39]} | settings)
    ),
    "tokenswift": lambda target, **settings: random_tokenswift_draft(
        target, **({"num_heads": 2, "tree_branching": [1, 30, 4]} | settings)
    ),
    "partial": lambda target, **settings: random_tokenswift_draft(
        target,
        **(
            {"num_heads": 2, "tree_branching": [3, 4, 2], "self_draft": "partial_kv"}
            | {"partial_kv_budget": 16, "partial_kv_recent": 4}
            | settings
        ),
    ),
}
KINDS = tuple(_MAKERS)
_OTHERS: dict[str, Any] = {
    "eagle3": lambda target, **settings: random_eagle3_draft(target, **({"tree_widths": [12, 11]} | settings)),
    "recycling": TokenRecyclingDraftModel.from_target,
    "quest": lambda target, **settings: QuestDraftModel.from_target(target, **(QUEST | settings)),
    # the target drafts for itself over a window
    "assistant": lambda target, **settings: AssistantDraftModel.from_target(
        target, **({"num_assistant_tokens": 3, "window": 16, "sinks": 2} | settings)
    ),
}


def make_draft(kind: str, target: Any, **settings: Any) -> Any:
    """A draft of `kind` for `target`; its weights, if it has any, are random and always the same."""
    draft = (_MAKERS | _OTHERS)[kind](target, **settings)
    draft.generation_config.on_unsupported = "error"
    draft.generation_config.gate = False  # of other processes as well, which the tests' own gate does not reach
    return draft
