"""The Triton kernels beyond their parity with other backends (test_parity.py): what they read, merge and launch.

Interpreted on a CPU, compiled on a GPU.
"""

import pytest
import torch

from hf_longspec.attention_backends.lengths import SeqLens
from hf_longspec.attention_backends.registry import merge_attention_states
from hf_longspec.attention_backends.triton import backend, launch
from hf_longspec.attention_backends.triton.backend import TRITON_BACKEND
from hf_longspec.attention_backends.triton.config import SPARSE_SPLIT
from hf_longspec.attention_backends.triton.launch import launch_combine
from tests.attention_backends.oracle import (
    SCALING,
    assert_within_budget,
    attended,
    expected_tree,
    layout,
    prefix_case,
    sparse_case,
    tree_case,
)
from tests.attention_backends.triton.machine import DEVICE, on

pytestmark = pytest.mark.usefixtures("kernel_device", "small_tiles", "poisoned_memory")

FLOAT32, FLOAT16, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16


def run(device, query, key, value, lengths, options, form="buffer"):
    """The state of the prefix kernel, on the CPU."""
    options = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    inputs = on(device, query, layout(key, form), layout(value, form))
    return on("cpu", *TRITON_BACKEND.prefix_attention(*inputs, lengths, **options))


def run_sparse(inputs, options):
    return on("cpu", *TRITON_BACKEND.sparse_attention(*on(DEVICE, *inputs), **options))


def test_the_result_does_not_depend_on_the_capacity(kernel_device, monkeypatch):
    """The length of a split follows from the row's own prefix: more room, or a longer row beside it, changes no bit."""
    monkeypatch.setattr(launch, "wanted_splits", lambda *args: 2)
    query, key, value, lengths, options, _, _ = prefix_case(3, 2, 16, (400, 170), None, torch.float32)
    options = {"scaling": options["scaling"]}
    both = run(kernel_device, query, key, value, lengths, options)
    twice = [1, 1]
    short = key[twice, :, :170], value[twice, :, :170], SeqLens([170, 170])
    same = run(kernel_device, query[twice], *short, options)
    for one, other in zip(both, same, strict=True):
        assert torch.equal(one[1], other[1])


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 70])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_combine(kernel_device, monkeypatch, parts, with_sinks):
    """Any number of parts, some of them empty and their outputs NaN, against the merge in float64."""
    if parts == 70:  # as it is shipped
        monkeypatch.undo()
        assert (launch.BLOCK_STATES, launch.BLOCK_PARTS) == (1, 64)
    generator = torch.Generator().manual_seed(parts)
    out = torch.randn(2, 4, 3, parts, 12, generator=generator)
    lse = 10 * torch.randn(2, 4, 3, parts, generator=generator)
    lse[torch.rand(lse.shape, generator=generator) < 0.4] = -torch.inf
    lse[0, 0, 0] = -torch.inf
    empty = lse == -torch.inf
    sinks = torch.linspace(-9.0, 9.0, 4) if with_sinks else None
    states = [(out[..., p, :].double().masked_fill(empty[..., p, None], 0), lse[..., p].double()) for p in range(parts)]
    exact = merge_attention_states(states, None if sinks is None else sinks.double())
    inputs = (out.masked_fill(empty[..., None], torch.nan), lse / torch.tensor(2.0).log())
    state = on("cpu", *launch_combine(*on(kernel_device, *inputs, out[:, :, 0], sinks)))
    torch.testing.assert_close(state[0].double(), exact[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(state[1].double(), exact[1], rtol=1e-6, atol=1e-5)
    assert state[0].transpose(1, 2).is_contiguous()


def test_hybrid_is_one_operator_and_reads_no_number(kernel_device, monkeypatch):
    """Wrong host lengths change nothing, as they must not under a CUDA graph; and no length leaves its tensor."""
    context, query, key, value = tree_case((70, 33), 5)
    exact, plain = expected_tree(context, query, key, value, None, None, None)
    calls, op = [], backend.hybrid_op
    monkeypatch.setattr(backend, "hybrid_op", lambda *args: calls.append(1) or op(*args))
    context = context.to(kernel_device)
    context.lengths = SeqLens([1, 1], context.lengths.on(kernel_device))
    inputs = on(kernel_device, query, key, value)
    for name in ("item", "tolist", "__bool__", "__int__", "__index__"):
        read = getattr(torch.Tensor, name)

        def guarded(self, read=read, name=name):
            assert self.dtype not in (torch.int64, torch.bool), f"{name} of {self.dtype}"
            return read(self)

        if kernel_device.type == "cuda":  # the interpreter itself reads them
            monkeypatch.setattr(torch.Tensor, name, guarded)
    out = context.attend(TRITON_BACKEND, 0, *inputs, scaling=SCALING)
    monkeypatch.undo()
    assert calls == [1]
    assert_within_budget((out.cpu(), exact[1].float()), exact, plain)


def test_offsets_beyond_32_bits(kernel_device):
    """Row 2 of a batch begins after 2^31 numbers. The memory is reserved, and only what is used is touched."""
    torch.use_deterministic_algorithms(False)  # poisoned_memory would fill all of it
    stride = 2**30 + 64
    try:
        memory = torch.empty(2 * stride + 2048, dtype=FLOAT16, device=kernel_device)
    except RuntimeError as error:
        pytest.skip(f"no address space: {error}")
    context, query, key, value = tree_case((20, 3, 9), 5, kv_heads=1, dtype=FLOAT16)
    exact, plain = expected_tree(context, query, key, value, None, None, None)
    view = {"size": key.shape, "stride": (stride, key[0, 0].numel(), 16, 1)}
    far = [memory.as_strided(**view, storage_offset=offset).copy_(x) for offset, x in ((0, key), (1024, value))]
    assert_within_budget(attended(context, TRITON_BACKEND, query, *far, kernel_device), exact, plain)


@pytest.mark.parametrize(
    ("counts", "length", "parts", "dtype"),
    [
        ((300, 129), 300, 3, torch.float32),
        ((0, 128), 256, 2, torch.bfloat16),
        ((1,), 2100, 17, torch.float16),  # 17 parts: two blocks of the merging kernel
    ],
)
def test_several_parts_of_chosen_slots(counts, length, parts, dtype):
    """Full, partly used and empty parts."""
    inputs, options, exact, plain = sparse_case(
        counts, 2, 1, (16, 16), dtype, chosen=length, kv_heads=1, slots=length + 9
    )
    assert -(-length // SPARSE_SPLIT) == parts
    assert_within_budget(run_sparse(inputs, options), exact, plain)


def test_parts_do_not_depend_on_capacity():
    """Bit for bit: more room for slots, and more rows, change no sum."""
    inputs, options, _, _ = sparse_case((140, 100), 2, 1, (16, 16), torch.float32, chosen=300, kv_heads=1, slots=310)
    expected = run_sparse(inputs, options)
    query, key, value, indices, counts = inputs
    narrow = run_sparse((query[:1], key[:1], value[:1], indices[:1, :, :140], counts[:1]), options)
    assert torch.equal(narrow[0], expected[0][:1]) and torch.equal(narrow[1], expected[1][:1])


def test_a_count_beyond_the_slots_reads_no_further():
    inputs, options, exact, plain = sparse_case((13,), 2, 1, (8, 8), torch.float32)
    assert_within_budget(run_sparse((*inputs[:4], torch.tensor([99])), options), exact, plain)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_custom_op_of_the_sparse_kernel(softcap):
    inputs, options, _, _ = sparse_case((140, 0), 2, 1, (8, 16), torch.float32, chosen=140, kv_heads=1, slots=150)
    inputs = tuple(x.to(DEVICE) for x in inputs)
    torch.library.opcheck(launch.sparse_op, (*inputs, 0.3, softcap))
    options["softcap"] = softcap

    def doubled(*tensors):
        out, lse = TRITON_BACKEND.sparse_attention(*tensors, **options)
        return out * 2.0, lse

    compiled = torch.compile(doubled, backend="aot_eager", fullgraph=True)
    for found, expected in zip(compiled(*inputs), doubled(*inputs), strict=True):
        assert torch.equal(found, expected)
