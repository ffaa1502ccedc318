"""A GPU run measures what its goals ask for. Their table is part of the reports of test_tables.py."""

from benchmarks.gpu_goals import GOALS, NOT_MEASURED, SIZES, judged
from benchmarks.gpu_iterations import first_drafts
from benchmarks.gpu_run import LLAMA_8B
from tests.tiny_targets import tiny_target


def test_the_sizes_are_those_of_the_plan():
    assert SIZES.context == LLAMA_8B.contexts[0] == LLAMA_8B.points[0][1] and LLAMA_8B.points[0][0] == 1
    assert SIZES.long_context in LLAMA_8B.contexts and LLAMA_8B.nodes == (1, SIZES.few, SIZES.many)
    assert set(SIZES.drafts) < set(first_drafts(tiny_target("llama"), LLAMA_8B))


def test_what_was_not_measured_is_named():
    assert judged([]).count(NOT_MEASURED) == 3 * len(GOALS)
