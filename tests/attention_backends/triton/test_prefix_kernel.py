"""The Triton prefix kernel against the reference in float64: interpreted on a CPU, compiled on a GPU."""

from itertools import cycle

import pytest
import torch

from hf_longspec.attention_backends import reference
from hf_longspec.attention_backends.lengths import SeqLens
from hf_longspec.attention_backends.triton.backend import TRITON_BACKEND
from hf_longspec.attention_backends.triton.launch import number_of_splits
from tests.attention_backends.oracle import assert_within_budget, layout, prefix_case, tensors
from tests.attention_backends.triton.machine import on

pytestmark = pytest.mark.usefixtures("small_tiles", "poisoned_memory")

# Around the edges of blocks (32 slots) and splits (64); the batches have rows that end in different splits.
LENGTHS = ((0,), (1,), (31,), (64, 33), (0, 5, 100), (65,), (63, 128), (96,), (127, 129), (300,))
SIZES = (16, 40, 64, 8, 80, 32, 96, 48)
WINDOWS = (None, 5, None, 1000, 33, 64, None)
LAYOUTS = ("buffer", "transposed", "contiguous")
SOFTCAPS = (None, None, 3.0)
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float32, torch.float16)
# Every node count with every group size; the other axes rotate, each with a period of its own.
CASES = [
    pytest.param(*case, id="N{}-G{}-D{}-L{}-w{}-{}-cap{}-{}".format(*case))
    for case in (
        (*shape, *rest)
        for shape, *rest in zip(
            [(nodes, groups) for nodes in (1, 2, 3, 7, 17) for groups in (1, 2, 4, 7)] + [(1, 4)] * 12,
            cycle(SIZES),
            cycle(LENGTHS),
            cycle(WINDOWS),
            cycle(LAYOUTS),
            cycle(SOFTCAPS),
            cycle(DTYPES),
            strict=False,
        )
    )
]


def run(device, query, key, value, lengths, options, form="buffer"):
    """The kernel's state, on the CPU."""
    options = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    inputs = on(device, query, layout(key, form), layout(value, form))
    return on("cpu", *TRITON_BACKEND.prefix_attention(*inputs, lengths, **options))


@pytest.mark.parametrize(("nodes", "groups", "size", "lengths", "window", "form", "softcap", "dtype"), CASES)
def test_prefix(kernel_device, nodes, groups, size, lengths, window, form, softcap, dtype):
    case = prefix_case(nodes, groups, size, lengths, window, dtype, softcap)
    query, key, value, lengths, options, exact, plain = case
    assert_within_budget(run(kernel_device, query, key, value, lengths, options, form), exact, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("size", "value_size"), [(24, 16), (8, 40)])
def test_value_size(kernel_device, size, value_size, dtype):
    case = prefix_case(5, 3, size, (90, 0, 33), 37, dtype, value_size=value_size)
    query, key, value, lengths, options, exact, plain = case
    assert_within_budget(run(kernel_device, query, key, value, lengths, options), exact, plain)


def test_a_last_stride_other_than_one(kernel_device):
    query, key, value, lengths, options, exact, plain = prefix_case(3, 2, 16, (50, 50), None, torch.float32)
    assert layout(key, "columns").stride(3) != 1
    assert_within_budget(run(kernel_device, query, key, value, lengths, options, "columns"), exact, plain)


@pytest.mark.parametrize("lengths", [(90, 0, 33), (70, 140, 64)], ids=str)
@pytest.mark.parametrize("window", [1, 32, 70])
def test_slots_before_every_window_are_not_read(kernel_device, window, lengths):
    """NaN wherever no query looks, before the window as well as after the prefix."""
    query, key, value, lengths, options, exact, plain = prefix_case(5, 3, 16, lengths, window, torch.float32)
    first = options["positions"].amin(1) - window + 1
    hidden = (torch.arange(key.shape[2]) < first[:, None])[:, None, :, None]
    key, value = key.masked_fill(hidden, torch.nan), value.masked_fill(hidden, torch.nan)
    assert_within_budget(run(kernel_device, query, key, value, lengths, options), exact, plain)


def test_int32_lengths_and_a_capacity_far_beyond_them(kernel_device):
    query, key, value, lengths, options, exact, plain = prefix_case(3, 2, 16, (70, 3), None, torch.float32)
    room = key.new_full((2, 2, 500, 16), torch.nan)
    key, value = torch.cat([key, room], 2), torch.cat([value, room], 2)
    assert_within_budget(
        run(kernel_device, query, key, value, SeqLens(None, lengths.on("cpu").int()), options), exact, plain
    )


def test_the_result_does_not_depend_on_the_capacity(kernel_device):
    """Splits have a fixed length: more room, or other rows in the batch, change no bit."""
    query, key, value, lengths, options, _, _ = prefix_case(3, 2, 16, (200, 70), None, torch.float32)
    options = {"scaling": options["scaling"]}
    both = run(kernel_device, query, key, value, lengths, options)
    alone = run(kernel_device, query[1:], key[1:, :, :70], value[1:, :, :70], SeqLens(lengths.host[1:]), options)
    for one, other in zip(both, alone, strict=True):
        assert torch.equal(one[1:], other)


def test_the_shipped_tiles(kernel_device, monkeypatch):
    monkeypatch.undo()
    case = prefix_case(3, 2, 64, (600, 512), None, torch.float16)
    query, key, value, lengths, options, exact, plain = case
    assert_within_budget(run(kernel_device, query, key, value, lengths, options), exact, plain)


def test_nothing_to_compute(kernel_device):
    query, key, value = tensors(2, 2, 2, 0, 7, 8, torch.float32)
    out, lse = run(kernel_device, query, key, value, SeqLens([7, 7]), {"scaling": 1.0})
    assert (out.shape, lse.shape) == ((2, 4, 0, 8), (2, 4, 0))
    query = torch.ones(2, 4, 3, 8)
    out, lse = run(kernel_device, query, key[:, :, :0], value[:, :, :0], SeqLens([0, 0]), {"scaling": 1.0})
    assert not out.any() and (lse == -torch.inf).all()


def test_a_buffer_that_is_too_short(kernel_device):
    query, key, value = tensors(1, 2, 4, 1, 50, 16, torch.float32)
    with pytest.raises(ValueError, match="slots 0 to 60 were asked for, but the buffer has 50"):
        run(kernel_device, query, key, value, SeqLens([60]), {"scaling": 1.0})


def test_a_window_needs_positions(kernel_device):
    query, key, value = tensors(1, 2, 4, 1, 50, 16, torch.float32)
    with pytest.raises(ValueError, match="sliding_window is 5, but positions is None"):
        run(kernel_device, query, key, value, SeqLens([50]), {"scaling": 1.0, "sliding_window": 5})


def test_rows_without_a_window_see_the_whole_prefix(kernel_device, monkeypatch):
    """Proof that the comparisons above can fail: a kernel that stops one slot early is off by far."""
    query, key, value, lengths, options, exact, plain = prefix_case(3, 2, 16, (65,), None, torch.float32)
    state = run(kernel_device, query, key, value, lengths.plus(-1), options)
    with pytest.raises(AssertionError):
        assert_within_budget(state, exact, plain)


def test_the_number_of_splits_follows_the_capacity(kernel_device):
    query, key, value = tensors(1, 2, 2, 1, 129, 16, torch.float32)
    assert number_of_splits(query, key, value) == 3


def test_double_is_not_what_kernels_calculate_in(kernel_device):
    call = reference.AttentionCall(kernel_device, torch.float64, 16, 16)
    assert "dtype is torch.float64" in TRITON_BACKEND.why_not(call)
