# Published with a draft by hf_longspec, Apache-2.0.
"""The Triton kernels as operators of torch: what eager mode, torch.compile and CUDA graphs all see.

An operator is opaque to torch.compile, which knows from the fake implementations beside it what comes out. Lengths stay
on the device: nothing here depends on what is in a tensor, only on shapes.
"""

import torch

from .attention_backends_triton_combine import launch_combine
from .attention_backends_triton_prefix import launch_prefix, number_of_splits
from .attention_backends_triton_runtime import LIBRARY
from .attention_backends_triton_tree import launch_tree


@torch.library.custom_op(f"{LIBRARY}::triton_hybrid_attention", mutates_args=())
def hybrid_op(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: torch.Tensor,
    positions: torch.Tensor | None,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    last_node: torch.Tensor | None,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
    scores_per_row: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The prefix, with `mask` the staged nodes behind it, and with `last_node` the scores: `(out, lse, scores)`."""
    splits = number_of_splits(query, key, value)
    parts = splits + (mask is not None)
    out, lse = _partial_results(query, value, max(1, parts))
    if parts == 0:  # a cache without slots
        lse.fill_(-torch.inf)
    scores = _empty_scores(query, key, last_node, scores_per_row).fill_(-torch.inf)
    launch_prefix(
        query,
        key,
        value,
        lengths,
        out,
        lse,
        scaling=scaling,
        positions=positions,
        sliding_window=sliding_window,
        softcap=softcap,
        last_node=last_node,
        score=None if last_node is None else scores,
    )
    if mask is not None:
        launch_tree(query, key, value, mask, out, lse, scaling=scaling, softcap=softcap, lengths=lengths)
    return *launch_combine(out, lse, value, sinks), scores


@hybrid_op.register_fake
def _(
    query, key, value, lengths, positions, mask, sinks, last_node, scaling, sliding_window, softcap, scores_per_row
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return *_empty_state(query, value), _empty_scores(query, key, last_node, scores_per_row)


@torch.library.custom_op(f"{LIBRARY}::triton_tree_attention", mutates_args=())
def tree_op(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scaling: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys under an explicit mask: `(out, lse)`."""
    out, lse = _partial_results(query, value, 1)
    launch_tree(query, key, value, mask, out, lse, scaling=scaling, softcap=softcap)
    return launch_combine(out, lse, value)


@tree_op.register_fake
def _(query, key, value, mask, scaling, softcap) -> tuple[torch.Tensor, torch.Tensor]:
    return _empty_state(query, value)


def _partial_results(query: torch.Tensor, value: torch.Tensor, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (*query.shape[:3], parts)
    return query.new_empty(*shape, value.shape[3], dtype=torch.float32), query.new_empty(shape, dtype=torch.float32)


def _empty_state(query: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What `launch_combine` returns, not filled."""
    batch, heads, nodes, _ = query.shape
    out = value.new_empty(batch, nodes, heads, value.shape[3]).transpose(1, 2)
    return out, query.new_empty(batch, heads, nodes, dtype=torch.float32)


def _empty_scores(
    query: torch.Tensor, key: torch.Tensor, last_node: torch.Tensor | None, scores_per_row: bool
) -> torch.Tensor:
    if last_node is None:
        return query.new_empty(0, dtype=torch.float32)
    batch, kv_heads, slots, _ = key.shape
    rows = (2, query.shape[1] // kv_heads) if scores_per_row else ()
    return query.new_empty(batch, kv_heads, *rows, slots, dtype=torch.float32)
