"""Inputs of the attention tests, what results are compared with and how wrong they may be; unused slots hold NaN."""

import torch
from torch.nn.functional import scaled_dot_product_attention

from hf_longspec.attention_backends.contexts import TreeContext
from hf_longspec.attention_backends.lengths import SeqLens
from hf_longspec.attention_backends.registry import merge_attention_states
from tests.attention_backends import reference
from tests.attention_backends.triton.machine import on

# Factor of the scores of `tree_case`.
SCALING = 0.3

# Relative L2 error in float32: a fused op with another order of summation differs by this much from the plain one.
FLOAT32_ERROR = 2e-6
FLOAT32_FACTOR = 1.5
# The reference is right, as torch's own result differs from it by so many roundings at most.
PLAIN_ERROR = 16
# The plain op rounds its result to the dtype once; a merge of two rounded parts rounds once more.
HALF_FACTOR = 2.0
LSE_ERROR = 1e-5
# In half precision torch's CPU op takes a faster exp: its lse is off by up to 6e-5 from 8 keys on, at any length. As a
# relative error of the weights of a merge this is a thirtieth of what rounding the result costs.
HALF_LSE_ERROR = 1e-4


def plain_attention(query, key, value, visible, *, scaling, softcap=None):
    """Attention as a user would write it: repeated heads, a boolean mask, torch's own op where possible."""
    groups = query.shape[1] // key.shape[1]
    hidden = ~visible.any(1).any(1)[:, None, :, None]
    key, value = (x.masked_fill(hidden, 0.0).repeat_interleave(groups, dim=1) for x in (key, value))
    if softcap is None and visible.any(-1).all():
        return scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scaling)
    scores = query @ key.transpose(2, 3) * scaling
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, -torch.inf)
    return torch.softmax(scores.float(), dim=-1).nan_to_num(0.0).to(value.dtype) @ value


def relative_error(actual, exact):
    """Relative L2 error; the absolute one where the exact result is 0."""
    norm = exact.norm().item()
    return (actual.double() - exact).norm().item() / (norm or 1.0)


def assert_within_budget(state, exact, plain):
    """`(out, lse)` is as close to `exact` as torch's own result `plain` in the same dtype, up to a factor."""
    (out, lse), (exact_out, exact_lse) = state, exact
    assert out.shape == exact_out.shape
    assert lse.shape == exact_lse.shape
    assert out.dtype == plain.dtype
    assert lse.dtype == torch.promote_types(out.dtype, torch.float32)
    plain_error = relative_error(plain, exact_out)
    assert plain_error <= PLAIN_ERROR * torch.finfo(plain.dtype).eps
    budget = HALF_FACTOR * plain_error
    if out.dtype == torch.float32:
        budget = max(FLOAT32_ERROR, FLOAT32_FACTOR * plain_error)
    assert relative_error(out, exact_out) <= budget
    hidden = exact_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, hidden)
    assert not out[hidden].any()
    lse_error = HALF_LSE_ERROR if out.dtype.itemsize == 2 else LSE_ERROR
    torch.testing.assert_close(lse.double()[~hidden], exact_lse[~hidden], rtol=0.0, atol=lse_error)


def layout(tensor, name):
    """The same numbers `(B, K, S, D)` in another arrangement of memory."""
    batch, heads, slots, size = tensor.shape
    if name == "buffer":  # a slice of a preallocated cache, followed by junk
        whole = tensor.new_full((batch, heads, slots + 13, size), torch.nan)
        whole[:, :, :slots] = tensor
        return whole[:, :, :slots]
    if name == "transposed":  # (B, S, K, D) in memory
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if name == "columns":  # last stride is not 1
        return tensor.transpose(2, 3).contiguous().transpose(2, 3)
    return tensor.contiguous()


def random_tree(batch, nodes, generator, depth=8):
    """Ancestor-or-self masks `(B, N, N)` and depths `(B, N)` of random trees."""
    mask = torch.eye(nodes, dtype=torch.bool).repeat(batch, 1, 1)
    depths = torch.zeros(batch, nodes, dtype=torch.long)
    for b in range(batch):
        for node in range(1, nodes):
            parent = int(torch.randint(0, node, (), generator=generator))
            while depths[b, parent] >= depth:
                parent -= 1
            mask[b, node] |= mask[b, parent]
            depths[b, node] = depths[b, parent] + 1
    return mask, depths


def tensors(batch, kv_heads, groups, nodes, slots, size, dtype, value_size=None, seed=0):
    """Queries, keys and values; the queries come transposed, as from a model."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, nodes, kv_heads * groups, size, generator=generator).transpose(1, 2)
    key = torch.randn(batch, kv_heads, slots, size, generator=generator)
    value = torch.randn(batch, kv_heads, slots, value_size or size, generator=generator)
    return tuple(x.to(dtype) for x in (query, key, value))


def computed(backend, method, inputs, options, device="cpu", form="contiguous"):
    """What a function of a backend returns, computed on a device, on the CPU."""
    (query, key, value, *rest), options = on(device, inputs, options)
    inputs = query, layout(key, form), layout(value, form), *rest
    name = "attention_with_scores" if method == "scored" else f"{method}_attention"
    return on("cpu", *getattr(backend, name)(*inputs, **options))


def double(*xs):
    return tuple(x.double() for x in xs)


def prefix_case(nodes, groups, size, lengths, window, dtype, softcap=None, value_size=None):
    """Queries, keys, values, lengths and options of `prefix_attention`, its exact state, and the plain output."""
    query, key, value = tensors(len(lengths), 2, groups, nodes, max(lengths) + nodes, size, dtype, value_size)
    for b, length in enumerate(lengths):
        key[b, :, length:], value[b, :, length:] = torch.nan, torch.nan
    on_device, lengths = torch.tensor(lengths), SeqLens(lengths)
    ahead = torch.randint(-1, nodes, (len(on_device), nodes), generator=torch.Generator().manual_seed(nodes))
    positions = on_device[:, None] + ahead
    options = {"scaling": size**-0.5, "positions": positions, "sliding_window": window, "softcap": softcap}
    exact = reference.prefix_attention(*double(query, key, value), lengths, **options)
    visible = torch.arange(key.shape[2]) < on_device[:, None, None]
    if window is not None:
        visible = visible & (positions[..., None] - torch.arange(key.shape[2]) < window)
    visible = visible.expand(-1, nodes, -1)[:, None]
    plain = plain_attention(query, key, value, visible, scaling=size**-0.5, softcap=softcap)
    return query, key, value, lengths, options, exact, plain


class Capture:
    """Keeps what a context passes to its capture."""

    def __init__(self):
        self.collected = []

    def collect(self, layer_idx, query, key, lse, **options):
        self.collected.append((layer_idx, query, key, lse, options))


def attended(context, backend, query, key, value, device="cpu", **options):
    """The state of one layer, computed on a device, on the CPU."""
    inputs, options = on(device, (query, key, value), options)
    context = context.to(device)  # the same copy in every call, so the capture of this call is given to the copy
    context.capture = Capture()
    out = context.attend(backend, 0, *inputs, scaling=SCALING, **options)
    return on("cpu", out, context.capture.collected[0][3])


def tree_case(lengths, nodes, kv_heads=2, groups=3, size=16, value_size=16, dtype=torch.float32, seed=0):
    """A context, the queries of its nodes, and a cache with NaN after them."""
    generator = torch.Generator().manual_seed(seed)
    mask, depths = random_tree(len(lengths), nodes, generator)
    context = TreeContext(SeqLens(lengths), torch.tensor(lengths)[:, None] + depths, mask)
    query = torch.randn(len(lengths), nodes, kv_heads * groups, size, generator=generator).transpose(1, 2)
    # Scores of at most unit variance, as a model's: the lse is held to an absolute error, whatever its size
    query = query * min(1.0, 1 / (SCALING * size**0.5))
    slots = max(lengths) + nodes + 5
    key = torch.randn(len(lengths), kv_heads, slots, size, generator=generator)
    value = torch.randn(len(lengths), kv_heads, slots, value_size, generator=generator)
    for b, length in enumerate(lengths):
        key[b, :, length + nodes :] = torch.nan
        value[b, :, length + nodes :] = torch.nan
    return context, query.to(dtype), key.to(dtype), value.to(dtype)


def visible_slots(context, slots, window):
    """`(B, 1, N, slots)`: the prefix and the path of every node, as far as the window reaches."""
    batch, nodes = context.positions.shape
    visible = torch.zeros(batch, 1, nodes, slots, dtype=torch.bool)
    for b, length in enumerate(context.lengths.host):
        for n in range(nodes):
            position = int(context.positions[b, n])
            seen = [(j, j) for j in range(length)]
            seen += [(length + m, int(context.positions[b, m])) for m in range(nodes) if context.mask[b, n, m]]
            for slot, key_position in seen:
                visible[b, 0, n, slot] = window is None or position - key_position < window
    return visible


def expected_tree(context, query, key, value, window, softcap, sinks):
    """The exact state of a `tree_case`, and the plain output in its dtype."""
    visible = visible_slots(context, key.shape[2], window)
    options = {"scaling": SCALING, "softcap": softcap}
    alone = reference.tree_attention(*double(query, key, value), visible, **options)
    exact = merge_attention_states([alone], None if sinks is None else sinks.double())
    share = (alone[1] - exact[1]).exp().nan_to_num(0.0)  # of the weights, which sinks leave to the keys
    return exact, plain_attention(query, key, value, visible, **options) * share[..., None].to(value.dtype)
