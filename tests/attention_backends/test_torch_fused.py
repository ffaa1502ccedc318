"""The traps of torch's fused attention op on CPU, each sprung once."""

import pytest
import torch

from hf_longspec.attention_backends import torch_backend
from hf_longspec.attention_backends.torch_backend import can_fuse, fused_attention
from tests.attention_backends.oracle import assert_within_budget, layout, plain_attention
from tests.attention_backends.reference import tree_attention


def tensors(heads=4, nodes=5, slots=9, size=8, value_size=8):
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, heads, nodes, size), (2, 2, slots, size), (2, 2, slots, value_size))
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


def check(query, key, value, visible, **options):
    exact = tree_attention(query.double(), key.double(), value.double(), visible, scaling=0.5)
    plain = plain_attention(query, key, value, visible, scaling=0.5)
    assert_within_budget(fused_attention(query, key, value, scaling=0.5, **options), exact, plain)


def everything(query, key):
    return torch.ones(2, 1, query.shape[2], key.shape[2], dtype=torch.bool)


@pytest.mark.parametrize(("nodes", "slots"), [(5, 0), (0, 9)])
def test_nothing_to_compute(nodes, slots):
    """The op would divide by zero, and the process would end."""
    query, key, value = tensors(nodes=nodes, slots=slots)
    out, lse = fused_attention(query, key, value, scaling=0.5)
    assert (out.shape, lse.shape) == ((2, 4, nodes, 8), (2, 4, nodes))
    assert not out.any()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize("which", [0, 1, 2])
def test_last_stride(which):
    inputs = list(tensors())
    inputs[which] = layout(inputs[which], "columns")
    assert inputs[which].stride(3) != 1
    check(*inputs, everything(*inputs[:2]))


@pytest.mark.parametrize(
    "sizes",
    [
        {"size": 8, "value_size": 5},
        {"size": 5, "value_size": 8},
        {"size": 1, "value_size": 1},
        {"heads": 6},  # grouped, without packing
    ],
    ids=str,
)
def test_sizes(sizes):
    inputs = tensors(**sizes)
    check(*inputs, everything(*inputs[:2]))


def test_a_query_that_sees_nothing():
    inputs = tensors()
    visible = everything(*inputs[:2])
    visible[0, :, 2] = False
    mask = torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)
    check(*inputs, visible, mask=mask)


def test_causal_is_for_squares():
    inputs = tensors(nodes=9)
    check(*inputs, everything(*inputs[:2]).tril(), is_causal=True)


@pytest.mark.parametrize("masked", [False, True])
def test_what_can_be_fused(masked):
    odd = torch.empty(1, 1, 1, 33), torch.empty(1, 1, 1, 7)
    assert can_fuse(*odd, masked=masked)
    assert not can_fuse(*(x.to("meta") for x in odd), masked=masked)  # neither CPU nor CUDA


@pytest.mark.parametrize("masked", ["no", "one", "each"])
def test_in_parts(masked, monkeypatch):
    """Many 16-bit queries: a few batch rows at a time, each with its own mask, to the numbers of one call."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(5, 1, n, 8, generator=generator).bfloat16() for n in (70, 33, 33))
    mask = torch.zeros(5 if masked == "each" else 1, 1, 70, 33).bfloat16()
    mask[:, :, 3:, :7] = -torch.inf
    mask[-1, :, :, 9:11] = -torch.inf
    mask = None if masked == "no" else mask
    whole = fused_attention(query, key, value, mask, scaling=0.5)
    monkeypatch.setattr(torch_backend, "REARRANGED_BYTES", 2 * 2 * 2 * 33 * 8)  # keys and values of two rows
    calls, op = [], torch_backend._flash_cpu
    monkeypatch.setattr(torch_backend, "_flash_cpu", lambda *args, **kwargs: calls.append(1) or op(*args, **kwargs))
    for part, one in zip(fused_attention(query, key, value, mask, scaling=0.5), whole, strict=True):
        assert torch.equal(part, one)
    assert len(calls) == 3
    for whole in ((query.float(), key.float(), value.float()), (query[:, :, :63], key, value)):
        fused_attention(*whole, scaling=0.5)
    assert len(calls) == 5  # in one call each
