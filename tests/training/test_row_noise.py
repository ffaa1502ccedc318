"""Gaps and offsets: their ranges, their laws, and what they depend on."""

from collections import Counter

import pytest
import torch

from hf_longspec.training.row_noise import RowNoise, mixed, without_keyless

LIMIT = 64


def draws(noise, steps, rows=8, length=60):
    """Gaps and offsets of all rows of some steps."""
    pairs = []
    for step in steps:
        gaps, offsets = noise.draw(step, rows, range(rows), [length] * rows)
        pairs += zip(gaps, offsets, strict=True)
    return pairs


def test_all_gaps_and_offsets_of_the_range_are_equally_likely():
    pairs = draws(RowNoise(0, (2, 4), LIMIT, None), range(1500))
    # 12,000 draws over 3 x 5 cells: 800 each, standard deviation 27; five of them
    cells = Counter(pairs)
    assert set(cells) == {(gap, offset) for gap in (2, 3, 4) for offset in range(LIMIT - 60 + 1)}
    assert all(abs(count - 800) < 5 * 27.3 for count in cells.values())


def test_offsets_keep_a_row_within_the_target():
    noise = RowNoise(0, (1, 5), LIMIT, None)
    for length in (1, 37, 64):
        assert max(offset for _, offset in draws(noise, range(200), length=length)) == LIMIT - length


@pytest.mark.parametrize(("max_offset", "most"), [(0, 0), (3, 3), (1000, 4)])
def test_max_offset_narrows_the_range(max_offset, most):
    noise = RowNoise(0, (1, 1), LIMIT, max_offset)
    assert max(offset for _, offset in draws(noise, range(100))) == most


def test_a_row_draws_the_same_in_whatever_process_it_is():
    noise = RowNoise(3, (1, 5), None, 10_000)
    gaps, offsets = noise.draw(7, 6, range(6), [9] * 6)
    for rows in ([4, 5], [2], [1, 3]):
        part = noise.draw(7, 6, rows, [9] * len(rows))
        assert part == ([gaps[row] for row in rows], [offsets[row] for row in rows])


def test_rows_steps_and_seeds_draw_differently():
    offsets = {offset for seed in (0, 1) for _, offset in draws(RowNoise(seed, (1, 1), None, 10**9), range(3), rows=4)}
    assert len(offsets) == 2 * 3 * 4
    assert len({mixed(seed, step) for seed in range(30) for step in range(30)}) == 900


@pytest.mark.parametrize("gaps", [(0, 3), (3, 2), (1,)])
def test_impossible_gaps_are_refused(gaps):
    with pytest.raises(ValueError, match=r"noise_range=.*at least 1"):
        RowNoise(0, gaps, LIMIT, None)


def test_a_row_longer_than_the_target_is_refused():
    with pytest.raises(ValueError, match=r"65 tokens, and the target has 64 positions.*max_length"):
        RowNoise(0, (1, 1), LIMIT, None).draw(0, 1, [0], [65])


def test_a_target_without_positions_needs_a_bound():
    with pytest.raises(ValueError, match="set max_offset"):
        RowNoise(0, (1, 1), None, None)


def test_places_without_keys_are_not_predicted():
    labels = torch.arange(10, 18).repeat(2, 1)
    assert without_keyless(labels, [1, 3]).tolist() == [
        [-100, -100, 12, 13, 14, 15, 16, 17],
        [-100, -100, -100, -100, 14, 15, 16, 17],
    ]
