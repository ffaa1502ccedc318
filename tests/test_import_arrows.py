"""The permitted imports between the parts, read from the source with `ast`, without importing anything.

    modeling -> generation -> attention_backends -> torch, transformers
    training -> modeling        auditing -> generation        cli, drafts, the package itself -> everything
    modeling/*/training_*.py, convert_*.py -> training, registry -> modeling

Arrows are transitive. A room is a part of the package; the registry (`register_draft.py` and each draft's
`__init__.py`), and the `training_` and `convert_` files that it names, are rooms of their own. Within modeling/,
nothing imports the folder of a draft but this folder itself: what several drafts share stands in shared/. Optional
packages are imported inside `try`.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "hf_longspec"
ROOT = Path(__file__).resolve().parents[1] / PACKAGE

# Room -> rooms it may import besides itself. A room is a folder or a module directly below the package, or one of two.
METHODS = "modeling/*/training_*, convert_*"
REGISTRY = "modeling/register_draft"
ARROWS = {
    "attention_backends": set(),
    "generation": {"attention_backends"},
    "modeling": {"generation", "attention_backends"},
    REGISTRY: {"modeling", "generation", "attention_backends"},
    "training": {REGISTRY, "modeling", "generation", "attention_backends"},
    METHODS: {REGISTRY, "training", "modeling", "generation", "attention_backends"},
    "auditing": {"generation", "attention_backends"},
    "bound": {"generation"},
    "prefix_cache": {"generation", "attention_backends"},
    "batching": {"prefix_cache", "modeling", "generation", "attention_backends"},
    "hub": {REGISTRY, "modeling"},
    "auto": {REGISTRY, "modeling", "generation", "attention_backends"},
    "streaming": set(),
    "structured_output": set(),
    "cli": None,  # None: everything
    "drafts": None,
    "__init__": None,
}

# Folders of modeling/ that drafts share. Every other one is that of a draft.
SHARED = {"shared"}
DRAFT_FOLDERS = {path.parent.name for path in ROOT.glob("modeling/*/__init__.py")} - SHARED

# Of the special cases of a call, those that others build on: the trial of layers, what is known of hooks and of the
# forwards of plain `generate`, recurrences, and the costs of steps.
SPECIAL_CASES = ["generation", "special_cases"]
SHARED_CASES = {"trial", "hooks", "stock_forwards", "recurrences", "fixed_states", "costs"}

# Packages that `pip install transformers torch` installs.
ALWAYS_THERE = {"torch", "transformers", "huggingface_hub", "safetensors", "tokenizers", "numpy", "tqdm", "packaging"}
# Imported by `cli/serve.py` alone, inside `try`.
SERVING = "cli/serving/"
# Requirements of transformers 5, of typer and of torch.
ALWAYS_THERE |= {"typer", "yaml", "rich", "jinja2"}


def violations(source: str, path: str) -> list[str]:
    """Broken rules of one file.

    Args:
        source (`str`): Text of the file.
        path (`str`): Its path below the package, with forward slashes.
    """
    module = path.removesuffix(".py").split("/")
    room = _room(module)
    if room not in ARROWS:
        return [f"{path}: room {room!r} has no row in ARROWS"]
    tree = ast.parse(source)
    at_import_time = {id(node) for node in _at_import_time(tree)}
    guarded = {id(node) for block in ast.walk(tree) if isinstance(block, ast.Try) for node in _guarded(block)}
    problems = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        must_be_there = id(node) not in guarded and id(node) in at_import_time
        must_be_there &= not path.startswith(SERVING)
        found = []
        for target in _targets(node, module):
            if target[0] == PACKAGE:
                found += _crossing(room, target) or _other_draft(module, target)
            elif must_be_there and target[0] not in sys.stdlib_module_names | ALWAYS_THERE:
                found.append(f"{target[0]} is optional: import it inside try")
        problems += [f"{path}:{node.lineno}: {problem}" for problem in found]
    return problems


def _room(parts: list[str]) -> str:
    """The room of a module, given the parts of its name below the package."""
    if parts[0] == "modeling" and parts[-1].startswith(("training_", "convert_")):
        return METHODS
    if parts == ["modeling", "register_draft"] or (parts[1:-1] and parts[-1] == "__init__"):
        return REGISTRY
    return parts[0]


def _targets(node: ast.Import | ast.ImportFrom, module: list[str]) -> list[list[str]]:
    """The modules that an import names, as absolute dotted names in parts."""
    if isinstance(node, ast.Import):
        return [alias.name.split(".") for alias in node.names]
    named = node.module.split(".") if node.module else []
    base = [PACKAGE, *module[: len(module) - node.level], *named] if node.level else named
    if base == [PACKAGE]:  # from hf_longspec import x, from .. import x: x may be a room
        return [[*base, alias.name] if _room([alias.name]) in ARROWS else base for alias in node.names]
    # the module of a method can also be named after `import`: `from .longspec import training_longspec`
    modules = [[*base, alias.name] for alias in node.names]
    return [module for module in modules if base[0] == PACKAGE and _room(module[1:]) == METHODS] or [base]


def _crossing(room: str, target: list[str]) -> list[str]:
    """The arrow from `room` to a part of the package, if there is none."""
    other = _room(target[1:]) if len(target) > 1 else "__init__"
    allowed = ARROWS[room]
    if allowed is None or other in {room} | allowed:
        return []
    return [f"{room} may not import {'.'.join(target)}"]


def _other_draft(module: list[str], target: list[str]) -> list[str]:
    """The folder of a draft that a module of modeling/ outside of it imports, if it does."""
    inside = module[0] == "modeling" and target[1:2] == ["modeling"]
    folder = target[2] if inside and len(target) > 2 else ""
    if folder not in DRAFT_FOLDERS or folder == module[1]:
        return []
    return [f"{'.'.join(target)} is part of the draft {folder}: what drafts share stands in shared/"]


def _at_import_time(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes outside of functions."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from _at_import_time(child)


def _guarded(block: ast.Try) -> list[ast.AST]:
    """Nodes below the `try:` of a block that goes on when the import fails."""
    catches = any(handler.type is None or "Error" in ast.unparse(handler.type) for handler in block.handlers)
    return [node for statement in block.body for node in ast.walk(statement)] if catches else []


def test_special_cases_stand_apart():
    """The core imports none of them; they build on the core and on those that are shared alone."""
    for path in ROOT.glob("generation/**/*.py"):
        module = list(path.relative_to(ROOT).with_suffix("").parts)
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        imported = [target for node in nodes if isinstance(node, ast.ImportFrom) for target in _targets(node, module)]
        found = [target[3:] for target in imported if target[1:3] == SPECIAL_CASES]
        if len(module) == 2 and module[1] != "__init__":
            assert not found, path
        elif module[:2] == SPECIAL_CASES and module[2] != "__init__":
            assert {name for name, *_ in filter(None, found)} <= SHARED_CASES, path


def test_arrows():
    files = {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in sorted(ROOT.rglob("*.py"))}
    assert {path.parts[0] for path in files} >= {"modeling", "generation", "attention_backends", "__init__.py"}
    found = [problem for path, source in files.items() for problem in violations(source, path.as_posix())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("path", "source", "complaint"),
    [
        ("generation/route.py", "from ..modeling.base import DraftModel", "generation may not import"),
        ("training/trainer.py", "from ..modeling.longspec import training_longspec", "training may not import"),
        ("modeling/dflash/layers_dflash.py", "from ..eagle3.modeling_eagle3 import x", "is part of the draft eagle3"),
        ("hub.py", "from . import generation", "hub may not import"),
        ("kitchen/sink.py", "", "no row in ARROWS"),
        ("attention_backends/flash.py", "try:\n    pass\nfinally:\n    import flash_attn", "flash_attn is optional"),
    ],
)
def test_the_checker_sees(path, source, complaint):
    found = violations(source, path)
    assert len(found) == 1
    assert complaint in found[0]
