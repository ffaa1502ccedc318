"""The tiny target and its prefilled prompts, as in the tests of the package's own measuring code."""

from tests import example_drafts  # noqa: F401 - the benchmarks import them, which shall register them in no other test
from tests.bench.conftest import prompts, target  # noqa: F401
