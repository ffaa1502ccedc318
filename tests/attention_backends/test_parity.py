"""Every backend against the reference in float64: over a prefix, a tree, both at once, whole texts.

Torch runs in small blocks, once as on CUDA, once part by part; flash-attn is a stand-in; Triton's kernels run in small
tiles, interpreted where there is no GPU, and in memory that is NaN at first.
"""

import pytest
import torch

from hf_longspec.attention_backends import torch_backend
from hf_longspec.attention_backends.lengths import SeqLens
from hf_longspec.attention_backends.torch_backend import MASKED_ROWS, TORCH_BACKEND
from tests.attention_backends import reference
from tests.attention_backends.flash_standins import HALVES
from tests.attention_backends.oracle import (
    assert_within_budget,
    attended,
    computed,
    double,
    expected_tree,
    layout,
    plain_attention,
    prefix_case,
    random_tree,
    tensors,
    tree_case,
)
from tests.pairwise import few, pairwise

FLOAT32, FLOAT16, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16
LAYOUTS = ("buffer", "transposed", "contiguous", "columns")
GROUPS = (1, 2, 4, 7)
# Around the edges of blocks (32 slots) and splits (64); the batches have rows that end in different splits.
LENGTHS = ((0,), (1,), (64, 33), (0, 5, 100), (50, 50), (127, 129), (300,))
WINDOWS = (None, 1, 33, 64, 1000)
# Sizes of keys, and of values where they differ.
SIZES = ((8,), (40,), (64,), (24, 16), (128,), (8, 40), (80,))
SOFTCAPS = (None, 3.0)


def attend(prepared, name, method, inputs, options, form="contiguous"):
    """The state of a backend, on the CPU."""
    backend, device = prepared(name)
    return computed(backend, method, inputs, options, device, form)


PREFIX = [
    *pairwise(["torch"], (1, 3, 17, 69), GROUPS, SIZES, LENGTHS, WINDOWS, LAYOUTS, SOFTCAPS, (FLOAT32, BFLOAT16)),
    *pairwise(["torch_unfused"], (1, 7), (1, 2), SIZES[:2], LENGTHS[3:5], (5, 20), LAYOUTS[:1], SOFTCAPS, (FLOAT32,)),
    *pairwise(["flash2", "flash3"], (1, 3, 17), GROUPS, SIZES[:3], LENGTHS[1:6], WINDOWS, LAYOUTS, SOFTCAPS, HALVES),
    *pairwise(["triton"], (1, 2, 7), GROUPS, SIZES[1:6], LENGTHS[2:], WINDOWS, LAYOUTS, SOFTCAPS, (FLOAT32, *HALVES)),
    ("triton", 17, 4, (80,), (0, 1, 31), 5, "buffer", None, FLOAT16),
    ("triton", 17, 7, (16,), (100, 63), None, "transposed", 3.0, FLOAT32),
    ("torch", 3, 2, (16,), (20, 7), 9, "buffer", None, FLOAT16),
    ("torch", 3, 2, (16,), (20, 7), 9, "buffer", None, torch.float64),
    ("torch", 5, 3, (256,), (90, 0, 33), 37, "buffer", None, BFLOAT16),
    ("torch", 3, 2, (40,), (90, 0, 33, 7, 90), None, "buffer", None, FLOAT32),
    ("torch", 5, 1, (24, 16), (90, 0, 33, 7), 37, "transposed", None, FLOAT32),
    ("torch", 5, 4, (64,), (90, 1, 33, 7), 9, "columns", 3.0, BFLOAT16),
]


@pytest.mark.parametrize(
    ("name", "nodes", "groups", "sizes", "lengths", "window", "form", "softcap", "dtype"), few(PREFIX, 80)
)
def test_prefix(prepared, name, nodes, groups, sizes, lengths, window, form, softcap, dtype):
    """Depths out of order, as in a tree: every node has its own first key, and some see nothing of the prefix."""
    case = prefix_case(nodes, groups, sizes[0], lengths, window, dtype, softcap, sizes[-1])
    query, key, value, lengths, options, exact, plain = case
    on_device = SeqLens(None, lengths.on("cpu"))
    if name == "triton":  # it takes lengths from the device, of any type, and reads no slot before every window
        on_device = SeqLens(None, lengths.on("cpu").int())
        if window is not None:
            first = options["positions"].amin(1) - window + 1
            hidden = (torch.arange(key.shape[2]) < first[:, None])[:, None, :, None]
            key, value = key.masked_fill(hidden, torch.nan), value.masked_fill(hidden, torch.nan)
    if name == "torch" and len(lengths.host) >= MASKED_ROWS:  # slots of a cache hold numbers, those of rejected nodes
        key, value = key.nan_to_num(1e3), value.nan_to_num(1e3)
    for known in [on_device] if name == "triton" else [lengths, on_device]:
        state = attend(prepared, name, "prefix", (query, key, value, known), options, form)
        assert_within_budget(state, exact, plain)


@pytest.mark.parametrize(
    ("name", "nodes", "groups", "size", "form", "softcap", "dtype", "dims"),
    pairwise(
        ["torch", "triton"],
        (1, 3, 17, 37, 65),
        GROUPS,
        (8, 40, 96),
        LAYOUTS,
        SOFTCAPS,
        (FLOAT32, FLOAT16, BFLOAT16),
        ("BNM", "B1NM", "BHNM"),
    ),
)
def test_tree(prepared, name, nodes, groups, size, form, softcap, dtype, dims):
    query, key, value = tensors(2, 2, groups, nodes, nodes, size, dtype)
    mask, _ = random_tree(2, nodes, torch.Generator().manual_seed(nodes))
    mask[0, nodes // 2] = False  # sees nothing
    mask[0, -1, : nodes - 1] = False  # sees itself only, and nothing in the blocks before
    mask[1, :, nodes - 1] = False  # seen by nobody
    options = {"scaling": size**-0.5, "softcap": softcap}
    exact = reference.tree_attention(*double(query, key, value), mask, **options)
    plain = plain_attention(query, key, value, mask[:, None], **options)
    if name == "triton":
        key[1, :, nodes - 1], value[1, :, nodes - 1] = torch.nan, torch.nan
    mask = {"BNM": mask, "B1NM": mask[:, None], "BHNM": mask[:, None].expand(-1, 2 * groups, -1, -1)}[dims]
    state = attend(prepared, name, "tree", (query, key, value, mask), options, form)
    assert_within_budget(state, exact, plain)


@pytest.mark.parametrize(
    ("name", "heads", "softcap", "dtype"),
    [
        *pairwise(["torch", "triton"], (1, 4), SOFTCAPS, (FLOAT32,)),
        ("triton", 4, 3.0, torch.float64),
        ("triton", 1, None, BFLOAT16),
    ],
)
def test_tree_with_an_additive_mask(prepared, name, heads, softcap, dtype):
    query, key, value = tensors(2, 2, 2, 35, 50, 8, FLOAT32)
    bias = torch.randn(2, heads, 35, 50, generator=torch.Generator().manual_seed(1)).to(dtype)
    bias[0, :, 3] = torch.finfo(dtype).min
    bias[:, :, :, ::3] = -torch.inf
    options = {"scaling": 0.3, "softcap": softcap}
    exact = reference.tree_attention(*double(query, key, value), bias, **options)
    assert (exact[1][0, :, 3] == -torch.inf).all()
    added = bias.float().masked_fill(bias == torch.finfo(dtype).min, -torch.inf)
    plain = reference.tree_attention(query, key, value, added, **options)[0]
    assert_within_budget(attend(prepared, name, "tree", (query, key, value, bias), options), exact, plain)


@pytest.mark.parametrize("heads", [1, 2])
def test_chosen_slots(heads):
    """Of every key head, or of all heads together, up to the count of a row."""
    query, key, value = tensors(2, 2, 3, 5, 40, 16, FLOAT32)
    order = torch.rand(2, heads, 40, generator=torch.Generator().manual_seed(0)).argsort(-1)
    out, _ = TORCH_BACKEND.sparse_attention(query, key, value, order[..., :13], torch.tensor([5, 13]), scaling=0.25)
    for row, count in enumerate((5, 13)):
        for head in range(6):
            slots = order[row, head // 3 % heads, :count]
            scores = query[row, head].double() @ key[row, head // 3, slots].double().T * 0.25
            expected = scores.softmax(-1) @ value[row, head // 3, slots].double()
            torch.testing.assert_close(out[row, head].double(), expected, rtol=0, atol=1e-5)


HYBRID_LENGTHS = ((0,), (90,), (50, 50), (0, 90, 33), (64, 130))
# Window, softcap, and whether there are sinks.
HYBRID_OPTIONS = ((None, None, False), (4, None, True), (92, None, False), (40, 3.0, True), (400, 3.0, False))


@pytest.mark.parametrize(
    ("name", "lengths", "options", "nodes", "groups", "sizes", "dtype"),
    [
        *pairwise(
            ["torch", "torch_apart", "torch_parts", "triton"],
            HYBRID_LENGTHS,
            HYBRID_OPTIONS,
            (1, 5, 33),
            GROUPS,
            ((16, 16), (40, 40), (80, 80)),
            (FLOAT32,),
        ),
        *pairwise(
            ["flash2", "flash3", "triton", "torch", "torch_apart"],
            HYBRID_LENGTHS[1:4],
            HYBRID_OPTIONS,
            (1, 9),
            (2, 3),
            ((16, 16), (64, 64)),
            HALVES,
        ),
        ("torch", (0, 90, 33), (4, 3.0, False), 5, 3, (16, 12), FLOAT32),
        ("torch_apart", (64,), HYBRID_OPTIONS[0], 69, 7, (256, 256), BFLOAT16),
        ("torch_parts", (0, 90, 33), (4, 3.0, False), 5, 3, (16, 12), FLOAT32),
    ],
)
def test_every_node_sees_the_prefix_and_its_path(prepared, name, lengths, options, nodes, groups, sizes, dtype):
    """Against one softmax over both. The nodes are read where they are staged; their slots differ from row to row."""
    window, softcap, sinks = options
    context, query, key, value = tree_case(lengths, nodes, 2, groups, *sizes, dtype)
    sinks = torch.linspace(-2.0, 3.0, 2 * groups) if sinks else None
    exact, plain = expected_tree(context, query, key, value, window, softcap, sinks)
    backend, device = prepared(name)
    options = {"sliding_window": window, "softcap": softcap, "sinks": sinks}
    assert_within_budget(attended(context, backend, query, key, value, device, **options), exact, plain)
    assert len(context.calls) == 1


@pytest.mark.parametrize("name", ["torch", "flash2", "flash3", "triton"])
def test_nothing_to_compute(prepared, name):
    query, key, value = tensors(2, 2, 2, 3, 7, 8, FLOAT16 if name.startswith("flash") else FLOAT32)
    for nodes, slots in ((0, 7), (3, 0)):
        inputs = query[:, :, :nodes], key[:, :, :slots], value[:, :, :slots], SeqLens([0, 0])
        out, lse = attend(prepared, name, "prefix", inputs, {"scaling": 1.0})
        assert (out.shape, lse.shape) == ((2, 4, nodes, 8), (2, 4, nodes))
        assert not out.any() and (lse == -torch.inf).all()


@pytest.mark.parametrize(
    ("name", "method"), [("torch", "prefix"), ("triton", "prefix"), ("triton", "hybrid"), ("triton", "scored")]
)
def test_a_buffer_that_is_too_short(prepared, name, method):
    context, query, key, value = tree_case((60,), 5)
    more = {"prefix": (), "hybrid": (context.mask, context.positions), "scored": (torch.tensor([0]),)}[method]
    # the numbers after the slice exist in memory, and must not be read
    inputs = (query, key[:, :, :50], value[:, :, :50], context.lengths, *more)
    stop = 65 if method == "hybrid" else 60
    with pytest.raises(ValueError, match=f"slots 0 to {stop} are out of range: the buffer has 50"):
        attend(prepared, name, method, inputs, {"scaling": 1.0})


@pytest.mark.parametrize(
    ("nodes", "length", "window", "dtype", "softcap"),
    [
        *[(*case, None) for case in pairwise((1, 7, 40), (40, 90), (None, 1, 30, 90), (FLOAT32, BFLOAT16))],
        (40, 90, 30, FLOAT32, 2.0),
        (40, 90, None, BFLOAT16, 2.0),
        (1, 90, 30, FLOAT32, 2.0),
        (60, 90, 30, BFLOAT16, None),  # more than one block of queries
        (60, 90, None, FLOAT32, 2.0),
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
