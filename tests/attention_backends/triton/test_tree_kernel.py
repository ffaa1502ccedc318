"""The Triton tree and merge kernels, alone and as hybrid tree attention, against the reference in float64."""

from dataclasses import replace

import pytest
import torch

from hf_longspec.attention_backends import reference
from hf_longspec.attention_backends.lengths import SeqLens
from hf_longspec.attention_backends.merge import merge_attention_states
from hf_longspec.attention_backends.triton import backend, launch
from hf_longspec.attention_backends.triton.backend import TRITON_BACKEND, hybrid_attention, scored_attention
from hf_longspec.attention_backends.triton.config import INTERPRETED
from hf_longspec.attention_backends.triton.launch import launch_combine
from tests.attention_backends.oracle import (
    SCALING,
    Capture,
    assert_within_budget,
    double,
    expected_tree,
    layout,
    plain_attention,
    random_tree,
    tensors,
    tree_case,
)
from tests.attention_backends.triton.machine import on

pytestmark = pytest.mark.usefixtures("small_tiles", "poisoned_memory")

FLOAT32, FLOAT16, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16


@pytest.mark.parametrize(
    ("nodes", "groups", "size", "form", "softcap", "dtype", "dims"),
    [
        (1, 1, 16, "contiguous", None, FLOAT32, "BNM"),
        (3, 7, 40, "buffer", None, BFLOAT16, "BHNM"),
        (7, 2, 80, "transposed", 3.0, FLOAT16, "B1NM"),
        (17, 4, 8, "columns", None, FLOAT32, "BHNM"),
        (33, 1, 96, "buffer", 3.0, BFLOAT16, "B1NM"),
        (37, 2, 32, "transposed", None, FLOAT16, "BNM"),
        (65, 1, 24, "buffer", None, FLOAT32, "BNM"),
    ],
)
def test_tree(kernel_device, nodes, groups, size, form, softcap, dtype, dims):
    query, key, value = tensors(2, 2, groups, nodes, nodes, size, dtype)
    mask, _ = random_tree(2, nodes, torch.Generator().manual_seed(nodes))
    mask[0, nodes // 2] = False  # sees nothing
    mask[0, -1, : nodes - 1] = False  # sees itself only, and nothing in the blocks before
    mask[1, :, nodes - 1] = False  # seen by nobody, and may be anything
    key[1, :, nodes - 1], value[1, :, nodes - 1] = torch.nan, torch.nan
    options = {"scaling": size**-0.5, "softcap": softcap}
    exact = reference.tree_attention(*double(query, key, value), mask, **options)
    plain = plain_attention(query, key, value, mask[:, None], **options)
    inputs = on(kernel_device, query, layout(key, form), layout(value, form))
    mask = {"BNM": mask, "B1NM": mask[:, None], "BHNM": mask[:, None].expand(-1, 2 * groups, -1, -1)}[dims]
    state = on("cpu", *TRITON_BACKEND.tree_attention(*inputs, mask.to(kernel_device), **options))
    assert_within_budget(state, exact, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("heads", "softcap"), [(1, None), (4, 3.0)])
def test_tree_with_an_additive_mask(kernel_device, heads, softcap, dtype):
    query, key, value = tensors(2, 2, 2, 35, 50, 8, torch.float32)
    bias = torch.randn(2, heads, 35, 50, generator=torch.Generator().manual_seed(1)).to(dtype)
    bias[0, :, 3] = torch.finfo(dtype).min
    bias[:, :, :, ::3] = -torch.inf
    options = {"scaling": 0.3, "softcap": softcap}
    exact = reference.tree_attention(*double(query, key, value), bias, **options)
    plain = reference.tree_attention(query, key, value, bias.float(), **options)[0]
    state = TRITON_BACKEND.tree_attention(*on(kernel_device, query, key, value, bias), **options)
    assert_within_budget(on("cpu", *state), exact, plain)


def test_a_bfloat16_mask_hides_with_its_own_lowest_number(kernel_device):
    query, key, value = tensors(1, 2, 2, 5, 9, 16, torch.bfloat16)
    visible = torch.ones(1, 1, 5, 9, dtype=torch.bool).tril()
    bias = torch.zeros(1, 1, 5, 9, dtype=torch.bfloat16).masked_fill(~visible, torch.finfo(torch.bfloat16).min)
    exact = reference.tree_attention(*double(query, key, value), visible, scaling=0.3)
    plain = plain_attention(query, key, value, visible, scaling=0.3)
    state = TRITON_BACKEND.tree_attention(*on(kernel_device, query, key, value, bias), scaling=0.3)
    assert_within_budget(on("cpu", *state), exact, plain)


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_combine(kernel_device, parts, with_sinks):
    """Any number of parts, some of them empty and their outputs NaN, against the merge in float64."""
    generator = torch.Generator().manual_seed(parts)
    out = torch.randn(2, 4, 9, parts, 12, generator=generator)
    lse = 10 * torch.randn(2, 4, 9, parts, generator=generator)
    lse[torch.rand(lse.shape, generator=generator) < 0.4] = -torch.inf
    lse[0, 0, 0] = -torch.inf
    empty = lse == -torch.inf
    sinks = torch.linspace(-9.0, 9.0, 4) if with_sinks else None
    states = [(out[..., p, :].double().masked_fill(empty[..., p, None], 0), lse[..., p].double()) for p in range(parts)]
    exact = merge_attention_states(states, None if sinks is None else sinks.double())
    inputs = (out.masked_fill(empty[..., None], torch.nan), lse / torch.tensor(2.0).log())
    state = launch_combine(*on(kernel_device, *inputs, out[:, :, 0], sinks))
    torch.testing.assert_close(state[0].cpu().double(), exact[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(state[1].cpu().double(), exact[1], rtol=1e-6, atol=1e-5)
    assert state[0].transpose(1, 2).is_contiguous()


def move(context, device):
    """A context of its own on the device."""
    return replace(context, positions=context.positions.to(device), mask=context.mask.to(device))


@pytest.mark.parametrize(
    ("lengths", "nodes", "groups", "size", "window", "softcap", "sinks", "dtype"),
    [
        ((0, 90, 33), 5, 3, 16, None, None, True, FLOAT32),
        ((64, 63), 7, 2, 40, 40, None, False, FLOAT16),
        ((90,), 17, 4, 32, 92, 3.0, True, BFLOAT16),
        ((50, 128), 1, 2, 16, 4, None, True, FLOAT32),
        ((0,), 33, 1, 24, 4, None, False, FLOAT32),
        ((300,), 3, 7, 16, None, None, False, FLOAT32),
        ((65, 65), 20, 2, 80, None, None, True, FLOAT16),
    ],
)
def test_hybrid(kernel_device, lengths, nodes, groups, size, window, softcap, sinks, dtype):
    """The nodes are read where they are staged; their slots differ from row to row, and NaN is after them."""
    context, query, key, value = tree_case(lengths, nodes, 2, groups, size, size, dtype)
    sinks = torch.linspace(-2.0, 3.0, 2 * groups) if sinks else None
    exact, plain = expected_tree(context, query, key, value, window, softcap, sinks)
    context = move(context, kernel_device)
    context.capture = Capture()
    query, key, value, sinks = on(kernel_device, query, key, value, sinks)
    options = {"scaling": SCALING, "sliding_window": window, "softcap": softcap, "sinks": sinks}
    out = context.attend(TRITON_BACKEND, 0, query, key, value, **options)
    state = on("cpu", out, context.capture.collected[0][3])
    assert_within_budget(state, exact, plain)


def test_hybrid_is_one_operator_and_reads_no_number(kernel_device, monkeypatch):
    """Wrong host lengths change nothing, as they must not under a CUDA graph; and no length leaves its tensor."""
    context, query, key, value = tree_case((70, 33), 5)
    exact, plain = expected_tree(context, query, key, value, None, None, None)
    calls, op = [], backend.hybrid_op
    monkeypatch.setattr(backend, "hybrid_op", lambda *args: calls.append(1) or op(*args))
    context = move(context, kernel_device)
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


def test_hybrid_with_scores(kernel_device):
    context, query, key, value = tree_case((70, 33), 9, dtype=torch.float32)
    sinks = torch.linspace(-2.0, 3.0, 6)
    exact, plain = expected_tree(context, query, key, value, None, None, sinks)
    inputs = (*on(kernel_device, query, key, value), context.lengths, torch.tensor([8, 3]))
    mask, sinks = on(kernel_device, context.mask, sinks)
    *state, scores = on("cpu", *scored_attention(*inputs, scaling=SCALING, mask=mask, sinks=sinks))
    assert_within_budget(state, exact, plain)
    grouped = query.unflatten(1, (2, 3))
    summed = (grouped[:, :, :, 0] + grouped[torch.arange(2), :, :, torch.tensor([8, 3])]).sum(2)  # [B, K, D]
    for b, length in enumerate((70, 33)):
        expected_scores = torch.einsum("kd,ksd->ks", summed[b], key[b, :, :length])
        torch.testing.assert_close(scores[b, :, :length], expected_scores, rtol=0, atol=2e-5)


def test_no_room_for_the_nodes(kernel_device):
    context, query, key, value = tree_case((70,), 5)
    mask, positions = on(kernel_device, context.mask, context.positions)
    inputs = on(kernel_device, query, key[:, :, :74], value[:, :, :74])
    with pytest.raises(ValueError, match="slots 0 to 75 were asked for, but the buffer has 74"):
        hybrid_attention(*inputs, context.lengths, mask, positions, scaling=1.0)


def test_sparse(kernel_device):
    query, key, value = tensors(3, 2, 4, 3, 60, 16, torch.float32, value_size=24)
    generator = torch.Generator().manual_seed(1)
    indices = torch.stack([torch.randperm(60, generator=generator)[:40] for _ in range(6)]).view(3, 2, 40)
    counts = torch.tensor([40, 0, 33])
    exact = reference.sparse_attention(*double(query, key, value), indices, counts, scaling=0.3)
    plain = reference.sparse_attention(query, key, value, indices, counts, scaling=0.3)[0]
    inputs = on(kernel_device, query, layout(key, "buffer"), layout(value, "buffer"), indices, counts)
    assert_within_budget(on("cpu", *TRITON_BACKEND.sparse_attention(*inputs, scaling=0.3)), exact, plain)


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
    context = move(context, kernel_device)
    context.capture = Capture()
    out = context.attend(TRITON_BACKEND, 0, query.to(kernel_device), *far, scaling=SCALING)
    assert_within_budget(on("cpu", out, context.capture.collected[0][3]), exact, plain)


@pytest.mark.skipif(not INTERPRETED, reason="a trap of the interpreter")
@pytest.mark.parametrize("name", ["prefix_kernel", "tree_kernel"])
def test_bfloat16_is_interpreted_wrongly_without_a_cast(kernel_device, name, monkeypatch):
    """Why kernels have the flag UPCAST, and that these tests would see if one ignored it."""
    kernel = getattr(launch, name)

    class WithoutCast:
        def __getitem__(self, grid):
            return lambda *args, **options: kernel[grid](*args, **options | {"UPCAST": False})

    monkeypatch.setattr(launch, name, WithoutCast())
    context, query, key, value = tree_case((20,), 5, dtype=BFLOAT16)
    exact, plain = expected_tree(context, query, key, value, None, None, None)
    context.capture = Capture()
    out = context.attend(TRITON_BACKEND, 0, query, key, value, scaling=SCALING)
    with pytest.raises(AssertionError):
        assert_within_budget((out, context.capture.collected[0][3]), exact, plain)


def test_the_shipped_merge(kernel_device, monkeypatch):
    monkeypatch.undo()
    assert (launch.BLOCK_STATES, launch.BLOCK_PARTS) == (1, 16)
    out, lse = torch.randn(1, 2, 3, 40, 16), torch.randn(1, 2, 3, 40)
    exact = merge_attention_states([(out[..., p, :].double(), lse[..., p].double()) for p in range(40)])
    state = launch_combine(*on(kernel_device, out, lse / torch.tensor(2.0).log(), out[:, :, 0]))
    torch.testing.assert_close(state[0].cpu().double(), exact[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(state[1].cpu().double(), exact[1], rtol=0, atol=1e-5)
