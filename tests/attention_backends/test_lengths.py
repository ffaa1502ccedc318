"""Lengths of rows: the same numbers on the host, on devices and in graphs; windows that hide nothing."""

import pytest
import torch

from hf_longspec.attention_backends.lengths import SeqLens

CPU = torch.device("cpu")


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
