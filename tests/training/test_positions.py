"""Anchor-Offset Indices on cases computed by hand."""

from hf_longspec.training.positions import anchor_offset_positions


def test_anchors_stay_and_the_rest_moves():
    positions = anchor_offset_positions(7, [0, 10, 500], anchors=4)
    assert positions.tolist() == [
        [0, 1, 2, 3, 4, 5, 6],
        [0, 1, 2, 3, 14, 15, 16],
        [0, 1, 2, 3, 504, 505, 506],
    ]


def test_without_anchors_everything_moves():
    assert anchor_offset_positions(3, [8], anchors=0).tolist() == [[8, 9, 10]]


def test_a_row_of_anchors_alone_does_not_move():
    assert anchor_offset_positions(3, [8], anchors=4).tolist() == [[0, 1, 2]]
