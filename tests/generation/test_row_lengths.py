"""Lengths of rows: what is said of them on the host and on a device, before and after they change."""

import pytest
import torch

from hf_longspec.generation.cache import RowLengths

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("lengths", "longest", "equal"), [((0, 0, 0), 0, 0), ((5, 5, 5), 5, 5), ((5, 2, 7), 7, None), ((7, 7, 6), 7, None)]
)
def test_every_form_says_the_same(lengths, longest, equal):
    rows = RowLengths(3)
    assert (rows.host, rows.longest, rows.equal_length) == ((0, 0, 0), 0, 0)
    assert rows.on(CPU).tolist() == [0, 0, 0]  # asked before they change
    rows.slots(2, CPU)
    rows.set(list(lengths))
    assert (rows.host, rows.longest, rows.equal_length) == (lengths, longest, equal)
    assert rows.on(CPU).tolist() == list(lengths)
    row, slot = rows.slots(2, CPU)
    assert row.tolist() == [[0], [1], [2]]
    assert slot.tolist() == [[length, length + 1] for length in lengths]


def test_a_device_gets_them_once_until_they_change():
    rows = RowLengths(2)
    assert rows.on(CPU) is rows.on(CPU)
    assert rows.on(torch.device("meta")).device.type == "meta"
    before, (_, slot) = rows.on(CPU), rows.slots(4, CPU)
    assert rows.slots(4, CPU)[1] is slot and rows.slots(3, CPU)[1].shape == (2, 3)
    rows.set((1, 4))
    assert rows.on(CPU) is not before and before.tolist() == [0, 0]
