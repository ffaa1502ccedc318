"""The Triton kernels as plain torch, for the simulated device: Triton's interpreter would take seconds per step.

Parity of the kernels with `attention_backends/reference.py`, which these call, is tested in
`tests/attention_backends/triton/`.
"""

import torch

from hf_longspec.attention_backends.registry import merge_attention_states
from hf_longspec.attention_backends.triton.launch import LIBRARY
from tests.attention_backends import reference


def hybrid_attention(
    query, key, value, lengths, positions, mask, sinks, last_node, scaling, window, softcap, scores_per_row
):
    """Arguments and results of `hybrid_op`, for masks of bool."""
    if mask is not None and (mask.dtype != torch.bool or mask.dim() != 3):
        raise NotImplementedError("masks other than one of bool for all heads")
    slots = torch.arange(key.shape[2])
    visible = (slots < lengths[:, None])[:, None].expand(-1, query.shape[2], -1)
    if window is not None:
        visible = visible & (positions[:, :, None] - slots < window)
    if mask is not None:
        node = slots - lengths[:, None]  # [B, S]
        staged = ((node >= 0) & (node < mask.shape[2]))[:, None]
        visible = visible | (staged & mask.gather(2, node.clamp(0, mask.shape[2] - 1)[:, None].expand_as(visible)))
    state = reference.tree_attention(query, key, value, visible, scaling=scaling, softcap=softcap)
    out, lse = state if sinks is None else merge_attention_states([state], sinks)
    return out, lse, _scores(query, key, lengths, last_node, scaling, softcap, scores_per_row)


def _scores(query, key, lengths, last_node, scaling, softcap, per_row):
    if last_node is None:
        return torch.empty(0)
    (batch, heads, _, size), kv_heads = query.shape, key.shape[1]
    last = query.gather(2, last_node[:, None, None, None].expand(batch, heads, 1, size))
    both = torch.cat([query[:, :, :1], last], 2).view(batch, kv_heads, -1, 2, size)
    hidden = (torch.arange(key.shape[2]) >= lengths[:, None])[:, None]  # [B, 1, S]
    products = torch.einsum("bkgnd,bksd->bkngs", both.float(), key.masked_fill(hidden[..., None], 0).float())
    if not per_row:
        return products.sum((2, 3)).masked_fill(hidden, -torch.inf)
    products = products * scaling
    products = products if softcap is None else softcap * torch.tanh(products / softcap)
    return products.masked_fill(hidden[:, :, None, None], -torch.inf)


def tree_attention(query, key, value, mask, scaling, softcap=None):
    """Arguments and results of `tree_op`."""
    return reference.tree_attention(query, key, value, mask, scaling=scaling, softcap=softcap)


def sparse_attention(query, key, value, indices, counts, scaling, softcap=None):
    """Arguments and results of `sparse_op`."""
    return reference.sparse_attention(query, key, value, indices, counts, scaling=scaling, softcap=softcap)


def move_nodes(buffers, path, lengths, counts):
    """Arguments of `move_nodes`; the buffers are changed in place."""
    for row, (length, count) in enumerate(zip(lengths.tolist(), counts.tolist(), strict=True)):
        for buffer in buffers:
            buffer[row, :, length : length + count] = buffer[row, :, length + path[row, :count]]


# Name of the operator: function, launches.
KERNELS = {
    f"{LIBRARY}::triton_hybrid_attention": (hybrid_attention, 3),
    f"{LIBRARY}::triton_tree_attention": (tree_attention, 2),
    f"{LIBRARY}::triton_sparse_attention": (sparse_attention, 2),
    f"{LIBRARY}::triton_move_nodes": (move_nodes, 1),
}
