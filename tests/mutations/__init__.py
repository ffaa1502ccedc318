"""The rules that `make mutants` breaks one at a time, and the tests that catch it: a file for each part of the package.

A row is: the rule that is broken, the source file relative to the package, the source that is replaced, its
replacement, and the test that must fail, as pytest names it.
"""

from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules


@dataclass(frozen=True)
class Mutation:
    """One broken rule."""

    rule: str
    file: str
    old: str
    new: str
    test: str


PARTS = sorted(module.name for module in iter_modules(__path__))
MUTATIONS = tuple(Mutation(*row) for part in PARTS for row in import_module(f"{__name__}.{part}").ROWS)
