"""The documentation as a site: it builds without a warning, and links out of docs/ and old ones are right on it."""

import json
import re
import shutil

import pytest
import yaml

from tests.docs.blocks import PROJECT

CONFIG = PROJECT / "mkdocs.yml"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site; strict, so that a warning is an error. From a copy, as mkdocs caches beside its files."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocs_redirects")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    root = tmp_path_factory.mktemp("root")
    for name in ("docs", "benchmarks"):
        shutil.copytree(PROJECT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("mkdocs.yml", "docs_hooks.py", "README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        shutil.copy(PROJECT / name, root)
    build(load_config(str(root / "mkdocs.yml"), strict=True))
    return root / "site"


def test_it_builds_and_loads_nothing_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        assert not re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=.https?://", page.read_text("utf-8")), page


def test_links_from_readme_and_out_of_docs(site):
    index, results = (site / "index.html").read_text("utf-8"), (site / "results" / "index.html").read_text("utf-8")
    assert 'href="quicktour/"' in index and 'href="contributing/"' in index and 'src="images/gpu.svg"' in index
    assert '<abbr title="in the repository: LICENSE">Apache-2.0</abbr>' in index
    assert 'href="../benchmark_scripts/"' in results and 'src="../images/drafts.svg"' in results
    assert '<abbr title="in the repository: hub_cards/tiny-target">target</abbr>' in results
    assert (site / "images" / "drafts.svg").is_file()


def test_an_old_address_leads_to_the_page_that_has_its_text(site):
    plugins = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))["plugins"]
    (moved,) = (plugin["redirects"]["redirect_maps"] for plugin in plugins if "redirects" in plugin)
    for old, new in moved.items():
        page = (site / old.removesuffix(".md") / "index.html").read_text("utf-8")
        assert f'href="../{new.removesuffix(".md")}/"' in page and not (PROJECT / "docs" / old).exists()
    assert len(moved) == 19


@pytest.mark.parametrize("words", ["GGUF", "TRL", "openai", "slow on CPU"])
def test_the_search_finds(site, words):
    """A section that has all of these words."""
    sections = json.loads((site / "search" / "search_index.json").read_text("utf-8"))["docs"]
    texts = [f"{section['title']} {section['text']}".lower() for section in sections]
    assert [text for text in texts if all(word in text for word in words.lower().split())]


def test_every_page_is_in_the_navigation():
    nav = re.findall(r"^ +- .*: (\w+\.md)$", CONFIG.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(nav) == len(set(nav))
    moved = {"index.md", "contributing.md", "changelog.md", "benchmark_scripts.md"}
    assert set(nav) == moved | {path.name for path in (PROJECT / "docs").glob("*.md")}
    assert yaml.safe_load(CONFIG.read_text(encoding="utf-8"))["strict"] is True
