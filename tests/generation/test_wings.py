"""The core knows no rare case: it imports no wing."""

import ast
from pathlib import Path

import hf_longspec
from tests.house import core_files

ROOT = Path(hf_longspec.__file__).parent
# Wings that others build on: the trial of layers, what is known of hooks and of the forwards of plain `generate`, and
# recurrences.
SHARED = {"trial", "hooks", "plain_forwards", "recurrences", "fixed_states"}


def imports(path):
    """Modules that a file imports from this package, as paths below `generation`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            yield path.parents[node.level - 1].joinpath(*(node.module or "").split(".")).relative_to(ROOT).as_posix()


def test_no_file_of_the_core_imports_a_wing():
    core = core_files()
    assert len(core) > 10
    found = [(name, module) for name in core for module in imports(ROOT / name) if "generation/wings" in module]
    assert not found


def test_wings_build_on_the_core_and_on_shared_ones_alone():
    for path in (ROOT / "generation/wings").glob("*.py"):
        wings = {module.rpartition("/")[2] for module in imports(path) if module.startswith("generation/wings/")}
        assert path.stem in ("register", "__init__") or wings <= SHARED, path
