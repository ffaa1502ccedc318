"""Write what a draft runs on as a few files in one folder, the only form that transformers loads.

Modules of one room are joined into the files of `FILES`. Imports are followed from the draft's classes on, and only
the functions, classes and constants that they reach are copied. `LEFT_OUT` is not copied: a module that uses a part
of it imports that part inside `try`, and the copy holds the body of `except ImportError` instead. Comments stay, and
the first paragraph of every docstring. tests/test_import_arrows.py refuses imports that could not be followed.
"""

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

# Modules, and folders of modules, that no published draft holds, as patterns of shells.
LEFT_OUT = (
    "attention_backends/flash",
    "attention_backends/triton",
    "generation/fast",
    "generation/wings/cache_files",
    "generation/wings/fixed_states",
    "generation/wings/grammar",
    "generation/wings/parallel",
    "modeling/*/texts_*",
    "modeling/families/texts",
    "training",
)

DRAFTERS = "beams", "draft_weights", "self_drafter"
# Files of the copy, by the modules that are joined in them. The modules of a method, modeling/<method>/, become
# <method>.py.
FILES: dict[str, tuple[str, ...]] = {
    "attention": tuple(f"attention_backends/{name}" for name in ("registry", "lengths", "contexts", "gapped")),
    "attention_scores": ("attention_backends/scores",),
    "attention_torch": ("attention_backends/torch_backend",),
    "attention_interface": ("attention_backends/interface",),
    "cache": ("generation/cache",),
    "verification": ("generation/draft_tree", "generation/verification"),
    "sequences": ("generation/sequences",),
    "sampling": ("generation/sampling",),
    "target_modules": ("generation/target_modules", "generation/wing"),
    "target": ("generation/target",),
    "sparse_caches": ("modeling/families/sparse_caches",),
    "drafter": ("generation/drafter", *(f"modeling/families/{name}" for name in DRAFTERS)),
    "call": ("generation/call",),
    "decoding": ("generation/decoding", "generation/route"),
    "user_code": ("generation/wings/hooks", "generation/wings/processors"),
    "first_checks": tuple(f"generation/wings/{name}" for name in ("trial", "forward_check")),
    "recurrences": tuple(f"generation/wings/{name}" for name in ("plain_forwards", "recurrences")),
    "recurrent_states": ("generation/wings/recurrent_states",),
    "masked_and_images": ("generation/wings/masked", "generation/wings/images"),
    "gate": ("generation/wings/gate",),
    "wings": tuple(f"generation/wings/{name}" for name in ("padding", "user_caches", "rotary_limit", "register")),
    "assistant_drafter": ("modeling/assistant/generation_assistant",),
    "ngrams": ("modeling/families/ngrams",),
    "settings": ("modeling/settings", "modeling/saved_config"),
    "draft": (
        *(f"modeling/{name}" for name in ("configuration_base", "loading", "base")),
        *(f"modeling/families/{name}" for name in ("self_drafts", "vocabulary")),
    ),
    "aux_hidden_states": tuple(f"modeling/families/aux_{name}" for name in ("hidden_states", "layers", "drafter")),
}


@dataclass
class Piece:
    """One statement of a module."""

    text: str  # source, with the comments and blank lines above it
    defines: set[str]  # names that it binds at the top level of its module
    uses: set[str]  # names that occur in it
    has_effect: bool  # whether it does more than to bind its names
    is_needed: bool = False  # whether it is copied


@dataclass
class Module:
    """One module of the package, without the parts that are left out."""

    name: str  # path below the package, without its ending
    about: str  # docstring
    pieces: list[Piece] = field(default_factory=list)  # its statements, without imports
    # of every name that it imports from the package, the module and the name there
    inside: dict[str, tuple[str, str]] = field(default_factory=dict)
    # of every other name that it imports, the beginning of the statement and the name there
    outside: dict[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def needed_pieces(self) -> list[Piece]:
        return [piece for piece in self.pieces if piece.is_needed]

    @property
    def names(self) -> set[str]:
        """Names that occur in these pieces."""
        return {name for piece in self.needed_pieces for name in piece.uses}

    @property
    def needs(self) -> set[str]:
        """Modules that these pieces import from."""
        return {self.inside[name][0] for name in self.inside.keys() & self.names}


def flatten(
    symbols: Sequence[tuple[str, str]],
    root: Path,
    left_out: Sequence[str] = LEFT_OUT,
    files: Mapping[str, Sequence[str]] = FILES,
) -> dict[str, str]:
    """Return the sources of the named classes and of all that they need, by file name.

    Raises:
        ValueError: If a part that is left out is imported without `try`, modules or files import each other in a
            circle, or two modules of one file use a name for different things.
    """
    modules = _reach(symbols, root, left_out)
    file_of = {module: name for name, names in files.items() for module in names}
    for name in modules:
        file_of.setdefault(name, flat_name(name))
    members: dict[str, list[Module]] = {}
    for name in _sorted({name: module.needs for name, module in modules.items()}):
        members.setdefault(file_of[name], []).append(modules[name])
    _sorted({file: {file_of[n] for m in joined for n in m.needs} - {file} for file, joined in members.items()})
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


def _reach(symbols: Sequence[tuple[str, str]], root: Path, left_out: Sequence[str]) -> dict[str, Module]:
    """Read the modules that are needed, and mark in each the pieces that are."""
    modules: dict[str, Module] = {}
    pending, visited = list(symbols), set[tuple[str, str]]()
    while pending:
        name, symbol = place = pending.pop()
        if place in visited:
            continue
        visited.add(place)
        if name not in modules:
            modules[name] = _read(name, root, left_out)
        module = modules[name]
        if symbol in module.inside:
            pending.append(module.inside[symbol])
        for piece in module.pieces:
            if not piece.is_needed and (piece.has_effect or symbol in piece.defines):
                piece.is_needed = True
                pending += [(name, other) for other in piece.uses]
    return {name: module for name, module in modules.items() if module.needed_pieces}


def _read(name: str, root: Path, left_out: Sequence[str]) -> Module:
    path = root / f"{name}.py"
    text = _without_left_out(path.read_text(encoding="utf-8"), path, root, left_out)
    tree = ast.parse(text)
    module = Module(name, ast.get_docstring(tree) or "")
    lines, end = _short_docstrings(text, tree), 0
    for node in tree.body:
        start, end = end, node.end_lineno or 0
        if isinstance(node, ast.ImportFrom) and node.level:
            source = _resolve(node, path, root)
            if _is_left_out(source, left_out):
                raise ValueError(f"{path}: {source} is not published: import it inside `try`, with a stand-in.")
            module.inside |= {alias.asname or alias.name: (source, alias.name) for alias in node.names}
        elif isinstance(node, ast.Import | ast.ImportFrom):
            statement = f"from {node.module} import" if isinstance(node, ast.ImportFrom) else "import"
            module.outside |= {alias.asname or alias.name: (statement, alias.name) for alias in node.names}
        elif not (node is tree.body[0] and module.about):
            piece = "\n".join(line for line in lines[start:end] if line is not None)
            module.pieces.append(_piece(node, piece))
    return module


def _without_left_out(text: str, path: Path, root: Path, left_out: Sequence[str]) -> str:
    """Return a source without `try` around imports: its body, or that of its `except` if a part is left out."""
    lines = text.split("\n")
    for node in reversed(ast.parse(text).body):
        if not isinstance(node, ast.Try):
            continue
        imports = [inner for inner in node.body if isinstance(inner, ast.ImportFrom) and inner.level]
        if not imports:
            continue
        handler = node.handlers[0]
        body, reason = lines[node.lineno : handler.lineno - 1], ""
        if any(_is_left_out(_resolve(inner, path, root), left_out) for inner in imports):
            body, reason = lines[handler.lineno : node.end_lineno], lines[handler.lineno - 1].partition("#")[2]
        comment = [f"#{reason}"] if reason else []
        lines[node.lineno - 1 : node.end_lineno] = comment + [line.removeprefix("    ") for line in body]
    return "\n".join(lines)


def _is_left_out(module: str, left_out: Sequence[str]) -> bool:
    return any(fnmatch(module, name) or fnmatch(module, f"{name}/*") for name in left_out)


def _resolve(node: ast.ImportFrom, path: Path, root: Path) -> str:
    """Return the module that a relative import names, as a path below the package."""
    return path.parents[node.level - 1].joinpath(*(node.module or "").split(".")).relative_to(root).as_posix()


def _piece(node: ast.stmt, text: str) -> Piece:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return Piece(text, {node.name}, _names(node), False)
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    bound = {inner.id for target in targets for inner in ast.walk(target) if isinstance(inner, ast.Name)}
    is_plain = bool(targets) and all(isinstance(target, ast.Name | ast.Tuple) for target in targets)
    return Piece(text, bound, _names(node), not is_plain)


def _names(node: ast.AST) -> set[str]:
    """Return the names that occur in a statement, also in annotations that are texts."""
    names = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    for inner in ast.walk(node):
        for hint in (getattr(inner, "annotation", None), getattr(inner, "returns", None)):
            if isinstance(hint, ast.Constant) and isinstance(hint.value, str):
                names |= _names(ast.parse(hint.value))
    return names


def _short_docstrings(text: str, tree: ast.Module) -> list[str | None]:
    """Return the lines of a source; those of docstrings after their first paragraph are None."""
    lines: list[str | None] = list(text.split("\n"))
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or not ast.get_docstring(node):
            continue
        start, end = node.body[0].lineno, node.body[0].end_lineno or 0
        blank = next((place for place in range(start, end) if not (lines[place] or "").strip()), None)
        if blank is not None:
            lines[blank - 1] = f'{lines[blank - 1]}"""'
            lines[blank:end] = [None] * (end - blank)
    return lines


def _joined(file: str, modules: Sequence[Module], file_of: Mapping[str, str]) -> str:
    """Return the source of one file of the copy."""
    meaning: dict[str, tuple[str, str]] = {}

    def claim(name: str, value: tuple[str, str], module: Module) -> bool:
        """Return whether a name is new in the file."""
        is_new = name not in meaning
        if meaning.setdefault(name, value) != value:
            raise ValueError(
                f"two modules joined in {file}.py define {name} differently, {module.name} among them: rename one."
            )
        return is_new

    imports: dict[str, set[str]] = {}
    sections = []
    for module in modules:
        texts: list[str] = []
        for piece in module.needed_pieces:
            new = [claim(name, (piece.text.strip(), name), module) for name in sorted(piece.defines)]
            if any(new) or piece.has_effect:  # two modules may define a constant alike
                texts.append(piece.text)
        for name, (other, original) in module.inside.items():
            if name in module.names and file_of[other] != file:
                claim(name, (file_of[other], original), module)
                imports.setdefault(f"from .{file_of[other]} import", set()).add(_spelled(original, name))
            elif name in module.names and name != original:
                raise ValueError(f"{module.name} imports {original} as {name} from its own file {file}.py: rename it.")
        for name, (statement, original) in module.outside.items():
            if name.split(".")[0] in module.names:
                claim(name, (statement, original), module)
                imports.setdefault(statement, set()).add(_spelled(original, name))
        about = "\n".join(f"# {line}".rstrip() for line in module.about.split("\n"))
        title = f"# {'-' * 20} {module.name}.py\n#\n{about}\n\n" if len(modules) > 1 else ""
        sections.append(title + "\n".join(texts).strip("\n"))
    about = f"{file}: joined from {', '.join(module.name + '.py' for module in modules)} of hf_longspec."
    about = modules[0].about + "\n" * ("\n" in modules[0].about) if len(modules) == 1 else about
    head = f'"""{about}"""\n\n' + "".join(f"{statement}\n" for statement in _statements(imports)) + "\n" * bool(imports)
    return head + "\n\n\n".join(sections) + "\n"


def _spelled(name: str, bound: str) -> str:
    return name if name == bound else f"{name} as {bound}"


def _statements(imports: Mapping[str, set[str]]) -> Iterator[str]:
    """Return import statements: modules first, then names of packages, then of the other files."""
    for statement in sorted(imports, key=lambda text: (text.startswith("from"), text.startswith("from ."), text)):
        names = sorted(imports[statement])
        line = f"{statement} {', '.join(names)}"
        if statement == "import":
            line = "\n".join(f"import {name}" for name in names)
        elif len(line) > 118:
            line = f"{statement} (\n" + "".join(f"    {name},\n" for name in names) + ")"
        yield line
