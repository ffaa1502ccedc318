"""Write what a draft runs on as a few files in one folder, the only form that transformers loads.

Modules of one room are joined into the files of `FILES`. Imports are followed from the draft's classes on, and only
the functions, classes and constants that they reach are copied. `LEFT_OUT` is not copied: a module that uses a part
of it imports that part inside `try`, and the copy holds the body of `except ImportError` instead. Comments stay, and
docstrings up to their list of arguments.
"""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

# Modules, and folders of modules, that no published draft holds.
LEFT_OUT = (
    "attention_backends/flash",
    "attention_backends/reference",
    "attention_backends/triton",
    "generation/compiled_steps",
    "generation/cuda_graphs",
    "generation/gate",
    "generation/parallel",
    "generation/tree_tuner",
    "training",
)

# Files of the copy, by the modules that are joined in them. The modules of a method, modeling/<method>/, become
# <method>.py.
FILES: dict[str, tuple[str, ...]] = {
    "attention": tuple(f"attention_backends/{name}" for name in ("registry", "lengths", "merge", "contexts")),
    "attention_scores": ("attention_backends/scores", "attention_backends/pages"),
    "attention_torch": ("attention_backends/torch_fused", "attention_backends/torch_backend"),
    "attention_interface": ("attention_backends/differentiable", "attention_backends/interface"),
    "cache": ("generation/cache", "generation/user_cache", "generation/rotary", "generation/windowed_cache"),
    "verification": ("generation/draft_tree", "generation/verification", "generation/beam"),
    "sampling": ("generation/contextual_penalty", "generation/sequences", "generation/noise", "generation/sampling"),
    "target_modules": ("generation/attention_layers", "generation/target_modules", "generation/trial"),
    "target": ("generation/target", "generation/compact_cache", "generation/selection"),
    "drafter": (
        "generation/drafter",
        "generation/stats",
        "generation/beam_drafter",
        "generation/self_drafter",
        "generation/gated_drafter",
        "generation/standins",
    ),
    "decoding": tuple(f"generation/{name}" for name in ("checks", "forward_check", "outputs", "decoding", "route")),
    "assistant_drafter": ("modeling/assistant/generation_assistant",),
    "eagle3_layers": ("modeling/eagle3/configuration_eagle3", "modeling/eagle3/layers_eagle3"),
    "ngrams": ("modeling/ngram/settings_ngram", "modeling/ngram/generation_ngram"),
    "draft": tuple(
        f"modeling/{name}" for name in ("configuration_base", "loading", "tree_choices", "base", "self_draft")
    ),
}

# The pattern by which transformers finds the siblings of a file. It also matches inside strings.
SIBLING = re.compile(r"^\s*(?:from\s+\.(\S+)\s+import|import\s+\.(\S+)\s*$)", re.MULTILINE)
_SECTION = re.compile(r"\s*(Args|Attributes|Returns|Raises|Yields|Example):\s*$")


@dataclass
class Piece:
    """One statement of a module, with the comments above it.

    Args:
        text (`str`): Source.
        defines (`set[str]`): Names that it binds at the top level of its module.
        uses (`set[str]`): Names that occur in it.
        is_block (`bool`): Whether it is a function or a class.
        has_effect (`bool`): Whether it does more than to bind its names.
        gap (`int`): Blank lines before it in the source.
    """

    text: str
    defines: set[str]
    uses: set[str]
    is_block: bool
    has_effect: bool
    gap: int


@dataclass
class Module:
    """One module of the package, without the parts that are left out.

    Args:
        name (`str`): Path below the package, without its ending.
        about (`str`): Its docstring.
        pieces (`list[Piece]`): Its statements, without imports.
        inside (`dict[str, tuple[str, str]]`): Of every name that it imports from the package, the module and the name
            there.
        outside (`dict[str, tuple[str, str | None]]`): Of every other name that it imports, the package and the name
            there; `None` for the package itself.
        kept (`list[Piece]`): The pieces that the copy needs.
    """

    name: str
    about: str
    pieces: list[Piece] = field(default_factory=list)
    inside: dict[str, tuple[str, str]] = field(default_factory=dict)
    outside: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    kept: list[Piece] = field(default_factory=list)


def flatten(
    wanted: Sequence[tuple[str, str]],
    root: Path,
    package: str,
    left_out: Sequence[str] = LEFT_OUT,
    files: Mapping[str, Sequence[str]] = FILES,
) -> dict[str, str]:
    """Return the sources of the named classes and of all that they need, by file name.

    Args:
        wanted (`Sequence[tuple[str, str]]`): Modules, as paths below `root` without ending, and names in them.
        root (`Path`): Root of the package.
        package (`str`): Name of the package. The files must not import it by this name, except inside `try`.
        left_out (`Sequence[str]`): Modules and folders that are not copied.
        files (`Mapping[str, Sequence[str]]`): Modules by the file that they are joined in.

    Raises:
        ValueError: If an import cannot be followed, a part that is left out is imported without `try`, or two modules
            of one file use a name for different things.
    """
    modules = _reach(wanted, root, package, left_out)
    file_of = {module: name for name, names in files.items() for module in names}
    for name in modules:
        file_of.setdefault(name, flat_name(name))
    members: dict[str, list[Module]] = {}
    for name in _sorted({name: _needs(module) for name, module in modules.items()}):
        members.setdefault(file_of[name], []).append(modules[name])
    _sorted({file: {file_of[n] for m in joined for n in _needs(m)} - {file} for file, joined in members.items()})
    return {f"{name}.py": _joined(name, members[name], file_of) for name in sorted(members)}


def flat_name(module: str) -> str:
    """Return the file of a module that `FILES` does not name: the method's, or that of the module alone.

    >>> flat_name("modeling/longspec/generation_longspec"), flat_name("generation/route")
    ('longspec', 'generation_route')
    """
    folders = module.split("/")
    return folders[1] if folders[0] == "modeling" and len(folders) > 2 else "_".join(folders)


def _sorted(graph: Mapping[str, set[str]]) -> list[str]:
    try:
        return list(TopologicalSorter({name: sorted(graph[name]) for name in sorted(graph)}).static_order())
    except CycleError as error:
        circle = " -> ".join(error.args[1])
        raise ValueError(f"modules or files import each other in a circle: {circle}. Move what they share.") from error


def _needs(module: Module) -> set[str]:
    """Return the modules that the kept pieces of a module import from."""
    used = {name for piece in module.kept for name in piece.uses}
    return {other for name, (other, _) in module.inside.items() if name in used}


def _reach(wanted: Sequence[tuple[str, str]], root: Path, package: str, left_out: Sequence[str]) -> dict[str, Module]:
    """Read the modules that are needed, and keep in each the pieces that are."""
    modules: dict[str, Module] = {}
    done: set[tuple[str, str]] = set()
    pending = list(wanted)
    while pending:
        name, symbol = pending.pop()
        if (name, symbol) in done:
            continue
        done.add((name, symbol))
        if name not in modules:
            modules[name] = _read(name, root, package, left_out)
            new = [piece for piece in modules[name].pieces if piece.has_effect]
        else:
            new = []
        module = modules[name]
        if symbol in module.inside:
            pending.append(module.inside[symbol])
        new += [piece for piece in module.pieces if symbol in piece.defines]
        for piece in new:
            if not any(piece is other for other in module.kept):
                module.kept.append(piece)
                pending += [(name, used) for used in piece.uses]
    for module in modules.values():
        module.kept = [piece for piece in module.pieces if any(piece is other for other in module.kept)]
    return {name: module for name, module in modules.items() if module.kept}


def _read(name: str, root: Path, package: str, left_out: Sequence[str]) -> Module:
    path = root / f"{name}.py"
    text = _without_left_out(path.read_text(encoding="utf-8"), path, root, left_out)
    if odd := set(SIBLING.findall(text)) - set(SIBLING.findall("\n".join(_import_lines(text)))):
        raise ValueError(
            f"{path}: transformers would take a text for an import ({odd}). Write no such line into a string."
        )
    tree = ast.parse(text)
    module = Module(name, ast.get_docstring(tree) or "")
    lines = _short_docstrings(text, tree)
    end = tree.body[0].end_lineno if module.about else 0
    for node in tree.body[1 if module.about else 0 :]:
        start = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])
        between = [line for line in lines[end or 0 : start - 1] if line is not None]
        gap = len(between) - len("\n".join(between).lstrip("\n").split("\n")) if any(between) else len(between)
        source = [line for line in lines[start - 1 : node.end_lineno] if line is not None]
        if isinstance(node, ast.Import | ast.ImportFrom):
            _bind(module, node, path, root, package, left_out)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):  # describes the name above it
            module.pieces[-1].text += "\n" + "\n".join(source)
        else:
            comments = "\n".join(between).strip("\n")
            piece = "\n".join([*([comments] if comments else []), *source])
            module.pieces.append(_piece(node, piece, gap))
        end = node.end_lineno
    _check_inner(tree, path, package)
    return module


def _import_lines(text: str) -> Iterator[str]:
    lines = text.split("\n")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            yield lines[node.lineno - 1]


def _without_left_out(text: str, path: Path, root: Path, left_out: Sequence[str]) -> str:
    """Return a source without `try` around imports: its body, or that of its `except` if a part is left out."""
    lines = text.split("\n")
    for node in reversed(ast.parse(text).body):
        if not isinstance(node, ast.Try):
            continue
        imports = [inner for inner in node.body if isinstance(inner, ast.ImportFrom) and inner.level]
        if not imports:
            continue
        if len(node.handlers) != 1 or node.orelse or node.finalbody:
            raise ValueError(f"{path}:{node.lineno}: expected `try` with `except ImportError` alone.")
        handler = node.handlers[0]
        body, reason = lines[node.lineno : handler.lineno - 1], ""
        if any(_is_left_out(_resolve(inner, path, root), left_out) for inner in imports):
            body, reason = lines[handler.lineno : node.end_lineno], lines[handler.lineno - 1].partition("#")[2]
        comment = [f"#{reason}"] if reason else []
        lines[node.lineno - 1 : node.end_lineno] = comment + [line.removeprefix("    ") for line in body]
    return "\n".join(lines)


def _is_left_out(module: str, left_out: Sequence[str]) -> bool:
    return any(module == name or module.startswith(f"{name}/") for name in left_out)


def _resolve(node: ast.ImportFrom, path: Path, root: Path) -> str:
    """Return the module that a relative import names, as a path below the package."""
    folder = path.parents[node.level - 1]
    file = folder.joinpath(*(node.module or "").split(".")).with_suffix(".py")
    if not node.module or not file.is_file():
        raise ValueError(
            f"{path}:{node.lineno}: `from {'.' * node.level}{node.module or ''} import` names no module of the "
            "package. Name the module in which the names are defined."
        )
    return file.relative_to(root).with_suffix("").as_posix()


def _bind(
    module: Module, node: ast.Import | ast.ImportFrom, path: Path, root: Path, package: str, left_out: Sequence[str]
) -> None:
    """Record the names that an import binds."""
    where = f"{path}:{node.lineno}"
    if isinstance(node, ast.ImportFrom) and node.level:
        target = _resolve(node, path, root)
        if _is_left_out(target, left_out):
            raise ValueError(f"{where}: {target} is not published: import it inside `try`, with a stand-in.")
        for alias in node.names:
            module.inside[alias.asname or alias.name] = target, alias.name
    elif isinstance(node, ast.ImportFrom):
        if (node.module or "").split(".")[0] == package:
            raise ValueError(f"{where} needs {package} installed: import relatively, or inside try.")
        for alias in node.names:
            module.outside[alias.asname or alias.name] = node.module or "", alias.name
    else:
        for alias in node.names:
            if alias.name.split(".")[0] == package:
                raise ValueError(f"{where} needs {package} installed: import relatively, or inside try.")
            module.outside[alias.asname or alias.name] = alias.name, None


def _check_inner(tree: ast.Module, path: Path, package: str) -> None:
    """Refuse imports that nothing follows: relative ones below the top level, and those by name.

    Raises:
        ValueError: With the place.
    """
    guarded = {id(node) for block in ast.walk(tree) if isinstance(block, ast.Try) for node in ast.walk(block)}
    for node in ast.walk(tree):
        where = f"{path}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.ImportFrom) and node.level and node not in tree.body:
            raise ValueError(f"{where}: a relative import below the top level is not followed. Move it to the top.")
        if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in guarded and node not in tree.body:
            named = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            if any(name.split(".")[0] == package for name in named):
                raise ValueError(f"{where} needs {package} installed: import relatively, or inside try.")
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            constants = [str(argument.value) for argument in node.args[:1] if isinstance(argument, ast.Constant)]
            if not constants or constants[0].startswith("."):
                raise ValueError(f"{where}: what import_module imports cannot be followed: use an import statement.")


def _piece(node: ast.stmt, text: str, gap: int) -> Piece:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return Piece(text, {node.name}, _names(node), True, False, gap)
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    bound = {inner.id for target in targets for inner in ast.walk(target) if isinstance(inner, ast.Name)}
    is_plain = bool(targets) and all(isinstance(target, ast.Name | ast.Tuple) for target in targets)
    return Piece(text, bound, _names(node), False, not is_plain, gap)


def _names(node: ast.AST) -> set[str]:
    """Return the names that occur in a statement, also in annotations that are texts."""
    found = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    for inner in ast.walk(node):
        for hint in (getattr(inner, "annotation", None), getattr(inner, "returns", None)):
            if isinstance(hint, ast.Constant) and isinstance(hint.value, str):
                found |= _names(ast.parse(hint.value))
    return found


def _short_docstrings(text: str, tree: ast.Module) -> list[str | None]:
    """Return the lines of a source; those of docstrings from their first section on are None."""
    lines: list[str | None] = list(text.split("\n"))
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if ast.get_docstring(node) is None:
            continue
        first, last = node.body[0].lineno, node.body[0].end_lineno or 0
        section = next((n for n in range(first, last) if _SECTION.match(lines[n - 1] or "")), None)
        if section is None:
            continue
        while not (lines[section - 2] or "").strip():
            section -= 1
        before = lines[section - 2] or ""
        if before.strip() != '"""':
            lines[section - 2] = f'{before}"""'
        else:
            lines[section - 2] = f'{before}Arguments: see the package."""'
        lines[section - 1 : last] = [None] * (last - section + 1)
    return lines


def _joined(file: str, modules: Sequence[Module], file_of: Mapping[str, str]) -> str:
    """Return the source of one file of the copy.

    Raises:
        ValueError: If a name means different things in two of its modules.
    """
    meaning: dict[str, tuple[str, str]] = {}
    imports: dict[str, set[str]] = {}
    siblings: dict[str, set[str]] = {}
    parts: list[str] = []
    for module in modules:
        used = {name for piece in module.kept for name in piece.uses}
        pieces = []
        for piece in module.kept:
            known = {name: meaning.get(name) for name in piece.defines}
            for name in piece.defines:
                _claim(meaning, name, (piece.text if not piece.is_block else module.name, name), module, file)
            if piece.is_block or any(value is None for value in known.values()) or piece.has_effect:
                pieces.append(piece)
        for name, (other, original) in module.inside.items():
            if name not in used:
                continue
            if file_of[other] != file:
                _claim(meaning, name, (file_of[other], original), module, file)
                siblings.setdefault(file_of[other], set()).add(_spelled(original, name))
            elif name != original:
                raise ValueError(f"{module.name} imports {original} as {name} from its own file {file}.py: rename it.")
        for name, (source, member) in module.outside.items():
            if name.split(".")[0] in used:
                _claim(meaning, name, (source, member or ""), module, file)
                if member is None:
                    imports.setdefault(f"import {_spelled(source, name)}", set())
                else:
                    imports.setdefault(f"from {source} import", set()).add(_spelled(member, name))
        parts.append(_section_of(module, pieces, len(modules) > 1))
    head = [f'"""{modules[0].about}\n"""' if "\n" in modules[0].about else f'"""{modules[0].about}"""']
    if len(modules) > 1:
        head = [f'"""{_title(file, modules)}"""']
    head += ["\n".join(_statements(imports))] if imports else []
    head += ["\n".join(_statements({f"from .{name} import": names for name, names in siblings.items()}))] * bool(
        siblings
    )
    return "\n\n".join(head) + "\n\n" + "\n\n\n".join(parts).rstrip() + "\n"


def _spelled(name: str, bound: str) -> str:
    return name if name == bound else f"{name} as {bound}"


def _claim(meaning: dict[str, tuple[str, str]], name: str, value: tuple[str, str], module: Module, file: str) -> None:
    if meaning.setdefault(name, value) != value:
        raise ValueError(f"{name} in {module.name} is something else in another module of {file}.py: rename one.")


def _title(file: str, modules: Sequence[Module]) -> str:
    return f"{file}: joined from {', '.join(module.name + '.py' for module in modules)} of hf_longspec."


def _section_of(module: Module, pieces: Sequence[Piece], is_joined: bool) -> str:
    text = ""
    if is_joined:
        about = "\n".join(f"# {line}".rstrip() for line in module.about.split("\n"))
        text = f"# {'-' * 20} {module.name}.py\n#\n{about}\n"
    before: Piece | None = None
    for piece in pieces:
        gap = 2 if piece.is_block or (before is not None and before.is_block) else min(piece.gap, 1)
        text += "\n" * (gap if before is not None or not text else 1 + piece.is_block) + piece.text + "\n"
        before = piece
    return text.strip("\n")


def _statements(imports: Mapping[str, set[str]]) -> Iterator[str]:
    for statement in sorted(imports, key=lambda text: (text.startswith("from"), text)):
        names = sorted(imports[statement])
        line = f"{statement} {', '.join(names)}".rstrip()
        if len(line) > 118:
            line = f"{statement} (\n" + "".join(f"    {name},\n" for name in names) + ")"
        yield line
