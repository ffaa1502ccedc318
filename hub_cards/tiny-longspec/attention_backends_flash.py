# Published with a draft by hf_longspec, Apache-2.0.
"""The backend on flash-attn: `hf_longspec_fa`. The prefix runs through flash-attn, the rest through torch.

flash-attn reads the cache in place, takes a length per row from the device, splits a long prefix over the whole GPU and
returns the log-sum-exp by which the tree is merged. Version 3 (`flash_attn_interface`) is for Hopper, version 2
(`flash_attn`) for Ampere and later. Neither has been run: the calls are written from the documented signatures, and
tested against a stand-in with the same ones.

Source: FlashAttention-2 (https://huggingface.co/papers/2307.08691), FlashAttention-3
(https://huggingface.co/papers/2407.08608).
"""

from collections.abc import Callable
from functools import cache

import torch

from .attention_backends_merge import AttentionState, nothing_visible
from .attention_backends_registry import AttentionBackend, AttentionCall, register_backend
from .attention_backends_slots import gather_slots
from .attention_backends_torch_causal import causal_attention
from .attention_backends_torch_sdpa import tree_attention

DTYPES = (torch.float16, torch.bfloat16)
MAX_SIZE = 256
# Version 2 pads other sizes, by a copy of the whole cache.
SIZE_STEP = 8

HOPPER, AMPERE = 9, 8


def compute_capability(device: torch.device) -> int | None:
    """Major compute capability of an NVIDIA GPU; None for every other device."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return torch.cuda.get_device_capability(device)[0]


@cache
def flash_function(capability: int) -> Callable[..., tuple[torch.Tensor, torch.Tensor]] | None:
    """`flash_attn_with_kvcache` for a GPU of this major compute capability, or None if it is not installed.

    It takes `(B, S, H, D)`.
    """
    if capability == HOPPER:
        try:
            from flash_attn_interface import flash_attn_with_kvcache

            return flash_attn_with_kvcache
        except ImportError:  # missing, or built for another torch: version 2 runs on Hopper too
            pass
    try:
        from flash_attn import flash_attn_with_kvcache
    except ImportError:  # likewise, or too old
        return None
    return flash_attn_with_kvcache


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
    """N queries against the committed prefix; see reference.py. Nothing is read back.

    Slots behind the prefix may hold any finite number, as those of a `SpeculativeCache` do: version 3 may load them
    with the last tile and weigh them with 0.

    Raises:
        ValueError: If there is a window; `why_not` refuses these calls.
    """
    if sliding_window is not None:
        raise ValueError(NO_WINDOW.format(sliding_window) + '. Use attn_implementation="hf_longspec".')
    if key.shape[2] == 0 or query.numel() == 0:
        return nothing_visible(query, value)
    capability = compute_capability(query.device)
    function = None if capability is None else flash_function(capability)
    if function is None:
        raise ValueError(f'{_missing(capability)}. Use attn_implementation="hf_longspec".')
    # The query heads of a key head are just more rows, as no query has a mask: version 2 would read the cache once per
    # query head, but for a single query.
    batch, heads, nodes, size = query.shape
    packed = query.reshape(batch, key.shape[1], -1, size)
    out, lse = function(
        *(states.transpose(1, 2) for states in (packed, _last_stride_one(key), _last_stride_one(value))),
        cache_seqlens=lengths.to(torch.int32),
        softmax_scale=scaling,
        causal=False,
        window_size=(-1, -1),
        softcap=softcap or 0.0,
        return_softmax_lse=True,
    )
    out, lse = out.transpose(1, 2).reshape(batch, heads, nodes, -1), lse.reshape(batch, heads, nodes)
    if host_lengths is None or 0 in host_lengths:
        # for a row without keys version 2 returns lse = +inf, which would win every merge
        empty = (lengths == 0)[:, None, None]
        out, lse = out.masked_fill(empty[..., None], 0.0), lse.masked_fill(empty, -torch.inf)
    return out, lse


def sparse_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    indices: torch.Tensor,
    counts: torch.Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
) -> AttentionState:
    """N queries against chosen key slots, which are copied first; see reference.py. Nothing is read back."""
    chosen = gather_slots(key, indices), gather_slots(value, indices)
    return prefix_attention(query, *chosen, counts, scaling=scaling, softcap=softcap)


def why_not(call: AttentionCall) -> str | None:
    """`None`, or why flash-attn cannot take this kind of call: device, GPU, package, dtype, size or window."""
    capability = compute_capability(call.device)
    if capability is None:
        return f"device is {call.device.type}, expected an NVIDIA GPU"
    if capability < AMPERE:
        return f"the GPU has compute capability {capability}.x, expected {AMPERE}.0 or higher"
    if flash_function(capability) is None:
        return _missing(capability)
    if call.dtype not in DTYPES:
        return f"dtype is {call.dtype}, expected one of {', '.join(str(dtype) for dtype in DTYPES)}"
    if call.head_dim != call.value_dim or call.head_dim % SIZE_STEP or call.head_dim > MAX_SIZE:
        return (
            f"head_dim is {call.head_dim} and value_dim {call.value_dim}, expected equal ones, "
            f"divisible by {SIZE_STEP} and at most {MAX_SIZE}"
        )
    # flash-attn counts a window back from position lengths - N + n of query n of N. Nodes of a tree are at lengths +
    # depth, siblings at the same one. In a chain the two differ by a constant, but only the device knows a chain.
    return None if call.sliding_window is None else NO_WINDOW.format(call.sliding_window)


NO_WINDOW = "sliding_window is {}, and flash-attn has no window that starts at the position of a tree's node"


def _missing(capability: int | None) -> str:
    package = "flash-attn (version 2, or 3 from its hopper folder)" if capability == HOPPER else "flash-attn"
    return f"{package} is not installed, or does not import"


def _last_stride_one(cached: torch.Tensor) -> torch.Tensor:
    return cached if cached.stride(3) == 1 else cached.contiguous()


# No priority: it has never met the package it is written for, so nobody gets it without asking for it by name. Once it
# has run, it belongs above torch and below Triton's backend, which also has the tree, windows and sizes it lacks.
FLASH_BACKEND = register_backend(
    AttentionBackend(
        name="hf_longspec_fa",
        prefix_attention=prefix_attention,
        tree_attention=tree_attention,
        sparse_attention=sparse_attention,
        causal_attention=causal_attention,
        why_not=why_not,
    )
)
