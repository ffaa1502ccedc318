"""The torch backend against the reference in float64, and the proof that its fast paths run."""

import pytest
import torch

from hf_longspec.attention_backends import reference, torch_backend, torch_fused
from hf_longspec.attention_backends.lengths import SeqLens
from hf_longspec.attention_backends.torch_backend import TORCH_BACKEND
from tests.attention_backends.oracle import (
    assert_within_budget,
    double,
    layout,
    plain_attention,
    prefix_case,
    random_tree,
    tensors,
)
from tests.pairwise import pairwise

LENGTHS = ((0,), (1,), (33,), (64, 31), (0, 5, 100), (50, 50), (300,))
SIZES = (8, 16, 32, 40, 64, 80, 96, 128, 256)
WINDOWS = (None, 5, None, 1000, 40)
LAYOUTS = ("buffer", "transposed", "contiguous", "columns")
DTYPES = (torch.float32, torch.bfloat16)
# Every node count with every group size. The other axes rotate, with periods that share no factor with five or four.
CASES = [
    (nodes, groups, SIZES[i % 9], LENGTHS[i % 7], WINDOWS[i % 5], LAYOUTS[i % 3], DTYPES[(i + i // 4) % 2])
    for i, (nodes, groups) in enumerate((nodes, groups) for nodes in (1, 3, 7, 17, 69) for groups in (1, 2, 4, 7))
]


@pytest.mark.parametrize(("nodes", "groups", "size", "lengths", "window", "form", "dtype"), CASES)
def test_prefix(nodes, groups, size, lengths, window, form, dtype):
    query, key, value, lengths, options, exact, plain = prefix_case(nodes, groups, size, lengths, window, dtype)
    key, value = layout(key, form), layout(value, form)
    lengths = lengths if nodes % 2 else SeqLens(None, lengths.on("cpu"))  # read back
    state = TORCH_BACKEND.prefix_attention(query, key, value, lengths, **options)
    assert_within_budget(state, exact, plain)


@pytest.mark.parametrize("form", LAYOUTS)
def test_layouts_of_a_batch(form):
    query, key, value, lengths, options, exact, plain = prefix_case(3, 2, 16, (50, 50), None, torch.float32)
    key, value = layout(key, form), layout(value, form)
    assert_within_budget(TORCH_BACKEND.prefix_attention(query, key, value, lengths, **options), exact, plain)


def test_no_queries():
    query, key, value = tensors(2, 2, 2, 0, 7, 8, torch.float32)
    mask = torch.ones(2, 0, 7, dtype=torch.bool)
    for out, lse in (
        TORCH_BACKEND.prefix_attention(query, key, value, SeqLens([7, 7]), scaling=1.0),
        TORCH_BACKEND.tree_attention(query, key, value, mask, scaling=1.0),
    ):
        assert (out.shape, lse.shape) == ((2, 4, 0, 8), (2, 4, 0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("window", "softcap", "value_size"),
    [(None, 3.0, None), (37, 3.0, None), (None, None, 24), (37, None, 56), (9, 2.0, 24)],
)
def test_prefix_with_softcap_and_other_value_sizes(window, softcap, value_size, dtype):
    case = prefix_case(5, 3, 40, (90, 0, 33), window, dtype, softcap, value_size)
    query, key, value, lengths, options, exact, plain = case
    assert_within_budget(TORCH_BACKEND.prefix_attention(query, key, value, lengths, **options), exact, plain)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_prefix_in_other_dtypes(dtype):
    query, key, value, lengths, options, exact, plain = prefix_case(3, 2, 16, (20, 7), 9, dtype)
    assert_within_budget(TORCH_BACKEND.prefix_attention(query, key, value, lengths, **options), exact, plain)


@pytest.mark.parametrize("window", [None, 130])
def test_softcap_over_several_key_blocks(window, monkeypatch):
    monkeypatch.setattr(torch_backend, "BLOCK_KEYS", 64)
    case = prefix_case(3, 2, 8, (150, 129), window, torch.float32, softcap=2.0)
    query, key, value, lengths, options, exact, plain = case
    assert_within_budget(TORCH_BACKEND.prefix_attention(query, key, value, lengths, **options), exact, plain)


def test_a_window_on_a_device_whose_positions_are_not_read(monkeypatch):
    """The path of CUDA: no position is read back, no fused op takes a mask."""
    case = prefix_case(7, 2, 16, (90, 0, 33), 20, torch.float32)
    query, key, value, lengths, options, exact, plain = case
    monkeypatch.setattr(torch_backend, "can_fuse", lambda *args, masked=False: False)
    bounds = torch_backend._window_bounds
    monkeypatch.setattr(torch_backend, "_window_bounds", lambda positions, *args: bounds(positions.to("meta"), *args))
    state = TORCH_BACKEND.prefix_attention(query, key, value, lengths, **options)
    assert_within_budget(state, exact, plain)


@pytest.mark.parametrize(("case", "softcap", "dtype"), pairwise(CASES[::2], (None, 3.0), DTYPES))
def test_tree(case, softcap, dtype):
    nodes, groups, size, lengths, _, form, _ = case
    query, key, value = tensors(len(lengths), 2, groups, nodes, nodes, size, dtype)
    mask, _ = random_tree(len(lengths), nodes, torch.Generator().manual_seed(nodes))
    mask[0, nodes // 2] = False  # sees nothing
    options = {"scaling": size**-0.5, "softcap": softcap}
    exact = reference.tree_attention(*double(query, key, value), mask, **options)
    plain = plain_attention(query, key, value, mask[:, None], **options)
    key, value = layout(key, form), layout(value, form)
    assert_within_budget(TORCH_BACKEND.tree_attention(query, key, value, mask, **options), exact, plain)
    assert_within_budget(TORCH_BACKEND.tree_attention(query, key, value, mask[:, None], **options), exact, plain)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("heads", [1, 4])
def test_tree_with_an_additive_mask(heads, softcap, monkeypatch):
    monkeypatch.setattr(torch_backend, "BLOCK_KEYS", 20)
    monkeypatch.setattr(torch_backend, "BLOCK_QUERIES", 30)
    query, key, value = tensors(2, 2, 2, 50, 50, 8, torch.float32)
    bias = torch.randn(2, heads, 50, 50, generator=torch.Generator().manual_seed(1))
    bias[0, :, 3] = torch.finfo(torch.float32).min
    bias[:, :, :, ::3] = -torch.inf
    options = {"scaling": 0.3, "softcap": softcap}
    exact = reference.tree_attention(*double(query, key, value), bias, **options)
    assert (exact[1][0, :, 3] == -torch.inf).all()
    plain = reference.tree_attention(query, key, value, bias, **options)[0]
    assert_within_budget(TORCH_BACKEND.tree_attention(query, key, value, bias, **options), exact, plain)


@pytest.mark.parametrize(("rows", "form", "dtype"), pairwise(((1, True), (3, True), (3, False)), LAYOUTS, DTYPES))
def test_sparse(rows, form, dtype):
    batch, per_head = rows
    query, key, value = tensors(batch, 2, 4, 3, 60, 16, dtype, value_size=24)
    generator = torch.Generator().manual_seed(1)
    rows = batch * (2 if per_head else 1)
    indices = torch.stack([torch.randperm(60, generator=generator)[:20] for _ in range(rows)]).view(batch, -1, 20)
    counts = torch.tensor([20, 0, 7][:batch])
    exact = reference.sparse_attention(*double(query, key, value), indices, counts, scaling=0.3)
    plain = reference.sparse_attention(query, key, value, indices, counts, scaling=0.3)[0]
    key, value = layout(key, form), layout(value, form)
    assert_within_budget(TORCH_BACKEND.sparse_attention(query, key, value, indices, counts, scaling=0.3), exact, plain)


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
    spy = Spy(torch_fused._flash_cpu)
    monkeypatch.setattr(torch_fused, "_flash_cpu", spy)
    return spy


def test_equal_prefixes_are_one_call_on_the_cache_itself(spy):
    query, key, value = tensors(2, 2, 4, 5, 50, 16, torch.float32)
    TORCH_BACKEND.prefix_attention(query, key, value, SeqLens([40, 40]), scaling=1.0)
    assert spy.queries == [(4, 1, 20, 16)]  # packed: 2 rows x 2 heads, 4 heads of 5 queries each
    assert spy.keys[0].data_ptr() == key.data_ptr()  # no copy, no repeated heads
    assert spy.masks == [None]


def test_a_buffer_that_is_too_short():
    query, key, value = tensors(1, 2, 4, 1, 50, 16, torch.float32)
    whole = torch.zeros(1, 2, 90, 16)
    whole[:, :, :50] = key  # the numbers after the slice exist in memory, and must not be read
    with pytest.raises(ValueError, match="slots 0 to 60 were asked for, but the buffer has 50"):
        TORCH_BACKEND.prefix_attention(query, whole[:, :, :50], value, SeqLens([60]), scaling=1.0)


def test_ragged_prefixes_are_one_call_each(spy):
    query, key, value = tensors(3, 2, 4, 1, 50, 16, torch.float32)
    TORCH_BACKEND.prefix_attention(query, key, value, SeqLens([40, 0, 7]), scaling=1.0)
    assert [k.shape[2] for k in spy.keys] == [40, 7]  # an empty prefix never reaches the op


def test_a_window_masks_only_its_edge(spy):
    query, key, value = tensors(1, 2, 2, 3, 500, 16, torch.float32)
    positions = torch.tensor([[500, 501, 503]])
    options = {"positions": positions, "sliding_window": 100}
    TORCH_BACKEND.prefix_attention(query, key, value, SeqLens([500]), scaling=1.0, **options)
    assert [k.shape[2] for k in spy.keys] == [96, 3]
    assert [None if mask is None else tuple(mask.shape) for mask in spy.masks] == [None, (1, 1, 3, 3)]


def test_a_single_query_with_a_window_has_no_mask(spy):
    query, key, value = tensors(1, 2, 2, 1, 500, 16, torch.float32)
    options = {"positions": torch.tensor([[499]]), "sliding_window": 100}
    TORCH_BACKEND.prefix_attention(query, key, value, SeqLens([500]), scaling=1.0, **options)
    assert ([k.shape[2] for k in spy.keys], spy.masks) == ([100], [None])


def test_causal_attention_is_two_calls_without_a_mask(spy):
    query, key, value = tensors(1, 2, 2, 40, 90, 16, torch.float32)
    TORCH_BACKEND.causal_attention(query, key, value, scaling=1.0)
    assert ([k.shape[2] for k in spy.keys], spy.masks) == ([40, 50], [None, None])


def test_no_mask_grows_with_the_square_of_the_length(spy):
    query, key, value = tensors(1, 1, 1, 5000, 5000, 8, torch.float32)
    TORCH_BACKEND.causal_attention(query, key, value, scaling=1.0, sliding_window=100)
    assert max(mask.numel() for mask in spy.masks) <= torch_backend.BLOCK_QUERIES * (torch_backend.BLOCK_QUERIES + 100)


def test_softcap_never_reaches_the_fused_op(spy):
    query, key, value = tensors(1, 2, 2, 3, 50, 16, torch.float32)
    TORCH_BACKEND.prefix_attention(query, key, value, SeqLens([50]), scaling=1.0, softcap=5.0)
    assert spy.keys == []


@pytest.mark.parametrize(
    ("groups", "nodes", "dtype", "rows"),
    [(1, 1, torch.bfloat16, 2), (1, 1, torch.float32, 1), (3, 1, torch.float32, 4), (7, 5, torch.bfloat16, 36)],
)
def test_a_slow_number_of_rows_gets_one_more(spy, groups, nodes, dtype, rows):
    query, key, value = tensors(2, 2, groups, nodes, 50, 16, dtype)
    out, lse = TORCH_BACKEND.prefix_attention(query, key, value, SeqLens([50, 50]), scaling=1.0)
    assert spy.queries == [(4, 1, rows, 16)]
    assert (out.shape, lse.shape) == (query.shape, query.shape[:3])
