"""Lengths of rows: the same numbers on the host, on devices and in graphs; windows that hide nothing."""

import pytest
import torch

from hf_longspec.attention_backends.lengths import SeqLens

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("lengths", "longest", "shared"),
    [((0, 0, 0), 0, 0), ((5, 5, 5), 5, 5), ((5, 2, 7), 7, None), ((7, 7, 6), 7, None), ((4,), 4, 4)],
)
def test_every_view_holds_the_same_numbers(lengths, longest, shared):
    made = SeqLens(list(lengths))
    assert (made.host, made.longest, made.shared, made.is_ragged) == (lengths, longest, shared, shared is None)
    assert made.on(CPU).tolist() == list(lengths)
    row, slot = made.slots(2, CPU)
    assert row.tolist() == [[number] for number in range(len(lengths))]
    assert slot.tolist() == [[length, length + 1] for length in lengths]
    more = made.plus(3)
    assert more.host == tuple(length + 3 for length in lengths) and more.longest == longest + 3
    assert more.shared == (None if shared is None else shared + 3) and more.on("cpu").tolist() == list(more.host)
    assert made.on(CPU).tolist() == list(lengths)
    assert made.plus(3) is more  # however many layers ask


def test_a_device_gets_them_once():
    made = SeqLens([0, 4])
    assert made.on(CPU) is made.on("cpu") and made.slots(4, CPU)[1] is made.slots(4, CPU)[1]
    assert made.on("meta").device.type == "meta" and made.slots(3, CPU)[1].shape == (2, 3)
    assert SeqLens.equal(4, 2).on(CPU).tolist() == [4, 4] == list(SeqLens.equal(4, 2).host)
    given = torch.tensor([0, 4])
    assert SeqLens([0, 4], given).on(CPU) is given


def test_lengths_that_the_host_does_not_know():
    made = SeqLens(None, torch.tensor([3, 9]))
    assert (made.host, made.longest, made.shared) == ((), None, None)
    assert made.plus(1).on(CPU).tolist() == [4, 10] and made.plus(1).host == ()
    assert not made.fit_window(100, 1)


@pytest.mark.parametrize(
    ("lengths", "sizes", "known", "expected"),
    [
        ([5, 5], [5], 1, ((5, 5), 5, 5)),
        ([5, 7], [5, 7], 2, ((5, 7), None, None)),  # no length is compared with another one
        ([5, 7], [1024], 0, ((), 1024, None)),
    ],
)
def test_in_a_graph_they_come_as_sizes(lengths, sizes, known, expected):
    made = SeqLens.in_graph(torch.tensor(lengths), [torch.empty(size, 0) for size in sizes], known)
    assert (made.host, made.longest, made.shared) == expected and made.on(CPU).tolist() == lengths


@pytest.mark.parametrize("nodes", [1, 2, 7])
@pytest.mark.parametrize("longest", [0, 1, 12])
def test_a_window_holds_all_if_the_deepest_node_of_a_chain_sees_slot_0(longest, nodes):
    for window in range(1, longest + nodes + 3):
        positions = range(longest, longest + nodes)  # of a chain, the deepest tree
        seen = [slot for slot in range(longest + nodes) if all(place - slot < window for place in positions)]
        assert SeqLens([0, longest]).fit_window(window, nodes) == (0 in seen), window
