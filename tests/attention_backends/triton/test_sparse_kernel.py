"""Sparse attention in Triton against the reference in float64, in the interpreter where there is no GPU."""

import pytest
import torch

from hf_longspec.attention_backends import reference
from hf_longspec.attention_backends.triton import launch
from hf_longspec.attention_backends.triton.backend import sparse_attention
from hf_longspec.attention_backends.triton.config import SPLIT_SLOTS, sparse_config
from tests.attention_backends.oracle import assert_within_budget, layout, plain_attention
from tests.attention_backends.triton.machine import DEVICE

pytestmark = pytest.mark.usefixtures("kernel_device", "poisoned_memory")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SLOTS = 40
COUNTS = ((13,), (5, 0), (1, 7), (0,), (13, 2), (1,))
SIZES = ((8, 8), (64, 64), (40, 24), (16, 16), (32, 32))
LAYOUTS = ("buffer", "transposed", "columns", "contiguous")
# Every node count with every group size; the other axes rotate.
CASES = [
    pytest.param(*case, id="N{}-G{}-D{}-counts{}-{}-{}".format(*case))
    for case in (
        (nodes, groups, SIZES[i % 5], COUNTS[i % 6], LAYOUTS[(i + i // 4) % 4], DTYPES[(i + i // 3) % 3])
        for i, (nodes, groups) in enumerate((nodes, groups) for nodes in (1, 3, 5) for groups in (1, 2, 4, 7))
    )
]


def make_case(counts, groups, nodes, sizes, dtype, chosen=13, kv_heads=2, softcap=None, per_head=True, slots=SLOTS):
    """Inputs, whose slots that are not used hold NaN, with the exact state and torch's own result."""
    batch, (size, value_size) = len(counts), sizes
    generator = torch.Generator().manual_seed(nodes)
    query = torch.randn(batch, nodes, kv_heads * groups, size, generator=generator).transpose(1, 2).to(dtype)
    key, value = (torch.randn(batch, kv_heads, slots, n, generator=generator).to(dtype) for n in sizes)
    heads = kv_heads if per_head else 1
    picks = [torch.randperm(slots, generator=generator)[:chosen] for _ in range(batch * heads)]
    indices, counts = torch.stack(picks).view(batch, heads, chosen), torch.tensor(counts)
    options = {"scaling": size**-0.5, "softcap": softcap}
    exact = reference.sparse_attention(query.double(), key.double(), value.double(), indices, counts, **options)
    own = indices.expand(-1, kv_heads, -1)[..., None]
    gathered = key.gather(2, own.expand(-1, -1, -1, size)), value.gather(2, own.expand(-1, -1, -1, value_size))
    visible = (torch.arange(chosen) < counts[:, None])[:, None, None].expand(-1, 1, nodes, -1)
    plain = plain_attention(query, *gathered, visible, **options)
    used = torch.zeros(batch, kv_heads, slots, dtype=torch.bool)
    for b, count in enumerate(counts.tolist()):
        for h in range(kv_heads):
            used[b, h, indices[b, h if per_head else 0, :count]] = True
    key, value = (x.masked_fill(~used[..., None], torch.nan) for x in (key, value))
    return (query, key, value, indices, counts), options, exact, plain


def run(inputs, options, form="contiguous"):
    query, key, value, indices, counts = (x.to(DEVICE) for x in inputs)
    key, value = layout(key, form), layout(value, form)
    out, lse = sparse_attention(query, key, value, indices, counts, **options)
    return out.cpu(), lse.cpu()


@pytest.mark.parametrize(("nodes", "groups", "sizes", "counts", "form", "dtype"), CASES)
def test_parity(nodes, groups, sizes, counts, form, dtype):
    inputs, options, exact, plain = make_case(counts, groups, nodes, sizes, dtype)
    assert_within_budget(run(inputs, options, form), exact, plain)


@pytest.mark.parametrize(("dtype", "integers"), [(torch.float32, torch.int64), (torch.bfloat16, torch.int32)])
def test_softcap_indices_for_all_heads_and_several_tiles_of_queries(dtype, integers):
    inputs, options, exact, plain = make_case((13, 6), 2, 9, (16, 24), dtype, softcap=3.0, per_head=False)
    assert inputs[0].shape[2] * 2 > sparse_config(16, 24, dtype.itemsize).block_rows
    inputs = (*inputs[:3], *(numbers.to(integers) for numbers in inputs[3:]))
    assert_within_budget(run(inputs, options, "buffer"), exact, plain)


@pytest.mark.parametrize(
    ("counts", "length", "parts", "dtype"),
    [
        ((300, 129), 300, 3, torch.float32),
        ((0, 128), 256, 2, torch.bfloat16),
        ((1,), 2100, 17, torch.float16),  # 17 parts: two blocks of the merging kernel
    ],
)
def test_several_parts(counts, length, parts, dtype):
    """Full, partly used and empty parts."""
    inputs, options, exact, plain = make_case(
        counts, 2, 1, (16, 16), dtype, chosen=length, kv_heads=1, slots=length + 9
    )
    assert -(-length // SPLIT_SLOTS) == parts
    assert_within_budget(run(inputs, options), exact, plain)


def test_parts_do_not_depend_on_capacity():
    """Bit for bit: more room for slots, and more rows, change no sum."""
    inputs, options, _, _ = make_case((140, 100), 2, 1, (16, 16), torch.float32, chosen=300, kv_heads=1, slots=310)
    expected = run(inputs, options)
    query, key, value, indices, counts = inputs
    narrow = run((query[:1], key[:1], value[:1], indices[:1, :, :140], counts[:1]), options)
    assert torch.equal(narrow[0], expected[0][:1]) and torch.equal(narrow[1], expected[1][:1])


@pytest.mark.parametrize(("nodes", "chosen"), [(0, 5), (3, 0)])
def test_nothing_to_do(nodes, chosen):
    inputs, options, _, _ = make_case((0, 0), 2, nodes, (8, 8), torch.float32, chosen=chosen)
    out, lse = run(inputs, options)
    assert (out.shape, lse.shape) == ((2, 4, nodes, 8), (2, 4, nodes))
    assert not out.any() and (lse == -torch.inf).all()


def test_a_count_beyond_the_slots_reads_no_further():
    inputs, options, exact, plain = make_case((13,), 2, 1, (8, 8), torch.float32)
    assert_within_budget(run((*inputs[:4], torch.tensor([99])), options), exact, plain)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_custom_op(softcap):
    inputs, options, _, _ = make_case((140, 0), 2, 1, (8, 16), torch.float32, chosen=140, kv_heads=1, slots=150)
    inputs = tuple(x.to(DEVICE) for x in inputs)
    torch.library.opcheck(launch.sparse_op, (*inputs, 0.3, softcap))
    options["softcap"] = softcap

    def doubled(*tensors):
        out, lse = sparse_attention(*tensors, **options)
        return out * 2.0, lse

    compiled = torch.compile(doubled, backend="aot_eager", fullgraph=True)
    for found, expected in zip(compiled(*inputs), doubled(*inputs), strict=True):
        assert torch.equal(found, expected)


def test_a_second_copy_leaves_the_first_alone(kernel_copy):
    inputs, options, _, _ = make_case((13, 6), 2, 1, (8, 8), torch.float32)
    expected = run(inputs, options)
    copy = kernel_copy("hub_copy", "launch")
    for module in (copy, launch):
        out, lse = module.sparse_op(*(x.to(DEVICE) for x in inputs), *options.values())
        assert torch.equal(out.cpu(), expected[0]) and torch.equal(lse.cpu(), expected[1])
        copy.sparse_kernel = None  # whoever runs the copy's code from here on fails
