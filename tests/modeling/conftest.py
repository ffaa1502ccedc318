"""Plain runs of tiny targets, shared with the tests of the loop; every step speculates, so that they can be counted."""

import pytest

from tests.generation.conftest import graphs, plain_run, target

__all__ = ["graphs", "plain_run", "target"]


@pytest.fixture(autouse=True)
def without_a_gate(every_step_speculates):
    """Whether a step speculates shall not depend on the clock."""
