"""Drafts of every registered kind, small enough that something is drafted, refused and accepted."""

from typing import Any

from hf_longspec.modeling.register_draft import DRAFTS
from tests.tiny_targets import made_for, randomize

SPECATTN = {"num_assistant_tokens": 3, "sparse_ratio": 0.5, "sparse_min_tokens": 6}
PARTIAL = {"self_draft": "partial_kv", "partial_kv_budget": 16, "partial_kv_recent": 4}
# Settings with which something is drafted on the tiny targets, by the short name of a draft. Others have the defaults.
SETTINGS: dict[str, dict[str, Any]] = {
    "specattn": SPECATTN,
    "longspec": {"window": 8, "tree_widths": [40, 39]},
    "tokenswift": {"num_heads": 2, "tree_branching": [1, 30, 4]},
    "eagle3": {"tree_widths": [12, 11]},
    "dflash": {"num_tree_nodes": 24, "block_size": 4},
    "mtp": {"tree_widths": [12, 11]},
    "gemma4_assistant": {"tree_widths": [12, 11]},
    # the target drafts for itself over a window
    "assistant": {"num_assistant_tokens": 3, "window": 16, "sinks": 2},
}
# Drafts that draft in another way with other settings: the short name of the draft, and the settings.
VARIANTS = {"partial": ("tokenswift", {"num_heads": 2, "tree_branching": [3, 4, 2]} | PARTIAL)}
_CLASSES = {name: draft.model for draft in DRAFTS.values() for name in draft.names}
ALL_KINDS = (*(draft.config.short_name() for draft in DRAFTS.values()), *VARIANTS)
# A few, for tests that take long.
KINDS = ("plain", "ngram", "specattn", "longspec", "tokenswift", "partial")


def make_draft(kind: str, target: Any, **settings: Any) -> Any:
    """A draft of `kind` for `target`; its weights, if it has any, are random and always the same."""
    name, defaults = VARIANTS.get(kind, (kind, SETTINGS.get(kind, {})))
    cls = _CLASSES[name]
    draft = made_for(cls, target, **(defaults | settings))
    if not cls.weightless:
        randomize(draft)
    draft.generation_config.on_unsupported = "error"
    draft.generation_config.gate = False  # of other processes as well, which the tests' own gate does not reach
    return draft
