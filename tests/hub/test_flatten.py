"""Flattening small packages, and the published drafts: which files they hold, and how long these are."""

import ast
import re
from fnmatch import fnmatch

import pytest
from transformers.dynamic_module_utils import check_imports, get_relative_import_files

from hf_longspec.hub.flatten import LEFT_OUT, flatten
from hf_longspec.hub.repository import engine_code
from tests.pairwise import few

from .conftest import DRAFTS

# Most files of code in a repository, without custom_generate/generate.py, and most lines that are code: neither blank
# nor comments nor docstrings.
MOST_FILES, MOST_LINES = 27, 7840


@pytest.fixture
def package(tmp_path):
    """Return `package(files)`, which writes files such as `{"room/a.py": "..."}` beside b/c and d; returns a folder."""

    def write(files):
        for name, text in {"b/c.py": "value = 1\nother = 3\n", "d.py": "value = 2\n", **files}.items():
            path = tmp_path / "pkg" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return tmp_path / "pkg"

    return write


def flat(root, files=None, left_out=("left",)):
    return flatten([("room/a", "f")], root, left_out, files or {})


F = "\n\ndef f():\n    return value\n"


def attempt(first, otherwise):
    return f"try:\n    {first}\nexcept ImportError:  # why\n    {otherwise}{F}"


@pytest.mark.parametrize(
    ("source", "imported", "shipped"),
    [
        ("from ..d import value as x\n\n\ndef f():\n    return x\n", "from .d import value as x", {"d.py"}),
        ("from ..b.c import (\n    value,\n)" + F, "from .b_c import value", {"b_c.py"}),
        (attempt("from ..b.c import value", "value = None"), "from .b_c import", {"b_c.py"}),
        (attempt("from ..left import value", "value = None"), "# why\nvalue = None", set()),
        (attempt("from ..left import value", "from ..d import value"), "from .d", {"d.py"}),
        (attempt("import triton as value", "value = None"), "import triton as value", set()),
        ("from math import pi as value" + F, "from math import pi as value", set()),
        ("from ..b.c import value" + F + "\n\ndef unused():\n    from_d()\n", "from .b_c import value", {"b_c.py"}),
    ],
)
def test_forms_of_import(package, source, imported, shipped):
    """Also: nothing is shipped that nothing reaches."""
    sources = flat(package({"room/a.py": source, "left.py": "value = 4\n"}))
    assert set(sources) == {"room_a.py"} | shipped
    assert imported in sources["room_a.py"] and "unused" not in sources["room_a.py"]
    assert all(ast.parse(text) for text in sources.values())
    assert "b_c.py" not in shipped or ("value = 1" in sources["b_c.py"] and "other" not in sources["b_c.py"])


def test_modules_are_joined_and_comments_stay(package):
    files = {
        "room/a.py": '"""About a."""\n\nfrom .e import x\n\n# of one\nONE = 1\n\n\n'
        'def f():\n    """Return it\n    here.\n\n    Args:\n        x: y\n    """\n    return x + ONE  # end\n',
        "room/e.py": '"""About e."""\n\nimport math\n\nfrom ..b.c import value\n\nx = value + math.pi\n',
    }
    sources = flat(package(files), {"both": ("room/a", "room/e")})
    assert set(sources) == {"both.py", "b_c.py"}
    for part in (
        "# About a.",
        "# About e.",
        "# of one\nONE = 1",
        "# end",
        'Return it\n    here."""\n    return',
        "import math",
        "from .b_c import value",
    ):
        assert part in sources["both.py"]
    assert (
        sources["both.py"].index("x = value") < sources["both.py"].index("def f")
        and "import x" not in sources["both.py"]
    )


def test_an_import_of_what_is_left_out_is_refused(package):
    root = package({"room/a.py": "from ..left import value" + F, "left.py": "value = 4\n"})
    with pytest.raises(ValueError, match="import it inside `try`"):
        flat(root)


@pytest.mark.parametrize("second", ["value = 2\n", "from ..b.c import other as value\n"])
def test_a_name_with_two_meanings_in_one_file_is_refused(package, second):
    root = package({"room/a.py": "from .e import g\n\nvalue = 1\n\n\ndef f():\n    return g, value\n"})
    (root / "room" / "e.py").write_text(second + "\n\ndef g():\n    return value\n")
    with pytest.raises(ValueError, match="define value differently, room/a among them"):
        flat(root, {"both": ("room/a", "room/e")})


def test_files_in_a_circle_are_refused(package):
    files = {
        "room/a.py": "from .e import x\n\n\ndef f():\n    return x\n",
        "room/e.py": "from .g import y\n\nx = y\n",
        "room/g.py": "y = 1\n",
    }
    with pytest.raises(ValueError, match="in a circle"):
        flat(package(files), {"both": ("room/a", "room/g")})


def code_lines(text):
    """Count lines that are neither blank nor comments nor docstrings."""
    prose = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            prose |= set(range(node.lineno, node.end_lineno + 1))
    lines = enumerate(text.splitlines(), start=1)
    return sum(bool(line.strip()) and line.strip()[0] != "#" and number not in prose for number, line in lines)


def test_no_part_that_is_left_out_is_published():
    code = engine_code()
    gone = ("triton.jit", "flash_attn", "CUDAGraph", "torch.compile(", "dist.broadcast", "def forward_on_texts")
    assert not [(name, word) for name, text in code.items() for word in gone if word in text]
    headers = re.findall(r"^# -{20} (\S+)\.py$", "\n".join(code.values()), re.MULTILINE)
    patterns = [pattern for name in LEFT_OUT for pattern in (name, f"{name}/*")]
    assert len(headers) > 20 and not [name for name in headers if any(fnmatch(name, one) for one in patterns)]


@pytest.mark.parametrize("kind", few(DRAFTS, 5))
def test_a_published_repository_can_be_read_and_loaded(kind, published):
    """Transformers' own functions list the files and check the packages; no file is of another method."""
    folder = published / "drafts" / kind
    texts = {path: path.read_text(encoding="utf-8") for path in folder.glob("*.py")}
    assert len(texts) <= MOST_FILES and sum(map(code_lines, texts.values())) <= MOST_LINES
    assert max(len(text.splitlines()) for text in texts.values()) <= 720
    (entry,) = folder.glob("modeling_*.py")
    assert {str(entry), *get_relative_import_files(entry)} == set(map(str, texts))
    for path in folder.rglob("*.py"):
        check_imports(path)  # raises for packages that are not installed
        text = path.read_text(encoding="utf-8")
        assert path == entry or not re.search(r"^\s*(from|import) hf_longspec", text, re.MULTILINE)
    shipped = {path.stem for path in texts}
    assert shipped & {name.removeprefix("longspec_") for name in DRAFTS} == {kind.removeprefix("longspec_")}
    assert not [name for name in shipped if name.startswith(("training_", "convert_")) or "register_draft" in name]
    has_ngrams = any("class NgramDrafter" in text for text in texts.values())
    assert has_ngrams == (kind in ("tokenswift", "longspec_ngram"))
