# Published with a draft by hf_longspec, Apache-2.0.
"""Packed heads, and the two things the torch backend is made of: attention to all of some keys, or to a part of them.

The G = H // K query heads that share a key/value head become G * N rows of one head. The fused op then reads every key
once instead of G times, and a single query per step is a small matrix instead of G vectors.
"""

import torch

from .attention_backends_masks import ExplicitMask, KeyMask, additive_mask
from .attention_backends_merge import AttentionState
from .attention_backends_torch_blockwise import blockwise_attention
from .attention_backends_torch_fused import can_fuse, fused_attention

# The CPU op works on 32 rows at a time. A lone row among the last 32 becomes a matrix-vector product, which in bfloat16
# takes 3 times as long as two rows do (2,154 against 624 microseconds: 4,096 keys, 2 heads, D=128, AMD EPYC with AVX2);
# three rows take 1.5 times as long as four. A copy of the first row is added then. Index: whether it is float32.
SLOW_TAILS = ((1, 3), (3,))


def attend_all(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    start: int,
    stop: int,
    *,
    scaling: float,
    softcap: float | None = None,
) -> AttentionState:
    """All queries see the keys from `start` to `stop`, and no others.

    Args:
        query (`torch.Tensor` of shape `(B, H, N, D)`): Queries.
        key (`torch.Tensor` of shape `(B, K, S, D)`): Keys.
        value (`torch.Tensor` of shape `(B, K, S, Dv)`): Values.
        start (`int`): First key that is seen.
        stop (`int`): Key behind the last that is seen.
        scaling (`float`): Factor of the scores.
        softcap (`float`, *optional*): Scores become `softcap * tanh(scores / softcap)`.

    Returns:
        `(out, lse)` of shapes `(B, H, N, Dv)` and `(B, H, N)`.
    """
    if softcap is not None or not can_fuse(query, value):
        seen = key[:, :, start:stop], value[:, :, start:stop]
        return blockwise_attention(query, *seen, scaling=scaling, softcap=softcap)
    seen = one_head(key, start, stop), one_head(value, start, stop)
    return unpack(fused_attention(pack(query, key.shape[1]), *seen, scaling=scaling), query.shape)


def attend_masked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: KeyMask,
    *,
    scaling: float,
    softcap: float | None = None,
) -> AttentionState:
    """The queries see the keys that a mask leaves.

    Args:
        query (`torch.Tensor` of shape `(B, H, N, D)`): Queries.
        key (`torch.Tensor` of shape `(B, K, M, D)`): Keys.
        value (`torch.Tensor` of shape `(B, K, M, Dv)`): Values.
        mask (`Callable`): `mask(start, stop)` is the additive mask of those keys, broadcastable to `(B, H, N, M)`.
        scaling (`float`): Factor of the scores.
        softcap (`float`, *optional*): Scores become `softcap * tanh(scores / softcap)`.

    Returns:
        `(out, lse)` of shapes `(B, H, N, Dv)` and `(B, H, N)`.
    """
    if softcap is None and can_fuse(query, value, masked=True):
        return fused_attention(query, key, value, mask(0, key.shape[2]), scaling=scaling)
    return blockwise_attention(query, key, value, mask, scaling=scaling, softcap=softcap)


def attend_packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
) -> AttentionState:
    """The same for few queries and a mask `(B, N, M)` that exists, with packed heads."""
    if softcap is not None or not can_fuse(query, value, masked=True):
        visible = ExplicitMask(mask[:, None], query.dtype)
        return blockwise_attention(query, key, value, visible, scaling=scaling, softcap=softcap)
    kv_heads, length = key.shape[1], key.shape[2]
    packed_mask = pack_mask(additive_mask(mask, query.dtype), query, kv_heads)
    seen = one_head(key, 0, length), one_head(value, 0, length)
    return unpack(fused_attention(pack(query, kv_heads), *seen, packed_mask, scaling=scaling), query.shape)


def pack(query: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Queries `(B, H, N, D)` as `(B * K, 1, rows, D)`; row g * N + n is query n of head g of its group."""
    batch, heads, nodes, size = query.shape
    rows = heads // kv_heads * nodes
    packed = query.reshape(batch * kv_heads, 1, rows, size)
    return torch.cat([packed, packed[:, :, :1]], dim=2) if is_slow(rows, query) else packed


def pack_mask(mask: torch.Tensor, query: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """The additive mask `(B, N, M)` of queries `(B, H, N, D)` as `(B * K or 1, 1, rows, M)`, for packed queries."""
    packed = mask.repeat(1, query.shape[1] // kv_heads, 1)[:, None]
    if is_slow(packed.shape[2], query):
        packed = torch.cat([packed, packed[:, :, :1]], dim=2)
    return packed if packed.shape[0] == 1 else packed.repeat_interleave(kv_heads, dim=0)


def one_head(cached: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Slots `start` to `stop` of keys or values `(B, K, S, D)`, as `(B * K, 1, stop - start, D)`.

    The op writes `(batch, rows, heads, D)`. With one head per batch row this is `(B, H, N, D)` in memory, and nothing
    has to be copied to unpack it.

    Raises:
        ValueError: If there are fewer slots.
    """
    batch, heads, slots, size = cached.shape
    if stop > slots:
        raise ValueError(
            f"slots {start} to {stop} were asked for, but the buffer has {slots}. Hand over the whole buffer."
        )
    of_batch, of_head, of_slot, of_number = cached.stride()
    one_buffer = batch == 1 or of_batch == heads * of_head
    if not one_buffer or torch.compiler.is_compiling():
        return cached[:, :, start:stop].reshape(batch * heads, 1, stop - start, size)
    # One op instead of narrow and reshape: 4 microseconds per layer and buffer
    shape, strides = (batch * heads, 1, stop - start, size), (of_head, of_head, of_slot, of_number)
    return cached.as_strided(shape, strides, cached.storage_offset() + start * of_slot)


def unpack(state: AttentionState, shape: torch.Size) -> AttentionState:
    """The result of packed queries, whose shape was `(B, H, N, D)`, as `(B, H, N, Dv)` and `(B, H, N)`."""
    out, lse = state
    batch, heads, nodes, _ = shape
    rows = batch * heads * nodes // out.shape[0]
    if rows != out.shape[2]:
        out, lse = out[:, :, :rows].contiguous(), lse[:, :, :rows]
    return out.reshape(batch, heads, nodes, out.shape[3]), lse.reshape(batch, heads, nodes)


def is_slow(rows: int, query: torch.Tensor) -> bool:
    """Whether one row more is faster."""
    return rows & 31 in SLOW_TAILS[query.dtype == torch.float32] and query.is_cpu
