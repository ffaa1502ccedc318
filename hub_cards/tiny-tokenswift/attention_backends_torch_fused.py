# Published with a draft by hf_longspec, Apache-2.0.
"""One call of torch's fused attention op, with its log-sum-exp and without its traps.

On CPU the op is `_scaled_dot_product_flash_attention_for_cpu`, on CUDA `_scaled_dot_product_flash_attention`. The CUDA
call is written from the documented signature and has never been run. What the CPU op does when it is left alone (torch
2.13, each pinned in tests/attention_backends/test_torch_fused.py):

    no keys or no queries          the process dies of SIGFPE
    last stride other than 1       wrong numbers, no error
    a query that sees no key       log-sum-exp 0 instead of -inf
    boolean mask                   refused
    value size other than D        refused
    is_causal with N < M           top-left aligned: query n sees the first n + 1 keys
"""

import torch
from torch.nn.functional import pad

from .attention_backends_merge import AttentionState, nothing_visible

# The op itself, not torch.ops.aten: the same function costs 3 microseconds less per call through the C binding.
_flash_cpu = torch._scaled_dot_product_flash_attention_for_cpu
FLASH_CUDA_DTYPES = (torch.float16, torch.bfloat16)
FLASH_CUDA_MAX_SIZE = 256

# With matrix units for 16-bit numbers the CPU op rearranges all keys and values first if there are 64 queries or more.
# A copy above 32 MiB is mapped afresh by malloc in every call, and its page faults cost more than the attention: 68
# queries to 16,384 keys, 8 heads, D=128, bfloat16, Xeon with AMX: 30.8 ms at once, 19.0 ms in parts of 16 MiB.
REARRANGED_QUERIES = 64
REARRANGED_BYTES = 16 * 2**20


def can_fuse(query: torch.Tensor, value: torch.Tensor, masked: bool = False) -> bool:
    """Whether `fused_attention` takes this query and value, with a mask if `masked`."""
    if query.is_cpu:
        return True
    size = max(query.shape[3], value.shape[3])
    fits = query.dtype in FLASH_CUDA_DTYPES and size % 8 == 0 and size <= FLASH_CUDA_MAX_SIZE
    return query.is_cuda and fits and not masked


def fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    scaling: float,
    is_causal: bool = False,
    hides_all: bool = True,
) -> AttentionState:
    """Attention of all queries to all keys, or to those an additive mask leaves.

    Args:
        query (`torch.Tensor` of shape `(B, H, N, D)`): Queries.
        key (`torch.Tensor` of shape `(B, K, M, D)`): Keys, any strides. H is a multiple of K.
        value (`torch.Tensor` of shape `(B, K, M, Dv)`): Values, any strides.
        mask (`torch.Tensor` broadcastable to `(B, H, N, M)`, *optional*): Additive mask in the dtype of the query.
        scaling (`float`): Factor of the scores.
        is_causal (`bool`, *optional*, defaults to `False`): Query n sees keys 0 to n. Only for N == M.
        hides_all (`bool`, *optional*, defaults to `True`): Whether the mask may hide all keys from a query.

    Returns:
        `(out, lse)` of shapes `(B, H, N, Dv)` and `(B, H, N)`.
    """
    if key.shape[2] == 0 or query.numel() == 0:
        return nothing_visible(query, value)
    size, value_size = query.shape[3], value.shape[3]
    if size != value_size:  # zeros change no score, and their part of the output is cut off
        query, key = (pad(x, (0, max(0, value_size - size))) for x in (query, key))
        value = pad(value, (0, max(0, size - value_size)))
    if query.stride(3) != 1 or key.stride(3) != 1 or value.stride(3) != 1:
        query, key, value = (x if x.stride(3) == 1 else x.contiguous() for x in (query, key, value))
    if query.is_cpu:
        out, lse = _flash_in_parts(query, key, value, mask, is_causal, scaling)
    else:
        out, lse = torch._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, scale=scaling)[:2]
    if mask is not None and hides_all:
        lse = lse.masked_fill(mask.amax(dim=-1) == -torch.inf, -torch.inf)  # the op leaves 0 there
    return (out if value_size >= size else out[..., :value_size]), lse


def _flash_in_parts(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scaling: float,
) -> AttentionState:
    """The CPU op over as many batch rows at a time as it can rearrange without fresh memory; mostly all of them."""
    rows = rows_at_once(query, key)
    if rows >= query.shape[0]:
        return _flash_cpu(query, key, value, 0.0, is_causal, attn_mask=mask, scale=scaling)
    one_mask = mask is None or mask.dim() < 4 or mask.shape[0] == 1
    masks = [mask] * query.shape[0] if one_mask else mask.split(rows)  # type: ignore[union-attr]
    inputs = zip(query.split(rows), key.split(rows), value.split(rows), masks, strict=False)
    parts = [_flash_cpu(q, k, v, 0.0, is_causal, attn_mask=m, scale=scaling) for q, k, v, m in inputs]
    out, lse = zip(*parts, strict=True)
    return torch.cat(out), torch.cat(lse)


def rows_at_once(query: torch.Tensor, key: torch.Tensor) -> int:
    """Batch rows of one call of the CPU op."""
    if query.shape[2] < REARRANGED_QUERIES or query.element_size() != 2 or torch.compiler.is_compiling():
        return query.shape[0]
    return max(1, REARRANGED_BYTES // (2 * key.element_size() * key[0].numel()))
