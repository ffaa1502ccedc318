"""Options that several commands share, the checks of their values, and how a command ends.

Typer checks numbers and choices while it parses the arguments, and `--help` shows them. Nothing here imports torch or
transformers when it is imported, as the help does without.
"""

import json
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from ..cli import CommandError, one_line

INPUT_ERROR, INTERRUPTED = 2, 130
DtypeName = StrEnum("DtypeName", ["auto", "float32", "bfloat16", "float16"])
# One batch may have so many rows.
MOST_ROWS = 1024
# Names of the package's `weightless_drafts`, for the help, which does not import them.
BY_NAME = "assistant, ngram, plain, grammar, specattn, vegas, self-int4"
# The draft that chooses another one.
AUTO = "auto"
# Endings of files with texts, tables or weights. Names of Hub repositories have others, such as those of versions.
FILE_SUFFIXES = {".txt", ".md", ".rst", ".py", ".json", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow", ".gz", ".zip"}
FILE_SUFFIXES |= {".html", ".pdf", ".yaml", ".yml", ".safetensors", ".bin", ".pt", ".pth", ".npy"}


def number(least: float, help: str, most: float | None = None, above: bool = False) -> Any:
    """An option for numbers from `least` to `most`, or from above `least`."""

    def checked(value: float | None) -> float | None:
        if value is not None and not value > least:  # as NaN is not
            raise typer.BadParameter(f"{value} is not above {least}.")
        return value

    return typer.Option(help=help, min=least, max=most, callback=checked if above else None)


def option(help: str, *names: str, **how: Any) -> Any:
    """An option with the name of its parameter, or with those that are given, as for one without a value."""
    return typer.Option(*names, help=help, **how)


def parse_shard(text: Any) -> tuple[int, int]:
    """Number and count of a share of rows, such as `0/2`."""
    number, _, count = str(text).partition("/")
    if not (number.isdecimal() and count.isdecimal() and int(number) < int(count)):
        raise typer.BadParameter(f"{text}: expected i/n with i from 0 to n - 1, such as 0/2 and 1/2.")
    return int(number), int(count)


def require_sources(names: Iterable[str]) -> None:
    """Refuse missing files and datasets. The Hub is not asked for a name that is that of a file or lies in a folder."""
    for name in names:
        path = name.partition(":")[0]  # a dataset may have a configuration
        if not Path(name).exists() and not Path(path).exists():
            require_existing("data", name)
            if "/" in name:  # names without an owner are also those of formats
                require_repository("dataset", path, "dataset")


def split_gguf(target: str) -> tuple[str, str | None]:
    """Return the Hub id or folder of a target, and its GGUF file; `None` without one.

    >>> split_gguf("org/model:model-Q4_1.gguf"), split_gguf("folder/model.gguf"), split_gguf("org/model")
    (('org/model', 'model-Q4_1.gguf'), ('folder', 'model.gguf'), ('org/model', None))
    """
    if not target.lower().endswith(".gguf"):
        return target, None
    name, colon, file = target.rpartition(":")
    if colon and not Path(target).exists():
        return name, file
    return str(Path(target).parent), Path(target).name


def name_gguf(target: str | None, file: str | None) -> str | None:
    """Return one name for a target and its `--gguf-file`: a path, or `org/model:file` as in `transformers serve`."""
    if file is None:
        return target
    if target is None or split_gguf(target)[1] is not None:
        need = "needs --target" if target is None else f"is a second file beside --target {target}"
        raise CommandError(f"--gguf-file {file} {need}. Pass the Hub id or the folder of the file as --target.")
    if not file.lower().endswith(".gguf"):
        raise CommandError(f"--gguf-file {file} does not end with .gguf. Pass the name of a GGUF file.")
    return str(Path(target, file)) if Path(target).is_dir() else f"{target}:{file}"


def require_gguf(what: str, target: str) -> None:
    """Refuse the GGUF file of a target that does not exist in its folder, or that cannot be read."""
    folder, file = split_gguf(target)
    if file is None:
        return
    start = f"cannot load the {what} {target!r}:"
    is_on_hub = ":" in target and not Path(folder).is_dir()
    if not is_on_hub and not Path(folder, file).is_file():
        there = ", ".join(sorted(path.name for path in Path(folder).glob("*.gguf")))
        on_hub = "Check the path; for a file on the Hub, pass --target org/model --gguf-file NAME."
        raise CommandError(f"{start} there is no such file. {f'The folder has {there}.' if there else on_hub}")
    if find_spec("gguf") is None:
        raise CommandError(f"{start} gguf is not installed: pip install gguf")


def require_existing(what: str, name: str) -> None:
    """Refuse the folder or file of a model, a draft or data that does not exist; no Hub id looks like its name."""
    require_gguf(what, name)
    name = split_gguf(name)[0]
    kind = "file" if Path(name).suffix.lower() in FILE_SUFFIXES else "folder"
    if not Path(name).exists() and (kind == "file" or name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise CommandError(f"cannot load the {what} {name!r}: there is no such {kind}. Check the path.")


def require_model(what: str, name: str) -> None:
    """Refuse a folder that does not exist, and a name that the Hub does not have."""
    require_existing(what, name)
    if not Path(name := split_gguf(name)[0]).exists():
        require_repository(what, name)


def require_repository(what: str, name: str, kind: str = "model") -> None:
    """Refuse a repository that is neither in the cache nor on the Hub, by one request.

    transformers and datasets repeat the request five times for each file, which takes minutes without a connection.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError

    file = "config.json" if kind == "model" else "README.md"
    no_connection: Any = HfHubHTTPError.__bases__[0]  # of httpx in version 1, of httpx2 in version 2
    try:
        if not constants.HF_HUB_OFFLINE and try_to_load_from_cache(name, file, repo_type=kind) is None:
            get_hf_file_metadata(hf_hub_url(name, file, repo_type=kind))
    except EntryNotFoundError:
        pass  # the repository exists; adapters have another configuration
    except (HFValidationError, HfHubHTTPError, no_connection) as error:
        parent = Path(name).parent
        place = f"the folder {parent} has no {Path(name).name}" if parent.is_dir() and parent.name else "no such folder"
        where = "the Hub has none" if isinstance(error, HfHubHTTPError) else "the Hub was not reached"
        raise CommandError(
            f"cannot load the {what} {name!r}: {place}, and {where} ({one_line(error).rstrip('.')}). Check the name; "
            "with HF_HUB_OFFLINE=1, the cache alone is searched."
        ) from error


def require_draft(name: str) -> None:
    """Refuse a name that no draft has."""
    from ..modeling.register_draft import weightless_drafts

    if name in (known := [*weightless_drafts(), AUTO]):
        return
    if "/" not in name and not Path(name).exists():
        near = get_close_matches(name, known, 1)
        raise CommandError(
            f"cannot load the draft {name!r}: there is no such folder, Hub ids have the form owner/name, and the "
            f"training-free drafts are {', '.join(known)}.{f' Did you mean {near[0]!r}?' if near else ''}"
        )
    require_model("draft", name)


Target = Annotated[str, option("Hub id, folder or GGUF file of the model.", show_default=False)]
GgufFile = Annotated[
    str | None,
    option("GGUF file in --target, unpacked to --dtype. Needs the package gguf.", show_default=False),
]
Draft = Annotated[
    str,
    option(
        f"Hub id or folder of a draft or a small model, or a training-free draft: {BY_NAME}; or {AUTO}: the fastest of "
        "n-grams, the model's MTP layers and the draft that its card names."
    ),
]
Prompt = Annotated[str | None, option("Text to continue, instead of a file.", show_default=False)]
Setting = Annotated[
    list[str] | None, option("Setting of the draft, such as num_assistant_tokens=6. Repeatable.", "--set")
]
Dtype = Annotated[DtypeName, option("Type of the weights; auto: bfloat16 on a GPU, float32 on a CPU.")]
Device = Annotated[
    str | None, option("cpu, cuda, cuda:1, ...; by default the first GPU, or the CPU.", show_default=False)
]
Seed = Annotated[int | None, number(0, "Seed of sampling.", most=2**32 - 1)]
Overwrite = Annotated[bool, option("Replace files that exist, in place of an error.", "--overwrite")]
Json = Annotated[bool, option("Print a single JSON object to standard output.", "--json")]
Debug = Annotated[bool, option("Show the traceback of an error.", "--debug")]


@contextmanager
def one_line_errors(debug: bool) -> Iterator[None]:
    """End the command with one line for an error that the user can correct."""
    try:
        yield
    except KeyboardInterrupt as error:
        print("\nInterrupted.", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from error
    except Exception as error:
        if debug or (line := said(error)) is None:
            raise
        print(f"error: {line}", file=sys.stderr)
        raise typer.Exit(INPUT_ERROR) from error


def said(error: Exception) -> str | None:
    """The line for an error, with a remedy if the error has none; `None` for an error that is no user's."""
    if type(error).__name__ == "OutOfMemoryError":
        return "out of memory. Pass a shorter text, fewer --max-new-tokens or a smaller --dtype."
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}. Check the path and its permissions."
    if type(error).__module__ in ("httpx", "httpx2"):  # the clients of huggingface_hub
        return f"the Hub was not reached: {one_line(error).rstrip('.')}. Check the connection, and try again."
    if not isinstance(error, CommandError | ValueError | OSError | ImportError):
        return None
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        missing = error.name.partition(".")[0]
        return f"{missing} is not installed: pip install {missing}"
    line = one_line(error)
    return line if len(line.split()) >= len(str(error).split()) else f"{line} (--debug shows the rest)"


class YamlLoader(yaml.SafeLoader):
    """A YAML loader that reads 5e-4 as a number, as Python does; YAML 1.1 reads it as a text."""


YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_settings(texts: list[str] | None, example: str = "num_assistant_tokens=6") -> dict[str, Any]:
    """The settings given with `--set`, by name; values are read as YAML.

    >>> read_settings(["training.learning_rate=5e-4"])
    {'training.learning_rate': 0.0005}
    """
    settings = {}
    for text in texts or []:
        name, equals, value = text.partition("=")
        if not equals or not all(name.split(".")):
            raise CommandError(f"--set {text!r}: expected key=value, such as {example}.")
        try:
            settings[name] = yaml.load(value, Loader=YamlLoader)
        except yaml.YAMLError as error:
            raise CommandError(f"--set {text!r}: the value is not YAML. Put it in quotes.") from error
    return settings


def check_names(what: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Refuse names that do not exist, with the nearest that does."""
    known = sorted(known)
    for name in names:
        if name not in known:
            near = get_close_matches(str(name), known, 1)
            choices = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}."
            raise CommandError(f"unknown key {str(name)!r} in {what}: {choices}")


def lengths(option: str, text: str) -> list[int]:
    """Numbers such as `512,2k`.

    >>> lengths("--context", "512,2k")
    [512, 2048]
    """
    numbers = []
    for part in map(str.strip, text.split(",")):
        match = re.fullmatch(r"(\d+)(k?)", part.lower())
        number = int(match[1]) * (1024 if match[2] else 1) if match else 0
        if number < 1:
            raise CommandError(f"{option} {part!r}: expected numbers of at least 1, such as 512 or 2k (2048).")
        numbers.append(number)
    return list(dict.fromkeys(numbers))


def read_text(file: Path | None, prompt: str | None) -> tuple[str, str]:
    """Name and text of a prompt: `--prompt`, a file, or standard input for `-`."""
    if (file is None) == (prompt is None):
        raise CommandError("pass one prompt: a FILE, - for standard input, or --prompt TEXT.")
    name, text = "--prompt", prompt
    if file is not None:
        name = str(file)
        try:
            text = sys.stdin.read() if name == "-" else file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise CommandError(f"{file} is not UTF-8 text. Convert it, or pass another file.") from error
        except OSError as error:
            remedy = "Pass a text file, or - for standard input."
            raise CommandError(f"cannot read {file}: {error.strerror}. {remedy}") from error
    if not text or not text.strip():
        raise CommandError(f"{name} is empty. Pass a text.")
    return name, text


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CommandError(f"{file} is not JSON: {one_line(error).rstrip('.')}. Correct it.") from error
    if not isinstance(content, dict):
        raise CommandError(f"{file} holds a {type(content).__name__}, expected a JSON object. Correct it.")
    return content
