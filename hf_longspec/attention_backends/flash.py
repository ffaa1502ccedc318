"""The backend on flash-attn: `hf_longspec_fa`. The prefix runs through flash-attn, the rest through torch.

flash-attn reads the cache in place, takes a length per row from the device, splits a long prefix over the whole GPU and
returns the log-sum-exp that merges the tree. Its own windows count from the index of a query among the queries, which
is neither the position of a tree node nor that of a row of a packed group. `cache_leftpad` replaces them.

Version 3 (`flash_attn_interface`) is for Hopper, version 2 (`flash_attn`) for Ampere and later. Where neither is
installed, the package `kernels` downloads a build of them from the Hub. None has been run: the calls follow the
documented signatures and are tested against a stand-in with the same signatures.

Source: FlashAttention-2 (https://huggingface.co/papers/2307.08691), FlashAttention-3
(https://huggingface.co/papers/2407.08608).
"""

from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from transformers.utils import logging

from .lengths import SeqLens
from .registry import AttentionBackend, AttentionCall, AttentionState, nothing_visible, register_backend, why_not_dtype
from .torch_backend import causal_attention, tree_attention, with_unit_stride

logger = logging.get_logger(__name__)

DTYPES = (torch.float16, torch.bfloat16)
MAX_SIZE = 256
# Version 2 pads other sizes, by a copy of the whole cache.
SIZE_STEP = 8

HOPPER, AMPERE = 9, 8

# Versions 3 and 2: the package, the least and the most compute capability it runs on, and its build on the Hub, in the
# version that transformers uses with torch 2.10 and newer.
VERSIONS = (
    ("flash_attn_interface", HOPPER, HOPPER, "kernels-community/flash-attn3", 1),
    ("flash_attn", AMPERE, 99, "kernels-community/flash-attn2", 4),
)


def compute_capability(device: torch.device) -> int | None:
    """Return the major compute capability of an NVIDIA GPU; None for every other device."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return torch.cuda.get_device_capability(device)[0]


@cache
def flash_function(capability: int) -> Any:
    """Return `flash_attn_with_kvcache` for a GPU of this major compute capability, or None if there is none.

    It takes `(B, S, H, D)`. Version 2 returns `(out, lse)`, version 3 has further results after them.
    """
    versions = [version for version in VERSIONS if version[1] <= capability <= version[2]]
    for package, *_ in versions:
        try:
            return import_module(package).flash_attn_with_kvcache
        except (ImportError, AttributeError):  # missing, too old, or built for another torch
            pass
    try:
        from kernels import get_kernel
    except ImportError:
        return None
    for *_, repository, version in versions:
        try:
            return get_kernel(repository, version=version).flash_attn_with_kvcache
        except Exception as error:  # no network, no build for this torch, another version of kernels: no common class
            kind = type(error).__name__
            logger.warning("%s, version %d, could not be loaded (%s: %s).", repository, version, kind, error)
    return None


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
    """Attend N queries to the committed prefix. Nothing is read back.

    Slots after the prefix may hold any finite number, as those of a `SpeculativeCache` do: version 3 may load them with
    the last tile and weigh them with 0.

    A window that hides something makes every node a batch row of its own, whose keys begin where its window begins. The
    window is then read once per node.
    """
    if key.shape[2] == 0 or query.numel() == 0:
        return nothing_visible(query, value)
    call = partial(_attend, key=key, value=value, scaling=scaling, softcap=softcap)
    nodes, kv_heads = query.shape[2], key.shape[1]
    if positions is None or sliding_window is None or lengths.fit_window(sliding_window, nodes):
        # No query has a mask, so the query heads of a key head are just more rows. Otherwise version 2 would read the
        # cache once per query head, except for a single query.
        packed = query.reshape(query.shape[0], kv_heads, -1, query.shape[3]).transpose(1, 2)
        out, lse = call(packed, ends=lengths.on(key.device), may_be_empty=not lengths.host or 0 in lengths.host)
        out = out.transpose(1, 2).unflatten(2, (-1, nodes)).flatten(1, 2)
        return out, lse.unflatten(2, (-1, nodes)).flatten(1, 2)
    ends = lengths.on(key.device)[:, None].expand(-1, nodes)
    starts = torch.minimum((positions - sliding_window + 1).clamp_min(0), ends)
    packed = query.unflatten(1, (kv_heads, -1)).permute(0, 3, 2, 1, 4).flatten(0, 1)  # [B * N, G, K, D]
    out, lse = call(packed, ends=ends.reshape(-1), starts=starts.reshape(-1))
    out = out.unflatten(0, (-1, nodes)).permute(0, 3, 2, 1, 4).flatten(1, 2)
    return out, lse.unflatten(0, (-1, nodes)).permute(0, 2, 3, 1).flatten(1, 2)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends: torch.Tensor,
    starts: torch.Tensor | None = None,
    *,
    scaling: float,
    softcap: float | None,
    may_be_empty: bool = True,
) -> AttentionState:
    """Call flash-attn with queries `(B, R, K, D)`, or `(B * N, R, K, D)` with `starts`, whose rows see the same keys.

    Rows see the slots from `starts` `(B * N,)` on and below `ends` `(B,)` or `(B * N,)`. Returns `out` and `lse`, of
    shapes `(B or B * N, R, K, D)` and `(B or B * N, K, R)`.
    """
    function = flash_function(compute_capability(query.device) or 0)
    cache = [states.transpose(1, 2) for states in with_unit_stride(key, value)]
    where = {"cache_seqlens": ends}
    if starts is not None:  # lengths count from slot 0, whatever the padding on the left
        rows = torch.arange(key.shape[0], device=key.device)[:, None].expand(-1, query.shape[0] // key.shape[0])
        where |= {"cache_leftpad": starts, "cache_batch_idx": rows.reshape(-1)}
    out, lse, *_ = function(
        query,
        *cache,
        **{name: numbers.to(torch.int32).contiguous() for name, numbers in where.items()},
        softmax_scale=scaling,
        causal=False,
        window_size=(-1, -1),
        softcap=softcap or 0.0,
        return_softmax_lse=True,
    )
    if may_be_empty:
        # for a row without keys version 2 returns lse = +inf, which would win every merge
        empty = (ends <= (0 if starts is None else starts))[:, None, None]
        out, lse = out.masked_fill(empty[..., None], 0.0), lse.masked_fill(empty, -torch.inf)
    return out, lse


def why_not(call: AttentionCall) -> str | None:
    """Return None, or the reason why flash-attn cannot take this call: device, GPU, package, dtype or size."""
    capability = compute_capability(call.device)
    if capability is None:
        return f"device is {call.device.type}, expected an NVIDIA GPU"
    if capability < AMPERE:
        return f"the GPU has compute capability {capability}.x, expected {AMPERE}.0 or higher"
    if flash_function(capability) is None:
        package = "flash-attn (version 2, or 3 from its hopper folder)" if capability == HOPPER else "flash-attn"
        return f"{package} cannot be imported, and the package kernels found no build of it on the Hub"
    if (reason := why_not_dtype(call, DTYPES)) is not None:
        return reason
    if call.head_dim != call.value_dim or call.head_dim % SIZE_STEP or call.head_dim > MAX_SIZE:
        return (
            f"head_dim is {call.head_dim} and value_dim {call.value_dim}, expected equal ones, "
            f"divisible by {SIZE_STEP} and at most {MAX_SIZE}"
        )
    return None


# No priority: it never ran with the real package, so it runs only for users who choose it by name. Once it has run, it
# belongs above torch and below Triton's backend, which also has the tree and the sizes that flash-attn lacks.
FLASH_BACKEND = register_backend(
    AttentionBackend(
        name="hf_longspec_fa",
        prefix_attention=prefix_attention,
        tree_attention=tree_attention,
        causal_attention=causal_attention,
        why_not=why_not,
    )
)
