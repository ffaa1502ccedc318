"""The tables of settings have the defaults of the classes."""

import ast
import re

import pytest

import hf_longspec
from tests.scripts import PROJECT

HEAD = "| setting | default | meaning |\n|---|---|---|\n"
# The classes whose tables a page has, in their order.
CLASSES = {
    "longspec": ["LongSpecDraftModel"],
    "ngrams_and_models": ["NgramDraftModel", "AssistantDraftModel"],
    "published_drafts": ["Eagle3DraftModel", "DFlashDraftModel", "MtpDraftModel"],
    "specattn": ["SpecAttnDraftModel"],
    "tokenswift": ["TokenSwiftDraftModel"],
}


def value_of(cell):
    """The value that a cell names; a word without quotes is a string."""
    text = cell.strip().strip("`")
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


@pytest.mark.parametrize("page", CLASSES)
def test_defaults(page):
    tables = (PROJECT / "docs" / f"{page}.md").read_text(encoding="utf-8").split(HEAD)[1:]
    for name, table in zip(CLASSES[page], tables, strict=True):
        declared = getattr(hf_longspec, name).declared
        rows = re.findall(r"^\| (.+?) \| (.+?) \| .+ \|$", table.split("\n\n")[0], re.MULTILINE)
        assert len(rows) > 1
        for names, cell in rows:
            default, _, on_cpu = cell.partition(", on a CPU ")
            for setting in re.findall(r"`(\w+)`", names):
                assert declared[setting].default == value_of(default), (name, setting)
                assert declared[setting].on_cpu == (value_of(on_cpu) if on_cpu else None), (name, setting)
