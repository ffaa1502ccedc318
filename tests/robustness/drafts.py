"""Drafts of every kind for the tests of this folder, small enough that something is drafted, refused and accepted."""

from typing import Any

from hf_longspec import (
    AssistantDraftModel,
    DFlashDraftModel,
    Eagle3DraftModel,
    LongSpecDraftModel,
    NgramDraftModel,
    PlainDraftModel,
    QuestDraftModel,
    SpecAttnDraftModel,
    TokenRecyclingDraftModel,
    TokenSwiftDraftModel,
)
from tests.tiny_targets import randomize

SPECATTN = {"num_assistant_tokens": 3, "sparse_ratio": 0.5, "sparse_min_tokens": 6}
PARTIAL = {"self_draft": "partial_kv", "partial_kv_budget": 16, "partial_kv_recent": 4}
_DRAFTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (PlainDraftModel, {}),
    "ngram": (NgramDraftModel, {}),
    "specattn": (SpecAttnDraftModel, SPECATTN),
    "longspec": (LongSpecDraftModel, {"window": 8, "tree_widths": [40, 39]}),
    "tokenswift": (TokenSwiftDraftModel, {"num_heads": 2, "tree_branching": [1, 30, 4]}),
    "partial": (TokenSwiftDraftModel, {"num_heads": 2, "tree_branching": [3, 4, 2]} | PARTIAL),
    "eagle3": (Eagle3DraftModel, {"tree_widths": [12, 11]}),
    "dflash": (DFlashDraftModel, {"num_tree_nodes": 24, "block_size": 4}),
    "recycling": (TokenRecyclingDraftModel, {}),
    "quest": (QuestDraftModel, SPECATTN | {"sparse_ratio": 0.3, "page_size": 3, "num_dense_layers": 0}),
    # the target drafts for itself over a window
    "assistant": (AssistantDraftModel, {"num_assistant_tokens": 3, "window": 16, "sinks": 2}),
}
ALL_KINDS = tuple(_DRAFTS)
KINDS = ("plain", "ngram", "specattn", "longspec", "tokenswift", "partial")


def make_draft(kind: str, target: Any, **settings: Any) -> Any:
    """A draft of `kind` for `target`; its weights, if it has any, are random and always the same."""
    cls, defaults = _DRAFTS[kind]
    draft = cls.from_target(target, **(defaults | settings))
    if not cls.weightless:
        randomize(draft)
    draft.generation_config.on_unsupported = "error"
    draft.generation_config.gate = False  # of other processes as well, which the tests' own gate does not reach
    return draft
