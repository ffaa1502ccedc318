"""The launches of the Triton kernels, as operators of torch: eager mode, torch.compile and CUDA graphs all see these.

An operator is opaque to torch.compile, which learns the shapes of its results from the fake implementation beside it.
Lengths and counts stay on the device: nothing here depends on the content of a tensor, only on shapes.

The interpreter keeps bfloat16 as bit patterns and multiplies those, without an error. `upcast` returns whether kernels
have to convert what they load to float32 first.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache, wraps
from typing import Any, NamedTuple

import torch

from .config import (
    INSTALLED,
    INTERPRETED,
    OPTIONS,
    Gpu,
    TileConfig,
    hybrid_config,
    most_splits,
    power_of_two,
    tree_config,
    wanted_splits,
)
from .kernels import attention_kernel, combine_kernel, reduce_scores_kernel, score_factors

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Ampere. Older ones have neither bfloat16 nor asynchronous copies, and 64 KB of shared memory.
MIN_CAPABILITY = (8, 0)
# Hopper, and Blackwell of data centers: warpgroups multiply from shared memory. On other GPUs single warps do.
WARPGROUP_CAPABILITIES = (9, 10)
# Shared memory of one program on the smallest GPUs of that age (RTX 30 and 40, L4). Every configuration fits in it
# where the device does not have more.
SHARED_MEMORY = 99 * 1024
# The namespace of the operators.
LIBRARY = "hf_longspec"

NO_SCORES, SUMMED_SCORES, ROW_SCORES = range(3)
NO_TREE, BOOLEAN_TREE, ADDITIVE_TREE = range(3)

# One result per program: a verification has hundreds of them. Up to 64 parts are read at once: with 8 key heads and one
# tile of rows there are at most 49.
BLOCK_STATES = 1
BLOCK_PARTS = 64
# Rows of scores that are read at once, and slots of one program: 256 programs for 32K tokens.
BLOCK_SCORES, BLOCK_SLOTS = 16, 128


def upcast(dtype: torch.dtype) -> bool:
    """Return whether kernels must convert numbers of this dtype to float32 before they calculate with them."""
    return INTERPRETED and dtype == torch.bfloat16


def launching_on(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Make the tensor's device current: Triton launches there, and under `device_map="auto"` it may be another one."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def why_not_device(device: torch.device) -> str | None:
    """Return None if kernels run on this device, or the reason for refusing it."""
    if not INSTALLED:
        return "triton is not installed: pip install triton"
    if INTERPRETED and device.type in ("cpu", "cuda"):
        return None
    if device.type != "cuda":
        return f"device is {device.type}, expected cuda (with TRITON_INTERPRET=1 set before the import, cpu for tests)"
    if torch.version.hip is not None:
        return "ROCm is not supported: the configurations were never tested there"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        return f"compute capability is {capability[0]}.{capability[1]}, expected at least 8.0"
    return None


def gpu_of(device: torch.device) -> Gpu:
    """Return what tiles depend on; for the interpreter that of the smallest GPUs."""
    return _gpu(device) if device.type == "cuda" else Gpu(SHARED_MEMORY, False)


@cache
def _gpu(device: torch.device) -> Gpu:
    shared_memory = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", SHARED_MEMORY)
    return Gpu(shared_memory, torch.cuda.get_device_capability(device)[0] in WARPGROUP_CAPABILITIES)


def operator(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that registers a function of `query`, `key`, `value` and more as an operator of torch.

    The decorated function calls the operator while torch compiles, differentiates or records, which must see it, and
    otherwise its own body, as the dispatcher takes a tenth of the host's time for a layer. Its attribute `operator` is
    the operator.
    """

    def register(function: Callable[..., Any]) -> Any:
        op: Any = torch.library.custom_op(f"{LIBRARY}::{name}", function, mutates_args=())

        @wraps(function)
        def call(query: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            is_differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in (query, *arguments[:2]))
            is_seen = is_differentiated or torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack()
            return (op if is_seen else function)(query, *arguments, **options)

        call.operator = op  # type: ignore[attr-defined]
        return call

    return register


@operator("triton_hybrid_attention")
def hybrid_op(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: torch.Tensor,
    positions: torch.Tensor | None,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to the prefix, and with `mask` to the staged nodes after it."""
    return _attend(query, key, value, lengths, positions, mask, sinks, None, None, scaling, sliding_window, softcap)


@hybrid_op.operator.register_fake
def _(query, key, value, lengths, positions, mask, sinks, scaling, sliding_window, softcap):
    return _empty_state(query, value)


@operator("triton_attention_with_scores")
def scored_op(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: torch.Tensor,
    positions: torch.Tensor | None,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    last_node: torch.Tensor,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
    weights: bool,
    per_layer: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attend as above, and compute the scores of node 0 and of `last_node`; see backend.py for the shapes."""
    batch, kv_heads, slots = key.shape[:3]
    score_rows = (2, query.shape[1] // kv_heads) if weights else ()
    scores = query.new_empty((batch, kv_heads, *score_rows, slots), dtype=torch.float32)
    options = last_node, scores, scaling, sliding_window, softcap
    out, lse = _attend(query, key, value, lengths, positions, mask, sinks, *options)
    if weights or (per_layer and kv_heads > 1):
        scores = launch_reduce(scores, lse, last_node, lengths, per_layer)
    return out, lse, scores


@scored_op.operator.register_fake
def _(
    query, key, value, lengths, positions, mask, sinks, last_node, scaling, sliding_window, softcap, weights, per_layer
):
    shape = key.shape[0], 1 if per_layer else key.shape[1], key.shape[2]
    return *_empty_state(query, value), query.new_empty(shape, dtype=torch.float32)


@operator("triton_tree_attention")
def tree_op(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scaling: float,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend N queries to M keys under an explicit mask."""
    query, key, value = (x if x.stride(3) == 1 else x.contiguous() for x in (query, key, value))
    return _attend(query, key, value, None, None, mask, None, None, None, scaling, None, softcap)


@tree_op.operator.register_fake
def _(query, key, value, mask, scaling, softcap=None) -> tuple[torch.Tensor, torch.Tensor]:
    return _empty_state(query, value)


class Merge(NamedTuple):
    """What launches that merge partial results of the same shape have in common."""

    partial: int  # float32 numbers of the partial results: outputs (B, H, N, parts, Dv), then lse (B, H, N, parts)
    out: tuple[int, int, int, int]  # shape of the merged outputs, (B, N, H, Dv)
    lse: tuple[int, int, int]  # (B, H, N)
    grid: tuple[int]
    numbers: tuple[int, ...]  # arguments of the kernel after the tensors
    constants: dict[str, Any]  # keywords of the kernel


@lru_cache(maxsize=1024)
def merge_of(shape: tuple[int, ...], has_sinks: bool, block_states: int, most_parts: int) -> Merge:
    """Return how to merge partial results `(B, H, N, parts, Dv)`, up to `most_parts` of which are read at once."""
    batch, heads, nodes, parts, size = shape
    states = batch * heads * nodes
    constants = {
        "VALUE_SIZE": size,
        "BLOCK_VALUE": power_of_two(size),
        "BLOCK_STATES": block_states,
        "BLOCK_PARTS": min(most_parts, power_of_two(parts)),
        "HAS_SINKS": has_sinks,
        "num_warps": 4,
        **OPTIONS,
    }
    merged = (batch, nodes, heads, size), (batch, heads, nodes)
    grid = (-(-states // block_states),)
    return Merge(states * parts * (size + 1), *merged, grid, (states, heads, nodes, parts), constants)


def launch_merge(
    merge: Merge, partial: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge partial results.

    Args:
        partial (`torch.Tensor` of shape `(merge.partial,)`):
            Partial outputs, which are not read where the log-sum-exp is -inf, and log-sum-exp in base 2. float32.
        value (`torch.Tensor`): Its dtype is that of the result.
        sinks (`torch.Tensor` of shape `(H,)`, *optional*): Sink logits.

    Returns:
        `(out, lse)` of shapes `(B, H, N, Dv)`, `(B, N, H, Dv)` in memory as a model needs it next, and `(B, H, N)`.
    """
    # the interpreter truncates where a GPU rounds, so torch rounds to bfloat16
    out = value.new_empty(merge.out, dtype=torch.float32 if upcast(value.dtype) else value.dtype)
    lse = partial.new_empty(merge.lse)
    if merge.grid[0]:
        combine_kernel[merge.grid](partial, sinks, out, lse, *merge.numbers, **merge.constants)
    return (out if out.dtype == value.dtype else out.to(value.dtype)).transpose(1, 2), lse


def launch_reduce(
    rows: torch.Tensor, lse: torch.Tensor, last_node: torch.Tensor, lengths: torch.Tensor, per_layer: bool
) -> torch.Tensor:
    """Reduce scores to one per entry, or one per entry and key head.

    Args:
        rows (`torch.Tensor` of shape `(B, K, S)` or `(B, K, 2, G, S)`):
            Sums of `q . k`, which are added up, or scores in base 2 of node 0 and of the last node, of whose attention
            probabilities the sum is taken. float32.
        lse (`torch.Tensor` of shape `(B, H, N)`): Log-sum-exp of all attention. float32.

    Returns:
        Scores `(B, 1 or K, S)` in the slots below `lengths[b]`; the others are not written. float32.
    """
    (batch, kv_heads), slots = rows.shape[:2], rows.shape[-1]
    lists, groups, weights = 1 if per_layer else kv_heads, lse.shape[1] // kv_heads, rows.dim() == 5
    count = kv_heads // lists * (2 * groups if weights else 1)
    scores = rows.new_empty(batch, lists, slots)
    if scores.numel():
        with launching_on(rows):
            reduce_scores_kernel[(-(-slots // BLOCK_SLOTS), batch * lists)](
                *(rows, lse, last_node, lengths, scores, lse.shape[2], slots),
                LISTS=lists,
                ROWS=count,
                GROUPS=groups,
                WEIGHTS=weights,
                BLOCK_ROWS=min(BLOCK_SCORES, power_of_two(count)),
                BLOCK_SLOTS=BLOCK_SLOTS,
                num_warps=4,
                **OPTIONS,
            )
    return scores


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: torch.Tensor | None,
    positions: torch.Tensor | None,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    last_node: torch.Tensor | None,
    scores: torch.Tensor | None,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute all parts and merge them; see backend.py for the other arguments.

    Args:
        lengths (`torch.LongTensor` of shape `(B,)`, *optional*):
            Without it there is no prefix, and the tree is all keys; with it, the slots from `lengths[b]` on.
        mask (`torch.Tensor`, *optional*): Without it there is no tree.
        scores (`torch.Tensor` of shape `(B, K, S)` or `(B, K, 2, G, S)`, *optional*):
            Written with `last_node` alone, in the slots below `lengths[b]`: the sums, or the single scores in base 2.
    """
    if mask is not None and mask.dtype == torch.bool:
        mask = mask.view(torch.uint8)
    elif mask is not None and mask.dtype == torch.float64:
        mask = mask.float()
    launch = _launch_of(
        *(hybrid_config, tree_config, wanted_splits, BLOCK_STATES, BLOCK_PARTS),
        *(query.device, query.dtype, query.shape, query.stride()),
        *(key.shape, key.stride(), value.shape, value.stride()),
        None if mask is None else (mask.dtype, mask.shape, mask.stride()),
        *(lengths is not None, sinks is not None, 0 if scores is None else scores.dim()),
        *(scaling, sliding_window, softcap),
    )
    partial = query.new_empty(launch.merge.partial, dtype=torch.float32)
    with launching_on(query):
        if mask is None and key.shape[2] == 0:  # a cache without slots
            partial.fill_(-torch.inf)
        elif 0 not in launch.grid:
            attention_kernel[launch.grid](
                *(query, key, value, lengths, positions, last_node, mask, partial, scores),
                *launch.numbers,
                **launch.constants,
            )
        return launch_merge(launch.merge, partial, value, sinks)


class Launch(NamedTuple):
    """What launches of the attention kernel on tensors of the same shapes and strides have in common."""

    grid: tuple[int, int, int]
    numbers: tuple[float, ...]  # arguments of the kernel after the tensors
    constants: dict[str, Any]  # keywords of the kernel
    merge: Merge  # the launch after it


@lru_cache(maxsize=1024)  # computed once for all layers and steps, as it takes longer than to launch the kernel
def _launch_of(
    hybrid_config: Callable[..., TileConfig],  # functions and sizes of this module, which tests replace
    tree_config: Callable[..., TileConfig],
    wanted_splits: Callable[..., int],
    block_states: int,
    most_parts: int,
    device: torch.device,
    dtype: torch.dtype,
    query: torch.Size,
    query_strides: tuple[int, ...],
    key: torch.Size,
    key_strides: tuple[int, ...],
    value: torch.Size,
    value_strides: tuple[int, ...],
    mask: tuple[torch.dtype, torch.Size, tuple[int, ...]] | None,
    has_prefix: bool,
    has_sinks: bool,
    score_dims: int,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
) -> Launch:
    """Return how to launch the attention kernel; see `_attend` for the arguments."""
    (batch, heads, nodes, size), (kv_heads, slots), value_size = query, key[1:3], value[3]
    groups, has_tree, has_scores = heads // kv_heads, mask is not None, score_dims > 0
    of_tile = groups * nodes, size, value_size, dtype.itemsize, gpu_of(device)
    parts = wanted = 1
    if has_prefix:
        config = hybrid_config(*of_tile, has_tree, has_scores, sliding_window is not None or softcap is not None)
        wanted = wanted_splits(max(1, -(-of_tile[0] // config.block_rows)), max(1, batch) * kv_heads, has_tree)
        parts = max(1, has_tree + most_splits(slots, wanted, config.split_keys, config.block_keys))
    else:
        config = tree_config(*of_tile)
    tree, keys, lowest, mask_strides = (NO_TREE, 0, 0.0, (0, 0, 0, 1)) if mask is None else _tree_of(*mask)
    numbers = (
        *(*query_strides[:3], *key_strides[:3], *value_strides[:3], *mask_strides),
        *(kv_heads, nodes, keys, slots, wanted, sliding_window or 0),
        *score_factors(scaling, softcap),
        lowest,
    )
    constants = {
        "TREE_KEYS": config.tree_keys,
        "TREE_STAGES": config.tree_stages,
        "SHORTEST_SPLIT": config.split_keys,
        "PREFIX": has_prefix,
        "TREE": tree,
        "HAS_WINDOW": sliding_window is not None,
        "SCORES": {0: NO_SCORES, 3: SUMMED_SCORES, 5: ROW_SCORES}[score_dims],
        "GROUPS": groups,
        "SIZE": size,
        "VALUE_SIZE": value_size,
        "BLOCK_ROWS": config.block_rows,
        "BLOCK_KEYS": config.block_keys,
        "BLOCK_SIZE": config.block_size,
        "BLOCK_VALUE": config.block_value,
        "HAS_SOFTCAP": softcap is not None,
        "UPCAST": upcast(dtype),
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        **OPTIONS,
    }
    grid = (-(-(groups * nodes) // config.block_rows), batch * kv_heads, parts)
    merge = merge_of((batch, heads, nodes, parts, value_size), has_sinks, block_states, most_parts)
    return Launch(grid, numbers, constants, merge)


def _tree_of(
    dtype: torch.dtype, shape: torch.Size, strides: tuple[int, ...]
) -> tuple[int, int, float, tuple[int, ...]]:
    """Return kind, keys, hiding number and strides `(b, h, n, m)` of a mask `(B, N, M)` or `(1 or B, 1 or H, N, M)`."""
    heads = 0 if len(shape) == 3 or shape[1] == 1 else strides[1]
    all_strides = (0 if shape[0] == 1 else strides[0], heads, *strides[-2:])
    if dtype == torch.uint8:
        return BOOLEAN_TREE, shape[-1], 0.0, all_strides
    return ADDITIVE_TREE, shape[-1], torch.finfo(dtype).min, all_strides


def _empty_state(query: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `launch_merge` returns, not filled."""
    batch, heads, nodes, _ = query.shape
    out = value.new_empty(batch, nodes, heads, value.shape[3]).transpose(1, 2)
    return out, query.new_empty(batch, heads, nodes, dtype=torch.float32)
