"""The torch backend: the traps of torch's fused attention op on CPU, each sprung once; and that fast paths run."""

import pytest
import torch

from hf_longspec.attention_backends import torch_backend
from hf_longspec.attention_backends.lengths import SeqLens
from hf_longspec.attention_backends.torch_backend import TORCH_BACKEND, fused_attention
from tests.attention_backends.oracle import assert_within_budget, double, layout, plain_attention, tensors
from tests.attention_backends.reference import tree_attention

TRAPS = {
    # heads of a group, queries, keys, sizes of keys and values, the tensor whose last stride is not 1, what is visible
    "query_in_columns": (2, 5, 9, (8, 8), 0, "all"),
    "key_in_columns": (2, 5, 9, (8, 8), 1, "all"),
    "value_in_columns": (2, 5, 9, (8, 8), 2, "all"),
    "shorter_values": (2, 5, 9, (8, 5), None, "all"),
    "longer_values": (2, 5, 9, (5, 8), None, "all"),
    "single_numbers": (2, 5, 9, (1, 1), None, "all"),
    "grouped_without_packing": (3, 5, 9, (8, 8), None, "all"),
    "a_query_that_sees_nothing": (2, 5, 9, (8, 8), None, "some"),
    "causal_is_for_squares": (2, 9, 9, (8, 8), None, "causal"),
}


@pytest.mark.parametrize("name", TRAPS)
def test_traps_of_the_op(name):
    groups, nodes, slots, sizes, columns, seen = TRAPS[name]
    inputs = list(tensors(2, 2, groups, nodes, slots, sizes[0], torch.float32, sizes[1]))
    if columns is not None:
        inputs[columns] = layout(inputs[columns], "columns")
        assert inputs[columns].stride(3) != 1
    visible = torch.ones(2, 1, nodes, slots, dtype=torch.bool)
    options = {"is_causal": seen == "causal"}
    if seen == "causal":
        visible = visible.tril()
    elif seen == "some":
        visible[0, :, 2] = False
        options["mask"] = torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)
    exact = tree_attention(*double(*inputs), visible, scaling=0.5)
    plain = plain_attention(*inputs, visible, scaling=0.5)
    assert_within_budget(fused_attention(*inputs, scaling=0.5, **options), exact, plain)


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
        (5, (40, 0, 7, 33), {}, [40], [(8, 1, 20, 40)]),  # four and more are one call with a mask
        (5, (500, 0, 7, 33), {}, [500, 7, 33], [None] * 3),  # unless they are long
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


@pytest.mark.parametrize("masked", ["no", "one", "each"])
def test_in_parts(masked, monkeypatch, spy):
    """Many 16-bit queries: a few batch rows at a time, each with its own mask, to the numbers of one call."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(5, 1, n, 8, generator=generator).bfloat16() for n in (70, 33, 33))
    mask = torch.zeros(5 if masked == "each" else 1, 1, 70, 33).bfloat16()
    mask[:, :, 3:, :7] = -torch.inf
    mask[-1, :, :, 9:11] = -torch.inf
    mask = None if masked == "no" else mask
    whole = fused_attention(query, key, value, mask, scaling=0.5)
    monkeypatch.setattr(torch_backend, "REARRANGED_BYTES", 2 * 2 * 2 * 33 * 8)  # keys and values of two rows
    for part, one in zip(fused_attention(query, key, value, mask, scaling=0.5), whole, strict=True):
        assert torch.equal(part, one)
    assert len(spy.keys) == 1 + 3
    for inputs in ((query.float(), key.float(), value.float()), (query[:, :, :63], key, value)):
        fused_attention(*inputs, scaling=0.5)
    assert len(spy.keys) == 4 + 2  # in one call each
