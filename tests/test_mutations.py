"""Mutations fit the sources, so that `make mutants` breaks what it names."""

import ast

import pytest

from tests.mutants import ROOT
from tests.mutations import MUTATIONS


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.rule)
def test_a_mutation_replaces_one_place_and_leaves_python(mutation):
    source = (ROOT / "hf_longspec" / mutation.file).read_text(encoding="utf-8")
    assert source.count(mutation.old) == 1
    ast.parse(source.replace(mutation.old, mutation.new))
    assert (ROOT / mutation.test.partition("::")[0]).exists()
