"""Mutations fit the sources, so that `make mutants` breaks what it names; the page lists them."""

import ast
from pathlib import Path

import pytest

from tests.mutants import ROOT, table
from tests.mutations import MUTATIONS


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.rule)
def test_a_mutation_replaces_one_place_and_leaves_python(mutation):
    source = (ROOT / "hf_longspec" / mutation.file).read_text(encoding="utf-8")
    assert source.count(mutation.old) == 1
    ast.parse(source.replace(mutation.old, mutation.new))
    assert (ROOT / mutation.test.partition("::")[0]).exists()


def test_the_page_has_the_table():
    assert Path(__file__).with_name("mutations.md").read_text(encoding="utf-8").endswith(f"\n\n{table()}\n")
