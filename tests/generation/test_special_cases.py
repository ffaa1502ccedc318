"""The core imports no special case."""

import ast
from pathlib import Path

import hf_longspec
from tests.house import core_files

ROOT = Path(hf_longspec.__file__).parent
# Those that others build on: the trial of layers, what is known of hooks and of the forwards of plain `generate`, and
# recurrences.
SHARED = {"trial", "hooks", "stock_forwards", "recurrences", "fixed_states"}


def imports(path):
    """Modules that a file imports from this package, as paths below `generation`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            yield path.parents[node.level - 1].joinpath(*(node.module or "").split(".")).relative_to(ROOT).as_posix()


def test_no_file_of_the_core_imports_a_special_case():
    core = core_files()
    assert len(core) > 10
    found = [(name, module) for name in core for module in imports(ROOT / name) if "generation/special_cases" in module]
    assert not found


def test_special_cases_build_on_the_core_and_on_shared_ones_alone():
    for path in (ROOT / "generation/special_cases").glob("*.py"):
        others = {name.rpartition("/")[2] for name in imports(path) if name.startswith("generation/special_cases/")}
        assert path.stem == "__init__" or others <= SHARED, path
