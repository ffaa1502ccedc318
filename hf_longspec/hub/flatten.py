"""Copy the modules that a draft imports into one folder, the only form that transformers publishes and loads.

`from ..generation.route import install` becomes `from .generation_route import install`. Imports are followed from the
file of the draft's class on, so that a draft contains the modules that it needs and no others. Relative imports inside
`try` are followed too, as transformers requires every sibling that a file names. Imports of packages are not changed.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

# The pattern by which transformers finds the siblings of a file. It also matches inside strings.
SIBLING = re.compile(r"^\s*(?:from\s+\.(\S+)\s+import|import\s+\.(\S+)\s*$)", re.MULTILINE)
_MODULE = re.compile(r"from\s+\.[\w.]*\s+import\b")


def flatten(file: Path, root: Path, package: str) -> dict[str, str]:
    """Return the sources of a module and of all modules that it imports relatively, by file name.

    Args:
        file (`Path`): File of the module.
        root (`Path`): Root of the package. Folders below it become prefixes of file names.
        package (`str`): Name of the package. The files must not import it by this name, except inside `try`.

    Raises:
        ValueError: If an import cannot be followed, or two modules would get the same name.
    """
    sources: dict[str, str] = {}
    origins: dict[str, Path] = {}
    pending = [file.resolve()]
    while pending:
        path = pending.pop()
        name = flat_name(path, root)
        if origins.setdefault(name, path) != path:
            raise ValueError(f"{path} and {origins[name]} would both be {name}.py in the repository: rename one.")
        if f"{name}.py" in sources:
            continue
        sources[f"{name}.py"], needed = _rewrite(path, root, package)
        pending += needed
    return dict(sorted(sources.items()))


def flat_name(path: Path, root: Path) -> str:
    """Return the name of a module in the repository, prefixed by its folders.

    The prefix is left out for the files of a method, whose names end with that of their folder, and for configurations.

    >>> flat_name(Path("/p/generation/cache.py"), Path("/p"))
    'generation_cache'
    >>> flat_name(Path("/p/modeling/longspec/generation_longspec.py"), Path("/p"))
    'generation_longspec'
    """
    *folders, stem = path.relative_to(root.resolve()).with_suffix("").parts
    if folders and (stem.endswith(f"_{folders[-1]}") or stem.startswith("configuration_")):
        return stem
    return "_".join([*folders, stem])


def _rewrite(path: Path, root: Path, package: str) -> tuple[str, list[Path]]:
    """Return the source with its relative imports renamed, and the files of the modules that it imports."""
    lines = path.read_text(encoding="utf-8").split("\n")  # not splitlines: ast counts line feeds only
    needed, names = [], set()
    for node in _imports(path, package, ast.parse("\n".join(lines))):
        module = _resolve(node, path)
        needed.append(module)
        names.add(name := flat_name(module, root))
        before, statement = lines[node.lineno - 1][: node.col_offset], lines[node.lineno - 1][node.col_offset :]
        lines[node.lineno - 1] = before + _MODULE.sub(f"from .{name} import", statement, count=1)
    text = "\n".join(lines)
    if (found := {first or second for first, second in SIBLING.findall(text)}) != names:
        odd = ", ".join(sorted(found ^ names))
        raise ValueError(
            f"{path}: transformers would not see the imports that Python sees ({odd}). Write each as one line "
            "`from .module import name`, and no such line into a string."
        )
    return text, needed


def _imports(path: Path, package: str, tree: ast.Module) -> Iterator[ast.ImportFrom]:
    """Yield the relative imports of a file.

    Raises:
        ValueError: If another form of import needs a module of the package.
    """
    guarded = {id(node) for block in ast.walk(tree) if isinstance(block, ast.Try) for node in ast.walk(block)}
    for node in ast.walk(tree):
        where = f"{path}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.ImportFrom) and node.level:
            yield node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            named = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            if any(name.split(".")[0] == package for name in named) and id(node) not in guarded:
                raise ValueError(f"{where} needs {package} installed: import relatively, or inside try.")
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            constants = [str(argument.value) for argument in node.args[:1] if isinstance(argument, ast.Constant)]
            if not constants or constants[0].startswith("."):
                raise ValueError(f"{where}: what import_module imports cannot be followed: use an import statement.")


def _resolve(node: ast.ImportFrom, path: Path) -> Path:
    folder = path.parents[node.level - 1]
    module = folder.joinpath(*(node.module or "").split(".")).with_suffix(".py")
    if not node.module or not module.is_file():
        dots = "." * node.level
        raise ValueError(
            f"{path}:{node.lineno}: `from {dots}{node.module or ''} import` names no module of the package. Name the "
            "module in which the names are defined."
        )
    return module.resolve()
