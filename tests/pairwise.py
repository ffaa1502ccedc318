"""Fewer cases: those that contain every pair of values of two axes, and a few whose others are marked soak."""

from itertools import combinations

import pytest


def pairwise(*axes):
    """Rows, one value per axis, such that any two values of two axes occur together in one of them.

    Most faults need one value or two together. The rows are always the same: the first pair that is missing begins a
    row, and every other axis takes the value that adds most of the missing pairs.

    >>> pairwise("ab", (1, 2), (True, False))
    [('a', 1, True), ('a', 2, False), ('b', 1, False), ('b', 2, True)]
    """
    missing = dict.fromkeys(
        ((i, x), (j, y))
        for i, j in combinations(range(len(axes)), 2)
        for x in range(len(axes[i]))
        for y in range(len(axes[j]))
    )
    rows = []
    while missing:
        row = dict(next(iter(missing)))
        for axis in range(len(axes)):
            if axis not in row:
                row[axis] = max(
                    range(len(axes[axis])), key=lambda x, a=axis: len(_pairs({**row, a: x}) & missing.keys())
                )
        for pair in _pairs(row):
            missing.pop(pair, None)
        rows.append(tuple(axes[axis][row[axis]] for axis in range(len(axes))))
    return rows


def few(cases, count):
    """Mark all cases soak but `count` of them, which lie evenly between the first and the last one.

    >>> [getattr(case, "values", case) for case in few("abcd", 2)]
    ['a', ('b',), ('c',), 'd']
    """
    cases = list(cases)
    kept = {round(place * (len(cases) - 1) / max(count - 1, 1)) for place in range(count)}
    return [cases[number] if number in kept else one for number, one in enumerate(soaked(cases))]


def soaked(cases):
    """Mark all cases soak.

    >>> [case.marks[0].name for case in soaked("ab")]
    ['soak', 'soak']
    """
    params = [case if hasattr(case, "marks") else pytest.param(*_values(case)) for case in cases]
    return [pytest.param(*case.values, marks=[*case.marks, pytest.mark.soak], id=case.id) for case in params]


def _values(case):
    return case if type(case) is tuple else (case,)


def _pairs(row):
    return set(combinations(sorted(row.items()), 2))
