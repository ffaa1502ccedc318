# Published with a draft by hf_longspec, Apache-2.0.
"""The backend of Triton kernels for CUDA: `hf_longspec_triton`, installed by `pip install hf_longspec[triton]`.

A step is three launches per layer, whatever the batch: prefix splits, tree, and one pass that merges them. None of
them reads a number back from the device. docs/kernels.md explains the kernels.
"""

from typing import Any

import torch

from .attention_backends_merge import AttentionState
from .attention_backends_reference import WINDOW_WITHOUT_POSITIONS
from .attention_backends_registry import AttentionBackend, AttentionCall, register_backend
from .attention_backends_torch_causal import causal_attention
from .attention_backends_triton_config import largest_rows
from .attention_backends_triton_ops import hybrid_op, tree_op
from .attention_backends_triton_runtime import DTYPES, INTERPRETED, why_not_device
from .attention_backends_triton_sparse import sparse_attention

MAX_SIZE = 256


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
    """N queries against the committed prefix; see reference.py. `host_lengths` is only checked."""
    _check_capacity(key, host_lengths, 0)
    options: dict[str, Any] = {"scaling": scaling, "sliding_window": sliding_window, "softcap": softcap}
    return _attend(query, key, value, lengths, positions, **options)[:2]


def hybrid_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    positions: torch.Tensor,
    *,
    lengths: torch.Tensor,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    host_lengths: tuple[int, ...] | None = None,
    memo: dict[Any, Any] | None = None,
) -> AttentionState:
    """N staged nodes against the prefix and each other; see torch_hybrid.py. `host_lengths` is only checked."""
    _check_capacity(key, host_lengths, mask.shape[-1])
    options: dict[str, Any] = {"scaling": scaling, "sliding_window": sliding_window, "softcap": softcap}
    return _attend(query, key, value, lengths, positions, mask, sinks, **options)[:2]


def scored_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: torch.Tensor,
    last_node: torch.Tensor,
    *,
    scaling: float,
    mask: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    host_lengths: tuple[int, ...] | None = None,
    per_row: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Attention as above, and what SpecAttn's selection needs to know of the prefix, from the same pass over the keys.

    Args:
        last_node (`torch.LongTensor` of shape `(B,)`): Index of every row's last node.
        mask (`torch.BoolTensor` of shape `(B, N, N)`, *optional*): With it, the staged nodes are attended to as well.
        per_row (`bool`, *optional*, defaults to `False`): Which scores; see below.

    Returns:
        `(out, lse, scores)`; float32 scores for the slots below `lengths[b]`, seen through a window or not, and -inf
        behind them. By default `(B, K, S)`, `q . k` summed over node 0, the last node and the group's heads: Eq. 3 of
        the paper, [`ScoreCapture`]'s `score="logits"` per KV head. With `per_row` `(B, K, 2, H // K, S)`, the scaled
        and capped scores of those two nodes one by one, from which attention weights are
        `(scores - lse of that row).exp()`: `score="weights"`.

        None if a group has more than 32 heads (16 with vectors above 128, 8 in float32): both nodes have to fit in one
        program.
    """
    _check_capacity(key, host_lengths, 0 if mask is None else mask.shape[-1])
    groups = query.shape[1] // key.shape[1]
    if 2 * groups > largest_rows(query.shape[3], value.shape[3], query.element_size()):
        return None
    last_node = last_node.to(query.device)
    options: dict[str, Any] = {"scaling": scaling, "sliding_window": sliding_window, "softcap": softcap}
    return _attend(query, key, value, lengths, positions, mask, sinks, last_node, per_row, **options)


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
    query, key, value = (_with_unit_stride(x) for x in (query, key, value))
    return tree_op(query, key, value, mask, scaling, softcap)


def why_not(call: AttentionCall) -> str | None:
    """CUDA from Ampere on, float16, bfloat16 and float32, vectors of at most 256 numbers; every feature."""
    if call.dtype not in DTYPES:
        return f"dtype is {call.dtype}, expected one of {', '.join(str(dtype) for dtype in DTYPES)}"
    if max(call.head_dim, call.value_dim) > MAX_SIZE:
        return f"head_dim is {call.head_dim} and value_dim {call.value_dim}, expected at most {MAX_SIZE}"
    return why_not_device(call.device)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: torch.Tensor,
    positions: torch.Tensor | None,
    mask: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    last_node: torch.Tensor | None = None,
    per_row: bool = False,
    *,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if sliding_window is None:
        positions = None
    elif positions is None:
        raise ValueError(WINDOW_WITHOUT_POSITIONS.format(sliding_window))
    else:
        positions = positions.contiguous()
    query, key, value = (_with_unit_stride(x) for x in (query, key, value))
    tensors = (lengths.contiguous(), positions, mask, sinks, last_node)
    return hybrid_op(query, key, value, *tensors, scaling, sliding_window, softcap, per_row)


def _with_unit_stride(tensor: torch.Tensor) -> torch.Tensor:
    """Kernels expect the numbers of one vector beside each other; all other strides are free."""
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()


def _check_capacity(key: torch.Tensor, host_lengths: tuple[int, ...] | None, nodes: int) -> None:
    """Kernels stop at the end of the buffer, which would be a wrong result without an error."""
    if host_lengths and max(host_lengths) + nodes > key.shape[2]:
        raise ValueError(
            f"slots 0 to {max(host_lengths) + nodes} were asked for, but the buffer has {key.shape[2]}. "
            "Hand over the whole buffer."
        )


# Above the torch backend where it runs compiled; interpreted, in tests, only for those who ask for it by name.
TRITON_BACKEND = register_backend(
    AttentionBackend(
        name="hf_longspec_triton",
        prefix_attention=prefix_attention,
        tree_attention=tree_attention,
        sparse_attention=sparse_attention,
        causal_attention=causal_attention,
        why_not=why_not,
        hybrid_attention=hybrid_attention,
        scored_attention=scored_attention,
    ),
    priority=None if INTERPRETED else 20,
)
