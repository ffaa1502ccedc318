"""The backend that needs only torch: `hf_longspec_torch`. Keys are never repeated, and a prefix gets no mask.

Prefixes of different lengths are cut to size and computed row by row; equal ones in one call on a slice of the cache.
Torch's fused op computes them, up to `DENSE_KEYS` keys together with the tree. It has no softcap, and on CUDA no mask.
Such calls are plain matrix products over blocks of keys, which are merged by log-sum-exp as they come; at most
BLOCK_KEYS keys have scores at a time. These products run in float32 (float64 for float64 input). On CPU a small
bfloat16 product is 15 times slower than the float32 one (250 against 17 microseconds for 68 x 32 by 32 x 68, torch
2.13, AMD EPYC with AVX2), and scores rounded to bfloat16 would cost accuracy.

On CPU the fused op is `_scaled_dot_product_flash_attention_for_cpu`, on CUDA `_scaled_dot_product_flash_attention`. The
CUDA call is written from the documented signature and has never been run. Without the guards below, the CPU op does the
following (torch 2.13; tests/attention_backends/test_torch_backend.py has a test for each line):

    no keys or no queries          the process dies of SIGFPE
    last stride other than 1       wrong numbers, no error
    a query that sees no key       log-sum-exp 0 instead of -inf
    boolean mask                   refused
    value size other than D        refused
    is_causal with N < M           top-left aligned: query n sees the first n + 1 keys

Packed heads: the G = H // K query heads that share a key/value head become G * N rows of one head. The op then reads
every key once instead of G times, and a single query per step is a small matrix instead of G vectors.

An additive mask is added to the scores and is -inf where a query does not attend to a key. A block mask computes that
of a call for one block of its keys at a time: `mask(start, stop)` broadcasts to `(B, H, N, stop - start)`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.functional import pad

from .lengths import SeqLens
from .registry import (
    AttentionBackend,
    AttentionState,
    concatenate,
    merge_attention_states,
    nothing_visible,
    register_backend,
    why_not_dtype,
)

KeyMask = Callable[[int, int], torch.Tensor]

# The op itself, not torch.ops.aten: the same function costs 3 microseconds less per call through the C binding.
_flash_cpu = torch._scaled_dot_product_flash_attention_for_cpu
FLASH_CUDA_DTYPES = (torch.float16, torch.bfloat16)
FLASH_CUDA_MAX_SIZE = 256

# With matrix units for 16-bit numbers the CPU op rearranges all keys and values first if there are 64 queries or more.
# A copy above 32 MiB is mapped afresh by malloc in every call, and its page faults cost more than the attention: 68
# queries to 16,384 keys, 8 heads, D=128, bfloat16, Xeon with AMX: 30.8 ms at once, 19.0 ms in parts of 16 MiB.
REARRANGED_QUERIES = 64
REARRANGED_BYTES = 16 * 2**20

# The CPU op works on 32 rows at a time. A lone row among the last 32 becomes a matrix-vector product, which in bfloat16
# takes 3 times as long as two rows do (2,154 against 624 microseconds: 4,096 keys, 2 heads, D=128, AMD EPYC with AVX2);
# three rows take 1.5 times as long as four, in float32 too. A copy of the first row is added then.
SLOW_TAILS, SLOW_TAILS_FLOAT32 = (1, 3), (3,)

# Up to this many keys, hybrid attention is one call with a mask. One masked call against two calls and a merge, 5
# nodes, H=8, K=2, D=32, float32: 146 against 168 microseconds at 1,024 keys, 456 against 461 at 4,096, 2,151 against
# 1,985 at 16,384.
DENSE_KEYS = 4096

# So many rows of unequal lengths or more are one call with a mask, if a row has at most so many scores per head. One
# call against a call per row, H=4, K=2, D=64, float32, two threads: 157 against 357 microseconds for 16 rows of 256
# keys and a node, 1,015 against 1,838 for 64 rows and 5 nodes, 225 against 280 for 8 rows of 1,024 keys; with 5 nodes
# after 1,024 keys both take as long.
MASKED_ROWS, MASKED_SCORES = 4, 2048

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# No mask and no scores exist for more queries than this. 512 queries against a window of 4,096 compute 12 % more scores
# than the window has.
BLOCK_QUERIES = 512

# The scores of 17 nodes x 32 heads are 4 MB. In shorter blocks, calling the ops costs more than they do.
BLOCK_KEYS = 2048


def prefix_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: SeqLens,
    *,
    scaling: float,
    positions: torch.Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> AttentionState:
    """Attend N queries to the committed prefix.

    Lengths that the host does not know are read back. Where that would break a graph, all slots are read under a mask.
    """
    options: dict[str, Any] = {"scaling": scaling, "softcap": softcap}
    if not lengths.host:
        if torch.compiler.is_compiling():
            visible = prefix_mask(lengths.on(key.device), key.shape[2], query.shape[2], positions, sliding_window)
            return _attend_packed(query, key, value, 0, key.shape[2], visible, **options)
        lengths = SeqLens(lengths.on(key.device).tolist())
    if lengths.shared is None:
        longest = lengths.longest
        # under the mask are keys of rejected nodes, which in float16 may be infinite
        is_many = len(lengths.host) >= MASKED_ROWS and query.dtype != torch.float16
        if is_many and longest * query.shape[2] <= MASKED_SCORES and can_fuse(query, value, masked=True):
            visible = prefix_mask(lengths.on(key.device), longest, query.shape[2], positions, sliding_window)
            return _attend_packed(query, key, value, 0, longest, visible, **options)
        rows = []
        for b, size in enumerate(lengths.host):
            row = slice(b, b + 1)
            options["positions"] = None if positions is None else positions[row]
            tensors = query[row], key[row], value[row], SeqLens.equal(size, 1)
            rows.append(prefix_attention(*tensors, sliding_window=sliding_window, **options))
        return concatenate(rows, dim=0)
    length = lengths.shared
    if sliding_window is None or positions is None:
        return _attend_packed(query, key, value, 0, length, **options)
    # only keys that some queries do not see get a mask
    start, inner = _window_bounds(positions, sliding_window, length)
    parts = []
    if inner < length:
        parts.append(_attend_packed(query, key, value, inner, length, **options))
    if start < inner:
        mask = position_mask(positions, start, sliding_window, causal=False, dtype=query.dtype)
        parts.append(_attend_keys(query, key[:, :, start:inner], value[:, :, start:inner], mask, **options))
    return merge_attention_states(parts) if parts else nothing_visible(query, value)


def tree_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
) -> AttentionState:
    """Attend N queries to M keys under an explicit mask."""
    mask = mask[:, None] if mask.dim() == 3 else mask
    if softcap is None and query.shape[2] <= BLOCK_QUERIES and can_fuse(query, value, masked=True):
        return fused_attention(query, key, value, additive_mask(mask, query.dtype), scaling=scaling)
    blocks = []
    for row in range(0, max(1, query.shape[2]), BLOCK_QUERIES):
        rows = slice(row, row + BLOCK_QUERIES)
        visible = explicit_mask(mask[:, :, rows], query.dtype)
        blocks.append(_attend_keys(query[:, :, rows], key, value, visible, scaling=scaling, softcap=softcap))
    return concatenate(blocks, dim=2)


def causal_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> AttentionState:
    """Attend the last N of S positions to all S, causally. Memory is linear in S."""
    nodes, length = query.shape[2], key.shape[2]
    if sliding_window is not None and sliding_window >= length:
        sliding_window = None
    if nodes == 1:  # the last position sees everything, or the last window
        first = 0 if sliding_window is None else length - sliding_window
        return _attend_packed(query, key, value, first, length, scaling=scaling, softcap=softcap)
    before = length - nodes
    if sliding_window is None and softcap is None and can_fuse(query, value):
        block = fused_attention(query, key[:, :, before:], value[:, :, before:], scaling=scaling, is_causal=True)
        if before == 0:
            return block
        return merge_attention_states([_attend_packed(query, key, value, 0, before, scaling=scaling), block])
    blocks = []
    for row in range(0, nodes, BLOCK_QUERIES):  # each block attends to the keys that any of its queries sees
        queries = query[:, :, row : row + BLOCK_QUERIES]
        first = before + row  # position of the first query of the block
        stop = first + queries.shape[2]
        start = 0 if sliding_window is None else max(0, first - sliding_window + 1)
        positions = torch.arange(first, stop, device=query.device)[None]
        mask = position_mask(positions, start, sliding_window, causal=True, dtype=query.dtype)
        keys, values = key[:, :, start:stop], value[:, :, start:stop]
        blocks.append(_attend_keys(queries, keys, values, mask, scaling=scaling, softcap=softcap))
    return concatenate(blocks, dim=2)


def prefix_mask(
    lengths: torch.Tensor, slots: int, nodes: int, positions: torch.Tensor | None, sliding_window: int | None
) -> torch.Tensor:
    """Return the boolean mask `(B, N, slots)` of N = `nodes` queries over prefixes of `lengths` `(B,)`."""
    places = torch.arange(slots, device=lengths.device)
    mask = (places < lengths[:, None])[:, None].expand(-1, nodes, -1)
    if sliding_window is None or positions is None:
        return mask
    return mask & (positions[:, :, None] - places < sliding_window)


def _window_bounds(positions: torch.Tensor, sliding_window: int, length: int) -> tuple[int, int]:
    """Return the first slot that any query sees, and the first slot that all queries see."""
    if positions.is_cpu and not torch.compiler.is_compiling():
        flat = [position for row in positions.tolist() for position in row]
        first, last = min(flat), max(flat)
        return min(length, max(0, first - sliding_window + 1)), min(length, max(0, last - sliding_window + 1))
    # Reading positions would wait for the device in every layer, or break a graph. They are length - 1 at least; how
    # far they go stays unknown, so the whole window gets a mask.
    return max(0, length - sliding_window), length


def _attend_packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    start: int,
    stop: int,
    mask: torch.Tensor | None = None,
    *,
    scaling: float,
    softcap: float | None = None,
) -> AttentionState:
    """Attend few queries, with packed heads, to keys `start` to `stop`, all or under a mask `(B, N, stop - start)`."""
    if softcap is not None or not can_fuse(query, value, masked=mask is not None):
        visible = None if mask is None else explicit_mask(mask[:, None], query.dtype)
        keys, values = key[:, :, start:stop], value[:, :, start:stop]
        return _attend_keys(query, keys, values, visible, scaling=scaling, softcap=softcap)
    kv_heads = key.shape[1]
    packed_mask = None if mask is None else pack_mask(additive_mask(mask, query.dtype), query, kv_heads)
    key_value = one_head(key, start, stop), one_head(value, start, stop)
    return unpack(fused_attention(pack(query, kv_heads), *key_value, packed_mask, scaling=scaling), query.shape)


def _attend_keys(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: KeyMask | None,
    *,
    scaling: float,
    softcap: float | None,
) -> AttentionState:
    """Attend to all keys `(B, K, M, D)`, or to those that a mask leaves.

    This is one call if the fused op takes the mask, and otherwise matrix products over blocks of keys.
    """
    length = key.shape[2]
    if mask is not None and softcap is None and can_fuse(query, value, masked=True):
        return fused_attention(query, key, value, mask(0, length), scaling=scaling)
    state = nothing_visible(query, value)
    if length == 0 or query.numel() == 0:
        return state
    (batch, heads, nodes, size), kv_heads = query.shape, key.shape[1]
    # the query heads of a key head are just more rows
    packed = (query.to(state[1].dtype) * scaling).reshape(batch, kv_heads, -1, size)
    blocks = [(0, length)]
    if not torch.compiler.is_compiling():  # the number of blocks would be compiled in, and with it the length
        blocks = [(start, min(start + BLOCK_KEYS, length)) for start in range(0, length, BLOCK_KEYS)]
    for start, stop in blocks:
        keys, values = (x[:, :, start:stop].to(packed.dtype) for x in (key, value))
        scores = (packed @ keys.transpose(2, 3)).view(batch, heads, nodes, -1)
        if softcap is not None:
            scores = (scores / softcap).tanh_().mul_(softcap)
        if mask is not None:
            scores = scores + mask(start, stop)
        lse = torch.logsumexp(scores, dim=-1)
        shift = lse if mask is None else lse.masked_fill(lse == -torch.inf, 0.0)
        weights = (scores - shift[..., None]).exp_().view(batch, kv_heads, heads // kv_heads * nodes, -1)
        part = (weights @ values).view(batch, heads, nodes, -1), lse
        state = part if start == 0 else merge_attention_states([state, part])
    return state[0].to(value.dtype), state[1]


def hybrid_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: SeqLens,
    mask: torch.Tensor,
    positions: torch.Tensor,
    *,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None = None,
    memo: dict[Any, Any],
) -> AttentionState | None:
    """Attend N staged nodes to the prefix and to each other, in as few calls as possible.

    On a small model the number of calls is what a step costs. Up to `DENSE_KEYS` keys, prefix and tree are one call
    with a mask. Beyond, and in compiled steps, the prefix is a call of its own without a mask. A mask is built once per
    step.

    Args:
        key (`torch.Tensor` of shape `(B, K, S, D)`): Prefix in the slots below `lengths[b]`, nodes from there on.
        value (`torch.Tensor` of shape `(B, K, S, Dv)`): Likewise.
        mask (`torch.BoolTensor` of shape `(B, N, N)`): Tree mask, the window included.
        positions (`torch.LongTensor` of shape `(B, N)`): Absolute positions, at least `lengths`.
        memo (`dict`): Kept for the layers of one step.

    Returns:
        `(out, lse)` of shapes `(B, H, N, Dv)` and `(B, H, N)`, with the sinks. None if the parts have to be computed
        one by one: with a softcap, unequal or unknown lengths, another device, or a window that hides part of a long
        prefix.
    """
    length, nodes = lengths.shared, mask.shape[-1]
    if softcap is not None or length is None or not query.is_cpu:
        return None
    start = 0 if sliding_window is None else max(0, length - sliding_window + 1)
    # one graph serves all lengths, so only windows, which need a mask, depend on the length inside of one
    always_apart = sliding_window is None and torch.compiler.is_compiling()
    dense = not always_apart and length + nodes - start <= DENSE_KEYS
    unmasked = sliding_window is None or lengths.fit_window(sliding_window, nodes)
    if not dense and not unmasked:
        return None
    kv_heads = key.shape[1]
    name = ("torch_hybrid", start, dense, sliding_window, query.dtype, query.shape[1] // kv_heads)
    packed_mask = memo.get(name)
    if packed_mask is None:
        additive = additive_mask(mask, query.dtype)
        if dense:
            edge = position_mask(positions, start, sliding_window, causal=False, dtype=query.dtype)(0, length - start)
            additive = torch.cat([edge[:, 0], additive], dim=-1)
        packed_mask = memo[name] = pack_mask(additive, query, kv_heads)
    packed = pack(query, kv_heads)
    first = start if dense else length
    key_value = one_head(key, first, length + nodes), one_head(value, first, length + nodes)
    # a node sees itself: no row of the mask hides everything
    state = fused_attention(packed, *key_value, packed_mask, scaling=scaling, hides_all=False)
    if not dense:
        before = one_head(key, 0, length), one_head(value, 0, length)
        state = merge_attention_states([fused_attention(packed, *before, scaling=scaling), state])
    state = unpack(state, query.shape)
    return state if sinks is None else merge_attention_states([state], sinks)


def with_unit_stride(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return tensors `(B, H, N, D)` whose vectors are contiguous; all other strides are free."""
    for x in tensors:
        if x.stride(3) != 1:
            return tuple([x if x.stride(3) == 1 else x.contiguous() for x in tensors])
    return tensors


def short_buffer(start: int, stop: int, slots: int) -> ValueError:
    """Return the error of a buffer that is too short: a slice would stop at its end, and the result would be wrong."""
    return ValueError(
        f"slots {start} to {stop} are out of range: the buffer has {slots}. Pass the whole buffer of the cache."
    )


def can_fuse(query: torch.Tensor, value: torch.Tensor, masked: bool = False) -> bool:
    """Return whether `fused_attention` takes this query and value, with a mask if `masked`."""
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
    """Attend all queries to all keys, or to those an additive mask leaves, in one call of the op.

    Args:
        mask (`torch.Tensor` broadcastable to `(B, H, N, M)`, *optional*): Additive mask in the dtype of the query.
        is_causal (`bool`, *optional*, defaults to `False`): Query n sees keys 0 to n. Only for N == M.
        hides_all (`bool`, *optional*, defaults to `True`): Whether the mask may hide all keys from a query.
    """
    if key.shape[2] == 0 or query.numel() == 0:
        return nothing_visible(query, value)
    size, value_size = query.shape[3], value.shape[3]
    if size != value_size:  # zeros change no score, and their part of the output is cut off
        query, key = (pad(x, (0, max(0, value_size - size))) for x in (query, key))
        value = pad(value, (0, max(0, size - value_size)))
    if not query.stride(3) == key.stride(3) == value.stride(3) == 1:
        query, key, value = with_unit_stride(query, key, value)
    if not query.is_cpu:
        out, lse = torch._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, scale=scaling)[:2]
    elif query.shape[2] < REARRANGED_QUERIES or query.element_size() != 2 or torch.compiler.is_compiling():
        out, lse = _flash_cpu(query, key, value, 0.0, is_causal, attn_mask=mask, scale=scaling)
    else:
        out, lse = _flash_in_parts(query, key, value, mask, is_causal, scaling)
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
    """Call the CPU op for as many batch rows at a time as it can rearrange without fresh memory; mostly for all."""
    rows = max(1, REARRANGED_BYTES // (2 * key.element_size() * key[0].numel()))
    if rows >= query.shape[0]:
        return _flash_cpu(query, key, value, 0.0, is_causal, attn_mask=mask, scale=scaling)
    one_mask = mask is None or mask.dim() < 4 or mask.shape[0] == 1
    masks = [mask] * query.shape[0] if one_mask else mask.split(rows)  # type: ignore[union-attr]
    inputs = zip(query.split(rows), key.split(rows), value.split(rows), masks, strict=False)
    parts = [_flash_cpu(q, k, v, 0.0, is_causal, attn_mask=m, scale=scaling) for q, k, v, m in inputs]
    out, lse = zip(*parts, strict=True)
    return torch.cat(out), torch.cat(lse)


def pack(query: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Reshape queries `(B, H, N, D)` to `(B * K, 1, rows, D)`; row g * N + n is query n of head g of its group."""
    batch, heads, nodes, size = query.shape
    rows = heads // kv_heads * nodes
    packed = query.reshape(batch * kv_heads, 1, rows, size)
    return _without_slow_tail(packed, query) if rows & 31 in SLOW_TAILS else packed


def pack_mask(mask: torch.Tensor, query: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Reshape the additive mask `(B, N, M)` of queries `(B, H, N, D)` to `(B * K or 1, 1, rows, M)`, as `pack` does."""
    packed = _without_slow_tail(mask.repeat(1, query.shape[1] // kv_heads, 1)[:, None], query)
    return packed if packed.shape[0] == 1 else packed.repeat_interleave(kv_heads, dim=0)


def one_head(cached: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Return slots `start` to `stop` of keys or values `(B, K, S, D)`, as `(B * K, 1, stop - start, D)`.

    The op writes `(batch, rows, heads, D)`. With one head per batch row this is `(B, H, N, D)` in memory, and nothing
    has to be copied to unpack it.
    """
    batch, heads, slots, size = cached.shape
    if stop > slots:
        raise short_buffer(start, stop, slots)
    of_batch, of_head, of_slot, of_number = cached.stride()
    one_buffer = batch == 1 or of_batch == heads * of_head
    if not one_buffer or torch.compiler.is_compiling():
        return cached[:, :, start:stop].reshape(batch * heads, 1, stop - start, size)
    # One op instead of narrow and reshape: 4 microseconds per layer and buffer
    shape, strides = (batch * heads, 1, stop - start, size), (of_head, of_head, of_slot, of_number)
    return cached.as_strided(shape, strides, cached.storage_offset() + start * of_slot)


def unpack(state: AttentionState, shape: torch.Size) -> AttentionState:
    """Undo `pack` for a result: `(B, H, N, Dv)` and `(B, H, N)` for queries of `shape` `(B, H, N, D)`."""
    out, lse = state
    batch, heads, nodes, _ = shape
    rows = batch * heads * nodes // out.shape[0]
    if rows != out.shape[2]:
        out, lse = out[:, :, :rows].contiguous(), lse[:, :, :rows]
    return out.reshape(batch, heads, nodes, out.shape[3]), lse.reshape(batch, heads, nodes)


def _without_slow_tail(packed: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Return the packed rows `(B * K or 1, 1, rows, X)` of a query, with a copy of the first one if that is faster."""
    tails = SLOW_TAILS_FLOAT32 if query.dtype == torch.float32 else SLOW_TAILS
    is_slow = packed.shape[2] & 31 in tails and query.is_cpu
    return torch.cat([packed, packed[:, :, :1]], dim=2) if is_slow else packed


def additive_mask(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a boolean mask (True: a query attends to a key) or an additive one as an additive mask.

    The lowest number of a dtype, by which transformers hides keys, becomes -inf: a query whose keys are all hidden then
    gets 0 instead of the mean of all values.
    """
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
    return mask.masked_fill(mask <= torch.finfo(mask.dtype).min, -torch.inf).to(dtype)


def explicit_mask(mask: torch.Tensor, dtype: torch.dtype) -> KeyMask:
    """Return the block mask of a boolean or additive mask `(..., N, M)`."""
    return lambda start, stop: additive_mask(mask[..., start:stop], dtype)


def position_mask(
    positions: torch.Tensor, first: int, sliding_window: int | None, causal: bool, dtype: torch.dtype
) -> KeyMask:
    """Return the block mask of causality and window, for queries at `positions` `(B or 1, N)`; key 0 is at `first`."""

    def of_keys(start: int, stop: int) -> torch.Tensor:
        keys = torch.arange(first + start, first + stop, device=positions.device)
        distance = positions[:, None, :, None] - keys  # [B, 1, N, stop - start]
        mask = torch.zeros(distance.shape, dtype=dtype, device=distance.device)
        if sliding_window is not None:
            mask.masked_fill_(distance >= sliding_window, -torch.inf)
        if causal:
            mask.masked_fill_(distance < 0, -torch.inf)
        return mask

    return of_keys


TORCH_BACKEND = register_backend(
    AttentionBackend(
        name="hf_longspec_torch",
        prefix_attention=prefix_attention,
        tree_attention=tree_attention,
        causal_attention=causal_attention,
        why_not=partial(why_not_dtype, dtypes=DTYPES),
        hybrid_attention=hybrid_attention,
    ),
    priority=10,
)
