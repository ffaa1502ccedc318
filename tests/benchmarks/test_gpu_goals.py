"""The goals of a GPU run, judged by rows that are written here."""

import pytest

from benchmarks.gpu_goals import COMPILE, FUSED, GOALS, GRAPH, HF_ATTENTION, NOT_MEASURED, OFF, SIZES, TRITON, judged
from benchmarks.gpu_iterations import first_drafts
from benchmarks.gpu_run import LLAMA_8B
from hf_longspec.cli.measuring import PLAIN
from tests.tiny_targets import tiny_target

AT = {"batch": 1, "context": 32768}


def ms(median):
    return {"ms": {"median": median, "low": 0.0, "high": 99.0}}


def rows():
    """A run in which everything is measured: limits that are reached exactly, and a little better."""
    specattn = {"kind": "iteration", "mode": FUSED, "draft": "SpecAttn, gamma 6"}
    return {
        "environment": {"kind": "environment", "settings": {"shape": {"layers": 32}}},
        "ceilings": {"kind": "gpu_ceilings", "tb_per_second": 4.0},
        "one": {"kind": "kernel", "backend": TRITON, "nodes": 1, "tb_per_second": 3.2, **AT, **ms(1.0)},
        "few": {"kind": "kernel", "backend": TRITON, "nodes": 16, "tb_per_second": 3.24, **AT, **ms(2.0)},
        "many": {"kind": "kernel", "backend": TRITON, "nodes": 64, "tb_per_second": 1.0, **AT, **ms(1.5)},
        "sdpa": {"kind": "baseline", "baseline": HF_ATTENTION, "nodes": 64, **AT, **ms(10.0)},
        "scores": {"kind": "score_rows", "backend": TRITON, "nodes": 16, **AT, **ms(2.02)},
        "step": {"kind": "forward", "forward": "ours", "mode": FUSED, "nodes": 1, "context": 32768, **ms(5.0)},
        "tree": {"kind": "forward", "forward": "ours", "mode": FUSED, "nodes": 16, "context": 32768, **ms(5.4)},
        "plain": {"kind": "iteration", "draft": PLAIN, "mode": FUSED, "times_floor": 1.3, **AT, **ms(6.0)},
        "longspec": {"kind": "iteration", "draft": "LongSpec, 4+16+16+16+11", "mode": FUSED, **AT, **ms(8.4)},
        "plain, long": {"kind": "iteration", "draft": PLAIN, "mode": FUSED, **AT, "context": 131072, **ms(9.0)},
        "specattn": {**specattn, **AT, **ms(64.1)},
        "specattn, long": {**specattn, **AT, "context": 131072, **ms(40.5)},
    }


def verdicts(records):
    """`(name, measured, met)` of every line of the table, measured in the mode that is judged."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in judged(records).splitlines()]
    return [(cells[0], cells[3], cells[5]) for cells in lines if len(cells) == 6 and cells[0].startswith("P")]


def test_every_goal_is_judged():
    expected = ["0.800", "0.810", "0.150", "0.010", "1.080", "1.300", "1.400", "4.500"]
    found = verdicts(list(rows().values()))
    assert [name for name, *_ in found] == ["P1", "P1", "P2", "P3", "P4", "P5", "P6", "P7"]
    assert [measured for _, measured, _ in found] == expected and {met for *_, met in found} == {"yes"}


# Row, number that is worse than the goal, lines of the table that miss it.
WORSE = [
    ("one", {"tb_per_second": 3.1}, [0]),
    ("few", {"tb_per_second": 3.19}, [1]),
    ("ceilings", {"tb_per_second": 4.02}, [0]),
    ("many", ms(1.51), [2]),
    ("scores", ms(2.04), [3]),
    ("tree", ms(5.51), [4]),
    ("plain", {"times_floor": 1.36}, [5]),
    ("longspec", ms(8.8), [6]),
    ("specattn", ms(63.0), [3]),
    ("specattn, long", ms(41.5), [7]),
]


@pytest.mark.parametrize(("name", "changed", "missed"), WORSE, ids=lambda value: str(value)[:12])
def test_a_goal_that_is_missed(name, changed, missed):
    records = rows()
    records[name] |= changed
    found = verdicts(list(records.values()))
    assert [place for place, (*_, met) in enumerate(found) if met == "NO"] == missed


# Row that is missing, and lines of the table that need it.
NEEDED = {
    "ceilings": [0, 1],
    "one": [0],
    "few": [1, 3],
    "many": [2],
    "sdpa": [2],
    "scores": [3],
    "step": [4],
    "tree": [4],
    "plain": [5, 6],
    "longspec": [6],
    "plain, long": [7],
    "specattn": [3],
    "specattn, long": [7],
}


@pytest.mark.parametrize("name", NEEDED)
@pytest.mark.parametrize(
    "other", [None, {"context": 8192}, {"mode": OFF}, {"mode": GRAPH}, {"mode": COMPILE}, {"backend": "other"}], ids=str
)
def test_what_was_not_measured_is_named(name, other):
    """A section that ended early, or the same measurement in another size, mode or backend."""
    records = rows()
    row = records.pop(name)
    if other is not None and set(other) & set(row):
        records[name] = row | other
    found = verdicts(list(records.values()))
    lines = [place for place, line in enumerate(found) if line[1:] == (NOT_MEASURED,) * 2]
    assert lines == NEEDED[name] and not any(met == "NO" for *_, met in found)


def test_captured_steps_without_fused_kernels_have_a_column():
    plain = {"kind": "iteration", "draft": PLAIN, "times_floor": 1.4, **AT, **ms(6.0)}
    (line,) = (line for line in judged([*rows().values(), plain | {"mode": GRAPH}]).splitlines() if "| P5 |" in line)
    assert [cell.strip() for cell in line.split("|")][4:7] == ["1.300", "1.400", "yes"]


def test_no_row_at_all():
    assert [line[1:] for line in verdicts([])] == [(NOT_MEASURED,) * 2] * len(GOALS)


def test_the_sizes_are_those_of_the_plan():
    """A run measures what the goals ask for, under these names."""
    assert SIZES.context == LLAMA_8B.contexts[0] == LLAMA_8B.points[0][1] and LLAMA_8B.points[0][0] == 1
    assert SIZES.long_context in LLAMA_8B.contexts and LLAMA_8B.nodes == (1, SIZES.few, SIZES.many)
    assert set(SIZES.drafts) < set(first_drafts(tiny_target("llama"), LLAMA_8B))
