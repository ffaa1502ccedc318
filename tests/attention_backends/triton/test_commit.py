"""Moving accepted nodes by Triton, against a loop over copies."""

import pytest
import torch

from hf_longspec.attention_backends.triton import commit
from tests.attention_backends.triton.machine import DEVICE, counted

pytestmark = pytest.mark.usefixtures("kernel_device")

# Heads and widths of keys and values of every layer: GQA, MLA, odd ones that fit no word of 8 bytes, and more numbers
# than a program moves at a time.
LAYERS = (((2, 16), (2, 16)), ((4, 24), (4, 16)), ((1, 5), (1, 3)), ((3, 160), (3, 40)))
PATHS = {
    "gaps": ((7, 0, 30), [[0, 1, 4, 5], [0, 2, 3, 9], [0, 3, 7, 8]], [4, 3, 0]),
    "overlapping": ((5, 11), [[0, 2, 3, 4, 5, 6], [0, 3, 4, 5, 6, 7]], [6, 6]),  # targets are the sources of others
    "root": ((5, 11), [[0], [0]], [1, 1]),
    "ignored_entries": ((9,), [[0, 2, -7, 10**6]], [2]),
    "long": ((0, 3), [list(range(0, 80, 2)), [0, *range(2, 41)]], [40, 37]),  # several blocks of nodes
}


def make_buffers(batch, dtype, slots=90):
    """Junk everywhere, NaN included, in buffers of several arrangements."""
    generator = torch.Generator().manual_seed(0)
    buffers = []
    for number, (heads, size) in enumerate(shape for layer in LAYERS for shape in layer):
        junk = torch.randn(batch, heads, slots, size, generator=generator).to(dtype)
        junk[:, :, ::7] = torch.nan
        if number % 3 == 1:  # a slice of something longer
            junk = torch.cat([junk, junk], dim=2)[:, :, :slots]
        elif number % 3 == 2:  # (B, S, K, D) in memory
            junk = junk.transpose(1, 2).contiguous().transpose(1, 2)
        buffers.append(junk.to(DEVICE))
    return buffers


def moved_by_loop(buffer, lengths, path, counts):
    """Every node from a copy, one by one."""
    moved = buffer.clone()
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        for place, node in enumerate(path[row][:count]):
            moved[row, :, length + place] = buffer[row, :, length + node]
    return moved


def same_bits(found, expected):
    return torch.equal(found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


def on_device(*lists):
    return tuple(torch.tensor(numbers, device=DEVICE) for numbers in lists)


@pytest.mark.parametrize("name", PATHS)
def test_every_slot_of_every_buffer(name, monkeypatch):
    """Buffers of different dtypes are moved by one launch."""
    launches = []
    monkeypatch.setattr(commit, "_move_kernel", counted(commit._move_kernel, launches))
    lengths, path, counts = PATHS[name]
    buffers = [*make_buffers(len(lengths), torch.float32)[:4], *make_buffers(len(lengths), torch.bfloat16)[4:]]
    expected = [moved_by_loop(buffer, lengths, path, counts) for buffer in buffers]
    commit.move_nodes(buffers, *on_device(path, lengths, counts))
    assert all(map(same_bits, buffers, expected))
    assert [grid for _, grid in launches] == [(sum(buffer.shape[1] for buffer in buffers), len(lengths))]


def test_views_and_inference_tensors():
    """The cache passes a slice of a longer path, and was filled in inference mode."""
    lengths, path, counts = PATHS["gaps"]
    wide = torch.full((3, 9), -1, device=DEVICE)
    wide[:, :4] = torch.tensor(path)
    apart = [torch.tensor(numbers, device=DEVICE).repeat_interleave(2)[::2] for numbers in (lengths, counts)]
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            buffers = make_buffers(3, torch.float32)
            expected = [moved_by_loop(buffer, lengths, path, counts) for buffer in buffers]
            commit.move_nodes(buffers, wide[:, :4], *apart)
            assert all(map(same_bits, buffers, expected))


def test_columns_are_refused():
    apart = torch.zeros(1, 2, 8, 9).transpose(2, 3)
    with pytest.raises(ValueError, match=r"a buffer has strides \(144, 72, 1, 9\), expected 1 in the last"):
        commit.move_nodes([apart], *on_device([[0, 1]], [3], [2]))


def test_custom_op():
    lengths, path, counts = PATHS["overlapping"]
    buffers = make_buffers(2, torch.float32)[:2]
    torch.library.opcheck(commit.move_nodes, (buffers, *on_device(path, lengths, counts)))


def test_can_move(monkeypatch):
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    monkeypatch.setattr(commit, "_works_on", lambda device: True)
    assert commit.can_move(gpu) and not commit.can_move(cpu)
    monkeypatch.setattr(torch.version, "hip", "7.1")
    assert not commit.can_move(gpu)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(commit, "INSTALLED", False)
    assert not commit.can_move(gpu)


def raises(*args):
    raise RuntimeError("Failed to find C compiler")


@pytest.mark.parametrize(
    ("move", "problem"),
    [
        (commit.move_nodes, None),
        (raises, "RuntimeError: Failed to find C compiler"),
        (lambda *args: None, "it moved the wrong slots"),
    ],
)
def test_a_first_move_is_checked(move, problem, monkeypatch):
    """A kernel that does not work is not used, and a warning is logged."""
    told = []
    monkeypatch.setattr(commit, "move_nodes", move)
    monkeypatch.setattr(commit.logger, "warning", lambda text, *values: told.append(text % values))
    assert commit._works_on.__wrapped__(torch.device(DEVICE)) is (problem is None)
    assert not told if problem is None else problem in told[0] and "Torch moves them instead" in told[0]
