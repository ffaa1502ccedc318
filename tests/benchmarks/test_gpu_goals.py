"""The goals of a GPU run, judged by rows that are written here."""

import pytest

from benchmarks.gpu_goals import FUSED, GOALS, HF_ATTENTION, NOT_MEASURED, SIZES, TRITON, judged
from benchmarks.gpu_iterations import first_drafts
from benchmarks.gpu_run import LLAMA_8B
from hf_longspec.cli.measuring import PLAIN
from tests.tiny_targets import tiny_target

AT = {"batch": 1, "context": 32768}


def ms(median):
    return {"ms": {"median": median, "low": 0.0, "high": 99.0}}


def rows():
    """A run in which everything is measured: limits that are reached exactly, and a little better."""
    kernel, forward = {"kind": "kernel", "backend": TRITON, **AT}, {"kind": "forward", "forward": "ours", "mode": FUSED}
    iteration, far = {"kind": "iteration", "mode": FUSED, **AT}, {"context": 131072}
    return {
        "environment": {"kind": "environment", "settings": {"shape": {"layers": 32}}},
        "ceilings": {"kind": "gpu_ceilings", "tb_per_second": 4.0},
        "one": {**kernel, "nodes": 1, "tb_per_second": 3.2, **ms(1.0)},
        "few": {**kernel, "nodes": 16, "tb_per_second": 3.24, **ms(2.0)},
        "many": {**kernel, "nodes": 64, "tb_per_second": 1.0, **ms(1.5)},
        "sdpa": {"kind": "baseline", "baseline": HF_ATTENTION, "nodes": 64, **AT, **ms(10.0)},
        "scores": {**kernel, "kind": "score_rows", "nodes": 16, **ms(2.02)},
        "step": {**forward, "nodes": 1, "context": 32768, **ms(5.0)},
        "tree": {**forward, "nodes": 16, "context": 32768, **ms(5.4)},
        "plain": {**iteration, "draft": PLAIN, "times_floor": 1.3, **ms(6.0)},
        "longspec": {**iteration, "draft": "LongSpec, 4+16+16+16+11", **ms(8.4)},
        "plain, long": {**iteration, "draft": PLAIN, **far, **ms(9.0)},
        "specattn": {**iteration, "draft": "SpecAttn, gamma 6", **ms(64.1)},
        "specattn, long": {**iteration, "draft": "SpecAttn, gamma 6", **far, **ms(40.5)},
    }


def verdicts(records):
    """`(name, measured, met)` of every line of the table, measured in the mode that is judged."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in judged(records).splitlines()]
    return [(cells[0], cells[3], cells[5]) for cells in lines if len(cells) == 6 and cells[0].startswith("P")]


# Row, number that is worse than the goal, lines of the table that miss it.
WORSE = [
    ("few", {}, []),
    ("one", {"tb_per_second": 3.1}, [0]),
    ("ceilings", {"tb_per_second": 4.02}, [0]),
    ("few", {"tb_per_second": 3.19}, [1]),
    ("many", ms(1.51), [2]),
    ("scores", ms(2.04), [3]),
    ("specattn", ms(63.0), [3]),
    ("tree", ms(5.51), [4]),
    ("plain", {"times_floor": 1.36}, [5]),
    ("longspec", ms(8.8), [6]),
    ("specattn, long", ms(41.5), [7]),
]


@pytest.mark.parametrize(("name", "changed", "missed"), WORSE, ids=lambda value: str(value)[:12])
def test_every_goal_is_judged(name, changed, missed):
    records = rows()
    records[name] |= changed
    found = verdicts(list(records.values()))
    assert [name for name, *_ in found] == ["P1", "P1", "P2", "P3", "P4", "P5", "P6", "P7"]
    assert [place for place, (*_, met) in enumerate(found) if met != "yes"] == missed
    if not missed:
        assert [float(value) for _, value, _ in found] == [0.8, 0.81, 0.15, 0.01, 1.08, 1.3, 1.4, 4.5]


def test_what_was_not_measured_is_named():
    """The same measurement in another size is another one."""
    records = rows()
    row = records.pop("plain")
    found = verdicts([*records.values(), row | {"context": 8192}])
    assert [place for place, line in enumerate(found) if line[1:] == (NOT_MEASURED,) * 2] == [5, 6]
    assert [line[1:] for line in verdicts([])] == [(NOT_MEASURED,) * 2] * len(GOALS)


def test_the_sizes_are_those_of_the_plan():
    """A run measures what the goals ask for, under these names."""
    assert SIZES.context == LLAMA_8B.contexts[0] == LLAMA_8B.points[0][1] and LLAMA_8B.points[0][0] == 1
    assert SIZES.long_context in LLAMA_8B.contexts and LLAMA_8B.nodes == (1, SIZES.few, SIZES.many)
    assert set(SIZES.drafts) < set(first_drafts(tiny_target("llama"), LLAMA_8B))
