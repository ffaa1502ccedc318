"""Plain runs of tiny targets, shared with the tests of the loop; every step speculates, so that they can be counted."""

import pytest

from hf_longspec.generation import compiled_steps as compiled
from tests.generation.conftest import graphs, plain_run, target

__all__ = ["graphs", "plain_run", "target"]


@pytest.fixture(autouse=True)
def without_a_gate(every_step_speculates):
    """Whether a step speculates shall not depend on the clock."""


@pytest.fixture
def run_as_they_are(monkeypatch):
    """Names of functions that could not be compiled."""
    failed, call = [], compiled.CompiledRunner.__call__

    def watching(self, function, *args):
        result = call(self, function, *args)
        if result is None:
            failed.append(function.__name__)
        return result

    monkeypatch.setattr(compiled.CompiledRunner, "__call__", watching)
    return failed
