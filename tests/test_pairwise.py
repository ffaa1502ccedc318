"""The rows that stand in for full products."""

from itertools import combinations, product

from tests.pairwise import pairwise


def test_every_pair_of_values_occurs():
    axes = (range(4), "abc", range(6), (None, 1), (True, False))
    rows = pairwise(*axes)
    for first, second in combinations(range(len(axes)), 2):
        assert {(row[first], row[second]) for row in rows} == set(product(axes[first], axes[second]))
    assert 24 <= len(rows) <= 30  # the full product has 288
