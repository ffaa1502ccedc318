"""The Triton kernels as plain torch, for the simulated device: Triton's interpreter would take seconds per step.

Parity of the kernels with `attention_backends/reference.py`, which these call, is tested in
`tests/attention_backends/triton/`.
"""

import torch

from hf_longspec.attention_backends.registry import merge_attention_states
from hf_longspec.attention_backends.triton.launch import LIBRARY
from tests.attention_backends import reference


def hybrid_attention(query, key, value, lengths, positions, mask, sinks, scaling, window, softcap):
    """Arguments and results of `hybrid_op`, for masks of bool. The output lies in memory as `(B, N, H, D)`."""
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
    return out.transpose(1, 2).contiguous().transpose(1, 2), lse


def attention_with_scores(
    query, key, value, lengths, positions, mask, sinks, last_node, scaling, window, softcap, weights, per_layer
):
    """Arguments and results of `scored_op`."""
    out, lse = hybrid_attention(query, key, value, lengths, positions, mask, sinks, scaling, window, softcap)
    return out, lse, _scores(query, key, lengths, last_node, lse if weights else None, scaling, softcap, per_layer)


def _scores(query, key, lengths, last_node, lse, scaling, softcap, per_layer):
    """Scores of the slots below `lengths[b]`; NaN in the others, as nothing may read them."""
    (batch, heads, _, size), kv_heads = query.shape, key.shape[1]
    last = query.gather(2, last_node[:, None, None, None].expand(batch, heads, 1, size))
    both = torch.cat([query[:, :, :1], last], 2).view(batch, kv_heads, -1, 2, size)
    hidden = (torch.arange(key.shape[2]) >= lengths[:, None])[:, None]  # [B, 1, S]
    products = torch.einsum("bkgnd,bksd->bkngs", both.float(), key.masked_fill(hidden[..., None], 0).float())
    if lse is not None:
        products = products * scaling
        products = products if softcap is None else softcap * torch.tanh(products / softcap)
        of_both = torch.stack([lse[:, :, 0], lse.gather(2, last_node[:, None, None].expand(-1, heads, -1))[..., 0]], 1)
        products = (products - of_both.unflatten(2, (kv_heads, -1)).transpose(1, 2)[..., None]).exp()
    scores = products.sum((2, 3)).masked_fill(hidden, torch.nan)
    return scores.sum(1, keepdim=True) if per_layer else scores


def tree_attention(query, key, value, mask, scaling, softcap=None):
    """Arguments and results of `tree_op`."""
    return reference.tree_attention(query, key, value, mask, scaling=scaling, softcap=softcap)


def move_nodes(buffers, path, lengths, counts):
    """Arguments of `move_nodes`; the buffers are changed in place."""
    for row, (length, count) in enumerate(zip(lengths.tolist(), counts.tolist(), strict=True)):
        for buffer in buffers:
            buffer[row, :, length : length + count] = buffer[row, :, length + path[row, :count]]


def launches_with_scores(query, key, *others):
    """Splits and tree, the merge, and the sum of scores where several are summed."""
    weights, per_layer = others[-2:]
    return 2 + (weights or (per_layer and key.shape[1] > 1))


# Name of the operator: function, launches.
KERNELS = {
    f"{LIBRARY}::triton_hybrid_attention": (hybrid_attention, 2),
    f"{LIBRARY}::triton_attention_with_scores": (attention_with_scores, launches_with_scores),
    f"{LIBRARY}::triton_tree_attention": (tree_attention, 2),
    f"{LIBRARY}::triton_move_nodes": (move_nodes, 1),
}
