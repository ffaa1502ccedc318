"""Plain runs of tiny targets, shared with the tests of the loop."""

from tests.generation.conftest import graphs, plain_run, target

__all__ = ["graphs", "plain_run", "target"]
