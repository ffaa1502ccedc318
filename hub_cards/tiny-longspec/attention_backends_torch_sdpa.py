# Published with a draft by hf_longspec, Apache-2.0.
"""The backend that needs only torch: `hf_longspec_torch`. Keys are never repeated, and a prefix gets no mask.

Prefixes of different lengths are cut to size and computed row by row; equal ones in one call on a slice of the cache.
What the fused op cannot do (softcap; on CUDA any mask) runs as matrix products over blocks of keys.
"""

import torch

from .attention_backends_masks import ExplicitMask, PositionMask, prefix_mask
from .attention_backends_merge import AttentionState, concatenate, merge_attention_states, nothing_visible
from .attention_backends_reference import WINDOW_WITHOUT_POSITIONS
from .attention_backends_registry import AttentionBackend, AttentionCall, register_backend
from .attention_backends_slots import attention_to_copies, shared_length
from .attention_backends_torch_causal import BLOCK_QUERIES, causal_attention
from .attention_backends_torch_hybrid import hybrid_attention
from .attention_backends_torch_packed import attend_all, attend_masked, attend_packed

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def prefix_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scaling: float,
    positions: torch.Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    host_lengths: tuple[int, ...] | None = None,
) -> AttentionState:
    """N queries against the committed prefix; see reference.py.

    Without `host_lengths`, `lengths` is read back; where that would break a graph, all slots are read under a mask.
    """
    if sliding_window is not None and positions is None:
        raise ValueError(WINDOW_WITHOUT_POSITIONS.format(sliding_window))
    if host_lengths is None:
        if torch.compiler.is_compiling():
            mask = prefix_mask(lengths, key.shape[2], query.shape[2], positions, sliding_window)
            return attend_packed(query, key, value, mask, scaling=scaling, softcap=softcap)
        host_lengths = tuple(lengths.tolist())
    window = None if sliding_window is None or positions is None else (positions, sliding_window)
    shared = shared_length(host_lengths)
    if shared is not None:
        return _attend_prefix(query, key, value, shared, window, scaling, softcap)
    rows = []
    for b, length in enumerate(host_lengths):
        row = slice(b, b + 1)
        own = None if window is None else (window[0][row], window[1])
        rows.append(_attend_prefix(query[row], key[row], value[row], length, own, scaling, softcap))
    return concatenate(rows, dim=0)


def tree_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
) -> AttentionState:
    """N queries against M keys under an explicit mask; see reference.py."""
    mask = mask[:, None] if mask.dim() == 3 else mask
    blocks = []
    for row in range(0, max(1, query.shape[2]), BLOCK_QUERIES):
        rows = slice(row, row + BLOCK_QUERIES)
        visible = ExplicitMask(mask[:, :, rows], query.dtype)
        blocks.append(attend_masked(query[:, :, rows], key, value, visible, scaling=scaling, softcap=softcap))
    return concatenate(blocks, dim=2)


def why_not(call: AttentionCall) -> str | None:
    """Devices, sizes and features are all accepted; the dtype must be an ordinary floating point one."""
    if call.dtype in DTYPES:
        return None
    return f"dtype is {call.dtype}, expected one of {', '.join(str(dtype) for dtype in DTYPES)}"


def _attend_prefix(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    length: int,
    window: tuple[torch.Tensor, int] | None,
    scaling: float,
    softcap: float | None,
) -> AttentionState:
    """Rows of one length. Of a window `(positions, size)`, only the keys that some queries do not see get a mask."""
    if window is None:
        return attend_all(query, key, value, 0, length, scaling=scaling, softcap=softcap)
    positions, size = window
    start, inner = _window_bounds(positions, size, length)
    parts = []
    if inner < length:
        parts.append(attend_all(query, key, value, inner, length, scaling=scaling, softcap=softcap))
    if start < inner:
        mask = PositionMask(positions, start, size, causal=False, dtype=query.dtype)
        edge = key[:, :, start:inner], value[:, :, start:inner]
        parts.append(attend_masked(query, *edge, mask, scaling=scaling, softcap=softcap))
    return merge_attention_states(parts) if parts else nothing_visible(query, value)


def _window_bounds(positions: torch.Tensor, sliding_window: int, length: int) -> tuple[int, int]:
    """First slot that any query sees, first slot that all queries see."""
    if positions.is_cpu and not torch.compiler.is_compiling():
        seen = [position for row in positions.tolist() for position in row]
        first, last = min(seen), max(seen)
        return min(length, max(0, first - sliding_window + 1)), min(length, max(0, last - sliding_window + 1))
    # Reading positions would wait for the device in every layer, or break a graph. They are length - 1 at least; how
    # far they go stays unknown, so the whole window gets a mask.
    return max(0, length - sliding_window), length


TORCH_BACKEND = register_backend(
    AttentionBackend(
        name="hf_longspec_torch",
        prefix_attention=prefix_attention,
        tree_attention=tree_attention,
        sparse_attention=attention_to_copies(prefix_attention),  # reads `counts` back
        causal_attention=causal_attention,
        why_not=why_not,
        hybrid_attention=hybrid_attention,
    ),
    priority=10,
)
