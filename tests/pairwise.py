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

    >>> [bool(case.marks) for case in few("abcde", 2)]
    [False, True, True, True, False]
    """
    cases = list(cases)
    kept = {round(place * (len(cases) - 1) / max(count - 1, 1)) for place in range(count)}
    return [case if number in kept else _soak(case) for number, case in enumerate(map(_param, cases))]


def _param(case):
    return case if hasattr(case, "marks") else pytest.param(*(case if type(case) is tuple else (case,)))


def _soak(case):
    return pytest.param(*case.values, marks=[*case.marks, pytest.mark.soak], id=case.id)


def _pairs(row):
    return set(combinations(sorted(row.items()), 2))
