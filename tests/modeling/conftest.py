"""Plain runs of tiny targets, shared with the tests of the loop; every step speculates, so that they can be counted."""

import pytest

from hf_longspec.generation.compiled import compiled_steps as compiled
from tests.generation.conftest import graphs, plain_run, target, widths
from tests.tiny_targets import tiny_target
from tests.watching import after

__all__ = ["graphs", "plain_run", "target", "widths"]


@pytest.fixture(autouse=True)
def without_a_gate(every_step_speculates):
    """Whether a step speculates shall not depend on the clock."""


@pytest.fixture(scope="module")
def llama():
    return tiny_target("llama")


@pytest.fixture
def run_as_they_are(monkeypatch):
    """Names of functions that could not be compiled."""
    failed = []
    note = lambda result, _, step, *__: result is None and failed.append(type(step).__name__)  # noqa: E731
    after(monkeypatch, compiled.CompiledRunner, "__call__", note)
    return failed
