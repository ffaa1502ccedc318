"""Who may import whom, read from the source with `ast`: nothing is imported to find out.

    modeling -> generation -> attention_backends -> torch, transformers
    training -> modeling        bench, auditing -> generation        cli, the package itself -> everything

Arrows are transitive. `auditing` and `bench` do without `modeling`: they are handed the draft. `testing` may build
drafts; `hub` imports no room. The rooms in `SHIPPED` are published beside a draft as sibling files, so there a
relative import names a module of the package and the names in it, nothing else, and a package that transformers does
not bring along is imported inside `try`.
"""

import ast
import re
import sys
from pathlib import Path

import pytest

PACKAGE = "hf_longspec"
ROOT = Path(__file__).resolve().parents[1] / PACKAGE

SHIPPED = {"modeling", "generation", "attention_backends"}

# Room -> rooms it may import besides itself. A room is a folder or a module directly below the package.
ARROWS = {
    "attention_backends": set(),
    "generation": {"attention_backends"},
    "modeling": {"generation", "attention_backends"},
    "training": {"modeling", "generation", "attention_backends"},
    "auditing": {"generation", "attention_backends"},
    "bench": {"generation", "attention_backends", "auditing", "testing", "testing_drafts"},
    "testing": set(SHIPPED),
    "testing_drafts": SHIPPED | {"testing"},
    "hub": set(),
    "cli": None,  # None: everything
    "__init__": None,
}

# What `pip install transformers torch` brings.
ALWAYS_THERE = {"torch", "transformers", "huggingface_hub", "safetensors", "tokenizers", "numpy", "tqdm", "packaging"}

# The line that transformers looks for, anywhere in a file, to find the siblings of a module it publishes.
RELATIVE_IMPORT_LINE = re.compile(r"^\s*from\s+\.\S*\s+import\b")


def violations(source: str, path: str, packages: frozenset[str] = frozenset()) -> list[str]:
    """Broken rules of one file.

    Args:
        source (`str`): Text of the file.
        path (`str`): Its path below the package, with forward slashes.
        packages (`frozenset[str]`, *optional*): Dotted names below the package that are folders, not modules.
    """
    module = path.removesuffix(".py").split("/")
    room = module[0]
    if room not in ARROWS:
        return [f"{path}: room {room!r} has no row in ARROWS"]
    tree = ast.parse(source)
    guarded = {id(node) for block in ast.walk(tree) if isinstance(block, ast.Try) for node in _body(block)}
    at_call_time = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(function)
    }
    problems, import_lines = [], set()

    def report(node: ast.stmt, text: str) -> None:
        problems.append(f"{path}:{node.lineno}: {text}")

    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            targets = [(alias.name.split("."), False) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            targets = _targets_of_from(node, module)
            import_lines.update(range(node.lineno, node.end_lineno + 1))
        else:
            continue
        for target, relative in targets:
            if target[0] == PACKAGE:
                below = target[1:]
                other = below[0] if below else "__init__"
                allowed = ARROWS[room]
                if allowed is not None and other not in {room} | allowed:
                    report(node, f"{room} may not import {'.'.join(target)}")
                if room in SHIPPED and not relative:
                    report(node, f"write a relative import, not {'.'.join(target)}")
                continue
            optional = target[0] not in sys.stdlib_module_names | ALWAYS_THERE
            # A published file is searched for imports inside functions, too.
            if optional and id(node) not in guarded and (room in SHIPPED or id(node) not in at_call_time):
                report(node, f"{target[0]} is optional: import it inside try")
        if room in SHIPPED and isinstance(node, ast.ImportFrom) and node.level:
            imported = ".".join(_resolve(node, module)[1:])
            if not node.module or imported in packages:
                report(node, f"name a module in `from .module import name`, {imported or PACKAGE!r} is a package")
            if any(alias.name == "*" for alias in node.names):
                report(node, "import names, not *")
    if room in SHIPPED:
        for number, line in enumerate(source.splitlines(), start=1):
            if RELATIVE_IMPORT_LINE.match(line) and number not in import_lines:
                problems.append(f"{path}:{number}: a relative import in a text; transformers would look for that file")
    return problems


def _body(block: ast.Try) -> list[ast.AST]:
    """Nodes below the `try:` of a block that goes on when the import fails."""
    catches = any(handler.type is None or "Error" in ast.unparse(handler.type) for handler in block.handlers)
    return [node for statement in block.body for node in ast.walk(statement)] if catches else []


def _resolve(node: ast.ImportFrom, module: list[str]) -> list[str]:
    """Absolute dotted name of the module that a `from` statement names."""
    named = node.module.split(".") if node.module else []
    return named if not node.level else [PACKAGE, *module[: len(module) - node.level], *named]


def _targets_of_from(node: ast.ImportFrom, module: list[str]) -> list[tuple[list[str], bool]]:
    base = _resolve(node, module)
    if base == [PACKAGE]:  # from hf_longspec import x, from .. import x: x may be a room
        return [([PACKAGE, alias.name] if alias.name in ARROWS else base, node.level > 0) for alias in node.names]
    return [(base, node.level > 0)]


def package_files() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def package_folders() -> frozenset[str]:
    return frozenset(".".join(path.parent.relative_to(ROOT).parts) for path in ROOT.rglob("__init__.py"))


@pytest.mark.parametrize("file", package_files(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_arrows(file):
    path = file.relative_to(ROOT).as_posix()
    found = violations(file.read_text(encoding="utf-8"), path, package_folders())
    assert not found, "\n".join(found)


def test_every_room_was_read():
    rooms = {file.relative_to(ROOT).parts[0] for file in package_files()}
    assert rooms >= SHIPPED | {"__init__.py", "testing.py"}


@pytest.mark.parametrize(
    ("path", "source", "complaint"),
    [
        ("generation/route.py", "from ..modeling.base import DraftModel", "generation may not import"),
        ("generation/route.py", "def f():\n    from ..modeling.base import DraftModel", "generation may not import"),
        ("generation/drafters/specattn.py", "from ...modeling.base import x", "generation may not import"),
        ("attention_backends/merge.py", "from ..generation.cache import x", "attention_backends may not import"),
        ("modeling/base.py", "from ..training.losses import x", "modeling may not import"),
        ("modeling/base.py", "from ..testing import tiny_target", "modeling may not import"),
        ("training/trainer.py", "from ..bench.harness import x", "training may not import"),
        ("auditing.py", "from .modeling.base import x", "auditing may not import"),
        ("auditing.py", "import hf_longspec", "auditing may not import"),
        ("bench/harness.py", "from hf_longspec.modeling.base import x", "bench may not import"),
        ("bench/harness.py", "from hf_longspec import modeling", "bench may not import"),
        ("hub.py", "from .generation.cache import SpeculativeCache", "hub may not import"),
        ("hub.py", "from . import modeling", "hub may not import"),
        ("kitchen/sink.py", "", "no row in ARROWS"),
        ("generation/route.py", "from hf_longspec.generation.cache import x", "write a relative import"),
        ("generation/route.py", "from . import cache", "name a module"),
        ("generation/route.py", "from .drafters import SpecAttnDrafter", "name a module"),
        ("generation/route.py", "from ..attention_backends import registry", "name a module"),
        ("generation/route.py", "from .cache import *", "import names, not *"),
        ("generation/route.py", '"""Example:\n\n    from .cache import x\n"""', "a relative import in a text"),
        ("attention_backends/triton_tree.py", "import triton", "triton is optional"),
        ("attention_backends/triton_tree.py", "def f():\n    import triton", "triton is optional"),
        ("attention_backends/flash.py", "try:\n    pass\nfinally:\n    import flash_attn", "flash_attn is optional"),
        ("attention_backends/flash.py", "if TYPE_CHECKING:\n    import flash_attn.x", "flash_attn is optional"),
        ("cli/demo.py", "from rich.table import Table", "rich is optional"),
    ],
)
def test_the_checker_sees(path, source, complaint):
    found = violations(source, path, frozenset({"generation.drafters", "attention_backends", "generation"}))
    assert len(found) == 1
    assert complaint in found[0]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        (
            "modeling/base.py",
            "from ..generation.route import install\nfrom .configuration_specattn import SpecAttnConfig",
        ),
        (
            "generation/drafters/specattn.py",
            "from ...attention_backends.sparse import x\nfrom ..cache import y\nimport re",
        ),
        ("attention_backends/triton_tree.py", "try:\n    import triton\nexcept ImportError:\n    triton = None"),
        ("training/trainer.py", "from ..modeling.base import DraftModel\ndef f():\n    import datasets"),
        ("bench/harness.py", "from ..auditing import audit\nfrom ..testing import tiny_target"),
        ("cli/demo.py", "import hf_longspec\nfrom hf_longspec.modeling.base import x\nfrom ..bench.harness import y"),
        ("hub.py", "import ast\nfrom huggingface_hub import HfApi"),
    ],
)
def test_the_checker_allows(path, source):
    assert violations(source, path) == []
