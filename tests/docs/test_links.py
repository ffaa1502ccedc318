"""Links between documents lead somewhere, and names of files and of the program's parts in them exist."""

import ast
import builtins
import keyword
import re
from functools import cache
from pathlib import Path

import pytest

from tests.docs.blocks import PAGES, PROJECT, prose_of, read
from tests.tiny_targets import TINY_TARGETS

LINK = re.compile(r"\]\(([^)\s]+)\)")
GENERATED = re.compile(r"<!-- (bench|models):start.*? -->.*?<!-- \1:end -->", re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
# Identifiers, but not the options and names of data that a `-`, `<` or another sign is part of.
NAME = re.compile(r"(?<![\w.<-])[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*(?![\w<>-])")


def anchors_of(path: Path) -> set[str]:
    """Anchors of the headings of a page, as code hosts and mkdocs make them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", path.read_text("utf-8"), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def broken(page: str, text: str) -> list[str]:
    """Links of a page that lead nowhere."""
    found = []
    for link in LINK.findall(text):
        path, _, anchor = link.partition("#")
        target = (PROJECT / page).parent / path if path else PROJECT / page
        if ":" in path:
            continue
        if not target.exists() or (anchor and anchor not in anchors_of(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    assert not broken(page, prose_of(page))


@cache
def identifiers():
    """Every name in the source of the package and the benchmarks, and the words of short strings, such as settings."""
    names = {*dir(builtins), *keyword.kwlist}
    folders = (PROJECT / "hf_longspec", PROJECT / "benchmarks")
    others = [PROJECT / "docs_hooks.py", PROJECT / "tests" / "house.py", *(PROJECT / "tests").rglob("conftest.py")]
    for path in [*(file for folder in folders for file in folder.rglob("*.py")), *others]:
        names.add(path.stem)
        names.update(path.relative_to(PROJECT).parts)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for field in ("id", "attr", "name", "arg", "module"):
                if isinstance(value := getattr(node, field, None), str):
                    names.update(value.split("."))
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 60:
                names.update(re.findall(r"\w+", node.value))
    return names


def unknown_names(text: str, known: set[str]) -> list[str]:
    """Names in code spans of a text that are neither paths nor known."""
    found = []
    for span in SPAN.findall(text):
        if re.fullmatch(r"[\w.-]*(/[\w.*{}<>-]*)+|[\w-]+\.\w{2,5}", span):
            continue  # a path: the other test
        found += [name for name in NAME.findall(span) if not set(name.split(".")) <= known]
    return found


# Symbols of the pages, and what belongs to transformers, torch and make.
SYMBOLS = {*"BSNHKDVGpqxnd", "NAME", "PAGE", "x_", "x_i", "A_i", "lse", "expected"}
THEIRS = {"Trainer", "TORCH_INDEX", "torchrun", "tp_plan", "num_return_sequences", "num_beams", "trust_remote_code"}
THEIRS |= {"cache_implementation", "device_map", "pipeline", "stop_strings", "padding_side", "prefix_allowed_tokens_fn"}
THEIRS |= {"index_topk", "adapter_names", "time_step_min", "use_kernels", "batched_mm", "window_size"}
NAMED = ["architecture", "guarantees", "quicktour", "models", "specattn", "longspec", "tokenswift", "gain"]
NAMED += ["published_drafts", "ngrams_and_models", "structured_output"]


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", *(f"docs/{name}.md" for name in NAMED)])
def test_names_in_the_text_exist(page):
    assert not unknown_names(GENERATED.sub("", prose_of(page)), identifiers() | SYMBOLS | THEIRS)


@pytest.mark.parametrize("page", ["docs/architecture.md", "docs/guarantees.md", "CONTRIBUTING.md", "docs/models.md"])
def test_files_in_the_text_exist(page):
    for span in SPAN.findall(prose_of(page)):
        if not re.fullmatch(r"[\w./-]+(\.py|\.md|/)", span):
            continue
        # a bare name says which file of a folder named before
        there = [*(PROJECT / "hf_longspec").rglob(span), *PROJECT.glob(span), *(PROJECT / "tests").rglob(span)]
        assert there or (PROJECT / "hf_longspec" / span).exists(), f"{page}: {span}"


def test_no_page_names_what_is_not_part_of_the_repository():
    for page in PAGES:
        assert not re.search(r"/(home|root|tmp)/", read(page)), page


def test_the_architectures_of_the_page_are_those_of_the_tests():
    listed = read("docs/models.md").split("More tests run on ")[1].split(", on transformers")[0]
    listed = listed.replace(" (text)", "").replace(" and ", ", ").replace("\n", " ")
    assert sorted(listed.split(", ")) == sorted(TINY_TARGETS)
