"""Sparse attention in Triton against the reference in float64, in the interpreter where there is no GPU.

What the interpreter cannot show, whether the kernels compile for GPUs and fit their registers, the compiler is asked.
"""

from itertools import cycle

import pytest
import torch

from hf_longspec.attention_backends import reference, triton_sparse
from tests.attention_backends.kernels import CAPABILITIES, DEVICE, compiled, python
from tests.attention_backends.oracle import assert_within_budget, layout, plain_attention

pytestmark = pytest.mark.usefixtures("kernel_device", "poisoned_memory")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SLOTS = 40
COUNTS = ((13,), (5, 0), (1, 7), (0,), (13, 2), (1,))
SIZES = ((8, 8), (64, 64), (40, 24), (16, 16), (32, 32))
LAYOUTS = ("buffer", "transposed", "columns", "contiguous")
CASES = [
    pytest.param(nodes, groups, sizes, counts, form, id=f"N{nodes}-G{groups}-D{sizes}-counts{counts}-{form}")
    for (nodes, groups), sizes, counts, form in zip(
        [(nodes, groups) for nodes in (1, 3, 5) for groups in (1, 2, 4, 7)],
        cycle(SIZES),
        cycle(COUNTS),
        cycle(LAYOUTS),
        strict=False,
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
    out, lse = triton_sparse.sparse_attention(query, key, value, indices, counts, **options)
    return out.cpu(), lse.cpu()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("nodes", "groups", "sizes", "counts", "form"), CASES)
def test_parity(nodes, groups, sizes, counts, form, dtype):
    inputs, options, exact, plain = make_case(counts, groups, nodes, sizes, dtype)
    assert_within_budget(run(inputs, options, form), exact, plain)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_softcap_indices_for_all_heads_and_several_tiles_of_queries(dtype):
    case = make_case((13, 6), 2, 17, (16, 24), dtype, softcap=3.0, per_head=False)
    inputs, options, exact, plain = case
    assert inputs[0].shape[2] * 2 > triton_sparse.tiles(24, dtype.itemsize)["BLOCK_ROWS"]
    assert_within_budget(run(inputs, options, "buffer"), exact, plain)
    as_int32 = (*inputs[:3], inputs[3].int(), inputs[4].int())
    assert_within_budget(run(as_int32, options, "buffer"), exact, plain)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("counts", "length", "parts"),
    [((300, 129), 300, 3), ((0, 128), 256, 2), ((1,), 2100, 17)],  # 17 parts: two blocks of the merging kernel
)
def test_several_parts(counts, length, parts, dtype):
    """Full, partly used and empty parts."""
    inputs, options, exact, plain = make_case(
        counts, 2, 1, (16, 16), dtype, chosen=length, kv_heads=1, slots=length + 9
    )
    assert -(-length // triton_sparse.SPLIT_SLOTS) == parts
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
    torch.library.opcheck(triton_sparse.sparse_op, (*inputs, 0.3, softcap))
    options["softcap"] = softcap

    def doubled(*tensors):
        out, lse = triton_sparse.sparse_attention(*tensors, **options)
        return out * 2.0, lse

    compiled = torch.compile(doubled, backend="aot_eager", fullgraph=True)
    for found, expected in zip(compiled(*inputs), doubled(*inputs), strict=True):
        assert torch.equal(found, expected)


def test_a_second_copy_leaves_the_first_alone(kernel_copy):
    inputs, options, _, _ = make_case((13, 6), 2, 1, (8, 8), torch.float32)
    expected = run(inputs, options)
    copy = kernel_copy("hub_copy", "triton_sparse")
    for module in (copy, triton_sparse):
        out, lse = module.sparse_attention(*(x.to(DEVICE) for x in inputs), **options)
        assert torch.equal(out.cpu(), expected[0]) and torch.equal(lse.cpu(), expected[1])
        copy.sparse_kernel = None  # whoever runs the copy's code from here on fails


def test_without_triton_and_flash_attn():
    told = python(
        "-c",
        "import sys, torch\n"
        "for name in ('triton', 'flash_attn', 'flash_attn_interface'): sys.modules[name] = None\n"
        "import hf_longspec\n"
        "from hf_longspec.attention_backends import flash, triton_commit\n"
        "print(triton_commit.can_move(torch.device('cuda')))\n"
        "print(flash.flash_function(9), flash.flash_function(8))\n",
    )
    assert told.splitlines() == ["False", "None None"]


# dtype, sizes of keys and values, softcap: every choice that `tiles` can make, at the sizes of common models; one that
# is no power of two, and MLA's two.
SHIPPED = (
    (torch.float16, 128, 128, None),
    (torch.bfloat16, 64, 64, None),
    (torch.bfloat16, 128, 128, None),
    (torch.bfloat16, 80, 80, 3.0),
    (torch.bfloat16, 192, 128, None),
    (torch.bfloat16, 256, 256, 3.0),
    (torch.float32, 128, 128, None),
    (torch.float32, 256, 256, 3.0),
)
# Compiling takes a second per variant: `make soak` compiles the others.
COMMON = (SHIPPED[2], SHIPPED[3], SHIPPED[6])


def calls_of(shapes):
    """`(label, launch)` for aot.py."""
    for dtype, size, value_size, softcap in shapes:
        query = torch.empty(2, 14, 1, size, dtype=dtype)
        key, value = (torch.empty(2, 2, 40, n, dtype=dtype) for n in (size, value_size))
        indices, counts = torch.zeros(2, 2, 300, dtype=torch.long), torch.zeros(2, dtype=torch.long)
        call = (query, key, value, indices, counts, 0.1, softcap)
        yield f"{dtype} {size} {value_size}", lambda call=call: triton_sparse.sparse_op._init_fn(*call)


def common_calls():
    return calls_of(COMMON)


def shipped_calls():
    return calls_of(SHIPPED)


@pytest.mark.parametrize(
    ("calls", "shapes"),
    [("common_calls", COMMON), pytest.param("shipped_calls", SHIPPED, marks=pytest.mark.soak)],
    ids=["common", "shipped"],
)
def test_compiles_without_spilling(calls, shapes, tmp_path):
    kernels = compiled(__name__, calls, tmp_path)
    assert {kernel["kernel"] for kernel in kernels} == {"sparse_kernel", "combine_kernel"}
    assert len(kernels) == 2 * len(shapes) * len(CAPABILITIES)
    for kernel in kernels:
        assert kernel["STACK"] == kernel["LOCAL"] == 0, kernel
        assert kernel["SHARED"] <= 99 * 1024, (
            kernel
        )  # sm_86 and sm_89, which run what is compiled for sm_80, have least
