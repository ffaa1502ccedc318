"""Entries hidden by a window, decided from sizes alone, against the distance between every node and every slot."""

import pytest

from hf_longspec.attention_backends.masks import window_holds_all


@pytest.mark.parametrize("nodes", [1, 2, 7])
@pytest.mark.parametrize("longest", [0, 1, 12])
def test_a_window_holds_all_if_the_deepest_node_of_a_chain_sees_slot_0(longest, nodes):
    for window in range(1, longest + nodes + 3):
        positions = range(longest, longest + nodes)  # of a chain, the deepest tree
        seen = [slot for slot in range(longest + nodes) if all(place - slot < window for place in positions)]
        assert window_holds_all(window, longest, nodes) == (0 in seen), window


def test_the_boundary():
    assert window_holds_all(16, 9, 7)
    assert not window_holds_all(15, 9, 7)
