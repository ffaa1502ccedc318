"""The tiny target and its prefilled prompts, as in the tests of the package's own measuring code."""

from tests.bench.conftest import prompts, target  # noqa: F401
