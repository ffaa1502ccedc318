"""The two things the torch backend is made of: attention to all of some keys, and to some of them under a mask."""

import torch

from .masks import KeyMask
from .merge import AttentionState
from .torch_blockwise import blockwise_attention
from .torch_fused import can_fuse, fused_attention

# The CPU op works on 32 rows at a time. A lone row among the last 32 becomes a matrix-vector product, which in bfloat16
# takes 3 times as long as two rows do (2,154 against 624 microseconds: 4,096 keys, 2 heads, D=128, Zen 5); three rows
# take 1.5 times as long as four. A copy of the first row is added then. Index: whether the dtype is float32.
SLOW_TAILS = ((1, 3), (3,))


def attend_all(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scaling: float, softcap: float | None = None
) -> AttentionState:
    """All queries see all keys.

    The G = H // K query heads of one key/value head become G * N rows of it: the fused op reads every key once instead
    of G times, and one query per step is a small matrix instead of G vectors.

    Args:
        query (`torch.Tensor` of shape `(B, H, N, D)`): Queries.
        key (`torch.Tensor` of shape `(B, K, M, D)`): Keys.
        value (`torch.Tensor` of shape `(B, K, M, Dv)`): Values.
        scaling (`float`): Factor of the scores.
        softcap (`float`, *optional*): Scores become `softcap * tanh(scores / softcap)`.

    Returns:
        `(out, lse)` of shapes `(B, H, N, Dv)` and `(B, H, N)`.
    """
    if softcap is not None or not can_fuse(query, value):
        return blockwise_attention(query, key, value, scaling=scaling, softcap=softcap)
    batch, heads, nodes, size = query.shape
    kv_heads = key.shape[1]
    rows = heads // kv_heads * nodes
    packed = query.reshape(batch, kv_heads, rows, size)
    slow = rows & 31 in SLOW_TAILS[query.dtype == torch.float32] and query.is_cpu
    if slow:
        packed = torch.cat([packed, packed[:, :, :1]], dim=2)
    out, lse = fused_attention(packed, key, value, scaling=scaling)
    if slow:
        out, lse = out[:, :, :rows], lse[:, :, :rows]
    return out.reshape(batch, heads, nodes, -1), lse.reshape(batch, heads, nodes)


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
