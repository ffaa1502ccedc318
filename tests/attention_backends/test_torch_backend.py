"""Causal attention of the torch backend against the reference in float64, and the proof that its fast paths run."""

import pytest
import torch

from hf_longspec.attention_backends import torch_backend
from hf_longspec.attention_backends.lengths import SeqLens
from hf_longspec.attention_backends.torch_backend import TORCH_BACKEND
from tests.attention_backends import reference
from tests.attention_backends.oracle import assert_within_budget, double, layout, plain_attention, tensors
from tests.pairwise import pairwise

DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize(
    ("nodes", "length", "window", "dtype", "softcap"),
    [
        *[(*case, None) for case in pairwise((1, 7, 40), (40, 90), (None, 1, 30, 90), DTYPES)],
        (40, 90, 30, torch.float32, 2.0),
        (40, 90, None, torch.bfloat16, 2.0),
        (1, 90, 30, torch.float32, 2.0),
        (60, 90, 30, torch.bfloat16, None),  # more than one block of queries
        (60, 90, None, torch.float32, 2.0),
    ],
)
def test_causal(nodes, length, window, dtype, softcap, monkeypatch):
    monkeypatch.setattr(torch_backend, "BLOCK_QUERIES", 50)
    query, key, value = tensors(2, 2, 3, nodes, length, 16, dtype)
    options = {"scaling": 0.25, "softcap": softcap}
    exact = reference.causal_attention(*double(query, key, value), sliding_window=window, **options)
    distance = torch.arange(length - nodes, length)[:, None] - torch.arange(length)
    visible = (distance >= 0) & (distance < (window or length))
    plain = plain_attention(query, key, value, visible[None, None], **options)
    key, value = layout(key, "buffer"), layout(value, "buffer")
    state = TORCH_BACKEND.causal_attention(query, key, value, sliding_window=window, **options)
    assert_within_budget(state, exact, plain)


class Spy:
    """Counts the calls of the fused op and keeps the shapes it was given."""

    def __init__(self, op):
        self.op, self.queries, self.keys, self.masks = op, [], [], []

    def __call__(self, query, key, value, *args, attn_mask=None, **kwargs):
        self.queries.append(tuple(query.shape))
        self.keys.append(key)
        self.masks.append(attn_mask)
        return self.op(query, key, value, *args, attn_mask=attn_mask, **kwargs)


@pytest.fixture
def spy(monkeypatch):
    spy = Spy(torch_backend._flash_cpu)
    monkeypatch.setattr(torch_backend, "_flash_cpu", spy)
    return spy


@pytest.mark.parametrize(
    ("nodes", "lengths", "options", "keys", "masks"),
    [
        (5, (40, 40), {}, [40], [None]),  # equal prefixes are one call
        (1, (40, 0, 7), {}, [40, 7], [None, None]),  # ragged ones one each; an empty one never reaches the op
        (3, (500,), {"sliding_window": 100, "positions": [[500, 501, 503]]}, [96, 3], [None, (1, 1, 3, 3)]),
        (1, (500,), {"sliding_window": 100, "positions": [[499]]}, [100], [None]),  # a single query needs no mask
        (3, (50,), {"softcap": 5.0}, [], []),  # the op has none
    ],
    ids=str,
)
def test_calls_of_the_fused_op_for_a_prefix(spy, nodes, lengths, options, keys, masks):
    """A window masks only its edge."""
    query, key, value = tensors(len(lengths), 2, 4, nodes, 500, 16, torch.float32)
    if "positions" in options:
        options = {**options, "positions": torch.tensor(options["positions"])}
    TORCH_BACKEND.prefix_attention(query, key, value, SeqLens(lengths), scaling=1.0, **options)
    assert [k.shape[2] for k in spy.keys] == keys
    assert [None if mask is None else tuple(mask.shape) for mask in spy.masks] == masks
    if lengths == (40, 40):
        assert spy.queries == [(4, 1, 20, 16)]  # packed: 2 rows x 2 heads, 4 heads of 5 queries each
        assert spy.keys[0].data_ptr() == key.data_ptr()  # no copy, no repeated heads


def test_causal_attention_is_two_calls_without_a_mask(spy):
    query, key, value = tensors(1, 2, 2, 40, 90, 16, torch.float32)
    TORCH_BACKEND.causal_attention(query, key, value, scaling=1.0)
    assert ([k.shape[2] for k in spy.keys], spy.masks) == ([40, 50], [None, None])


def test_no_mask_grows_with_the_square_of_the_length(spy):
    query, key, value = tensors(1, 1, 1, 5000, 5000, 8, torch.float32)
    TORCH_BACKEND.causal_attention(query, key, value, scaling=1.0, sliding_window=100)
    assert max(mask.numel() for mask in spy.masks) <= torch_backend.BLOCK_QUERIES * (torch_backend.BLOCK_QUERIES + 100)


@pytest.mark.parametrize(
    ("groups", "nodes", "dtype", "rows"),
    [(1, 1, torch.bfloat16, 2), (1, 1, torch.float32, 1), (3, 1, torch.float32, 4), (7, 5, torch.bfloat16, 36)],
)
def test_a_slow_number_of_rows_gets_one_more(spy, groups, nodes, dtype, rows):
    query, key, value = tensors(2, 2, groups, nodes, 50, 16, dtype)
    out, lse = TORCH_BACKEND.prefix_attention(query, key, value, SeqLens([50, 50]), scaling=1.0)
    assert spy.queries == [(4, 1, rows, 16)]
    assert (out.shape, lse.shape) == (query.shape, query.shape[:3])
