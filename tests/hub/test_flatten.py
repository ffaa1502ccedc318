"""Flattening small packages with every form of import, and the published drafts."""

import ast
import re

import pytest
from transformers.dynamic_module_utils import check_imports, get_relative_import_files

import hf_longspec
from hf_longspec.hub.flatten import flatten
from hf_longspec.hub.repository import PACKAGE

from .conftest import DRAFTS

# Modules that all kinds of drafts share.
SHARED = ("modeling_base", "modeling_loading", "modeling_tree_choices")


@pytest.fixture
def package(tmp_path):
    """Return `package(files)`, which writes files such as `{"room/a.py": "..."}` beside b.c and d; returns a folder."""

    def write(files):
        for name, text in {"b/c.py": "value = 1\n", "b/unused.py": "", "d.py": "value = 2\n", **files}.items():
            path = tmp_path / "pkg" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return tmp_path / "pkg"

    return write


def flat(package, source):
    root = package({"room/a.py": source})
    return flatten(root / "room" / "a.py", root, "pkg")


@pytest.mark.parametrize(
    ("source", "rewritten", "shipped"),
    [
        ("from ..b.c import value\n", "from .b_c import value\n", {"b_c.py"}),
        ("from ..d import value as x  # why\n", "from .d import value as x  # why\n", {"d.py"}),
        ("from ..b.c import (\n    value,\n)\n", "from .b_c import (\n    value,\n)\n", {"b_c.py"}),
        ("def f():\n    from ..b.c import value\n", "def f():\n    from .b_c import value\n", {"b_c.py"}),
        (
            "try:\n    from ..b.c import value\nexcept ImportError:\n    value = None\n",
            "try:\n    from .b_c import value\nexcept ImportError:\n    value = None\n",
            {"b_c.py"},
        ),
        ("try:\n    import triton\nexcept ImportError:\n    triton = None\n", None, set()),
        ("try:\n    from pkg.d import value\nexcept ImportError:\n    value = None\n", None, set()),
        ("try:\n    from triton import x\nexcept ImportError:\n    from ..d import value as x\n", "", {"d.py"}),
        ("from math import pi\nimport re\n", None, set()),
        ('é = "…"  # from ..b.c import is only mentioned here\n', None, set()),
    ],
)
def test_forms_of_import(package, source, rewritten, shipped):
    sources = flat(package, source)
    assert set(sources) == {"room_a.py"} | shipped
    if rewritten != "":
        assert sources["room_a.py"] == (source if rewritten is None else rewritten)
    assert all(ast.parse(text) for text in sources.values())


def test_imports_are_followed_to_their_end_and_in_circles(package):
    files = {
        "room/a.py": "from .e import x\n",
        "room/e.py": "from ..b.deep.f import x\n",
        "b/deep/f.py": "from ...room.e import x\nfrom ..c import value\n",
    }
    root = package(files)
    sources = flatten(root / "room" / "a.py", root, "pkg")
    assert set(sources) == {"room_a.py", "room_e.py", "b_deep_f.py", "b_c.py"}
    assert sources["b_deep_f.py"] == "from .room_e import x\nfrom .b_c import value\n"


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("from . import c\n", "names no module"),
        ("from ..b import c\n", "names no module"),
        ("from ..missing import x\n", "names no module"),
        ("try:\n    from ..missing import x\nexcept ImportError:\n    pass\n", "names no module"),
        ("from pkg.d import value\n", "needs pkg installed"),
        ("import pkg.d\n", "needs pkg installed"),
        ('"""Example:\n\n    from .e import x\n"""\n', "into a string"),
        ("from \\\n    ..d import value\n", "not see the imports"),
        ("import importlib\nx = importlib.import_module('.c', 'pkg.b')\n", "cannot be followed"),
        ("from importlib import import_module\ndef f(n):\n    import_module(n)\n", "cannot be followed"),
    ],
)
def test_imports_that_cannot_be_followed_are_refused(package, source, complaint):
    with pytest.raises(ValueError, match=complaint):
        flat(package, source)


def test_two_modules_of_one_name_are_refused(package):
    root = package({"room/a.py": "from ..b_c import x\nfrom ..b.c import value\n", "b_c.py": "x = 1\n"})
    with pytest.raises(ValueError, match=r"would both be b_c\.py"):
        flatten(root / "room" / "a.py", root, "pkg")


def test_a_flat_folder_stays_as_it_is(package):
    root = package({"room/a.py": "from ..b.c import value\nfrom ..d import value as x\n"})
    once = flatten(root / "room" / "a.py", root, "pkg")
    folder = root.parent / "flat"
    folder.mkdir()
    for name, text in once.items():
        (folder / name).write_text(text)
    assert flatten(folder / "room_a.py", folder, "pkg") == once


@pytest.mark.parametrize("kind", DRAFTS)
def test_transformers_finds_every_file_and_no_missing_package(kind, published):
    """Transformers' own functions list the files to download and check the required packages."""
    folder = published / "drafts" / kind
    (model,) = [path for path in folder.glob("modeling_*.py") if path.stem not in SHARED]
    (config,) = [path for path in folder.glob("configuration_*.py") if path.stem != "configuration_base"]
    entries = [model, config]
    found = {*map(str, entries), *(name for entry in entries for name in get_relative_import_files(entry))}
    assert found == set(map(str, folder.glob("*.py")))
    for path in folder.rglob("*.py"):
        check_imports(path)  # raises for packages that are not installed
        assert not re.search(r"^\s*(from|import) hf_longspec", path.read_text(encoding="utf-8"), re.MULTILINE)


def test_a_published_draft_contains_only_its_own_drafter(published):
    shipped = {kind: {path.stem for path in (published / "drafts" / kind).glob("*.py")} for kind in DRAFTS}
    for kind, name in {"longspec": "longspec", "tokenswift": "tokenswift", "specattn": "specattn"}.items():
        own = f"generation_{name}"
        assert [other for other in DRAFTS if own in shipped[other]] == [kind]
    modules = set().union(*shipped.values())
    assert not [name for name in modules if name.startswith(("training_", "convert_")) or "register_draft" in name]
    assert PACKAGE.name == hf_longspec.__name__
