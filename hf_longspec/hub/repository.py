"""Write or upload the repository of a draft: weights, settings, code and model card."""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import HfApi
from transformers.dynamic_module_utils import get_relative_import_files

from ..modeling.register_draft import DRAFTS, RegisteredDraft
from .cards import Card, is_hub_id, render, render_engine
from .flatten import LEFT_OUT, flat_name, flatten

PACKAGE = Path(__file__).resolve().parents[1]
CARD_FACTS = "card.json"
# Beginning of every file of code. Files with this mark that are no longer needed are removed.
MARK = "# Published with a draft by hf_longspec, "
# First version of the package that reads these configurations and settings; raised when they change.
FORMAT_VERSION = "0.1.0"
# Methods that use n-grams. In the code of the others, they are left out.
NGRAMS = "modeling/ngram/generation_ngram"
WITH_NGRAMS = ("tokenswift", "longspec_ngram")
# The file that `auto_map` names. Transformers saves a class with the file of its `__module__`.
ENTRY = '''"""{model}, from {package} where it is installed, and from the files beside this one otherwise.

It is the whole package or the whole copy: the files beside this one are not imported where the package is.
"""

from importlib.metadata import version

from packaging.version import Version

try:
    if Version(version("{package}")) < Version("{version}"):
        raise ImportError("{package} is older than the format of this draft")
    from {package} import {config}, {model}
except ImportError:
    from .{sibling} import {config}, {model}

    {config}.__module__ = {model}.__module__ = __name__  # saved drafts bring this file along, too
'''


def push(
    draft: Any,
    repo_id: str,
    *,
    card: Card | None = None,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str = "Upload draft",
    engine: str | None = None,
    **facts: Any,
) -> Any:
    """Upload the complete repository of a draft.

    Args:
        draft ([`DraftModel`]): The draft to publish.
        repo_id (`str`): `"owner/name"`; created if it does not exist.
        card ([`Card`], *optional*): Facts for the model card.
        private (`bool`, *optional*): Whether a new repository is private.
        token (`str` or `bool`, *optional*): Access token. Defaults to the one that `hf auth login` stored.
        revision (`str`, *optional*): Branch to commit to.
        create_pr (`bool`, *optional*, defaults to `False`): Whether to open a pull request instead of committing.
        commit_message (`str`, *optional*, defaults to `"Upload draft"`): Title of the commit.
        engine (`str`, *optional*): `"owner/name"` of a repository that holds the code. The draft's own repository then
            holds none. It is created with its code if it does not exist, and never changed if it does.
        facts (`Any`): Facts for the model card by name, such as `license="apache-2.0"`, instead of `card`.

    Returns:
        `huggingface_hub.CommitInfo`: The commit.

    Raises:
        ValueError: If `repo_id` has no owner, if both `card` and `facts` are given, or if the draft cannot be
            published. Nothing is uploaded then.
    """
    check_repo_id(repo_id)
    if card is not None and facts:
        raise ValueError(f"both card and {', '.join(facts)} were given: put all facts into the card.")
    with TemporaryDirectory() as folder:
        write_repository(draft, Path(folder) / "draft", card or Card.read(facts), repo_id, engine)
        api = HfApi(token=token)
        if engine is not None and not api.repo_exists(engine):
            write_engine(Path(folder) / "engine", engine)
            api.create_repo(engine, private=private, exist_ok=True)
            api.upload_folder(repo_id=engine, folder_path=str(Path(folder) / "engine"), commit_message="Upload engine")
        api.create_repo(repo_id, private=private, exist_ok=True)
        return api.upload_folder(
            repo_id=repo_id,
            folder_path=str(Path(folder) / "draft"),
            commit_message=commit_message,
            revision=revision,
            create_pr=create_pr,
        )


def check_repo_id(repo_id: str) -> None:
    """Check that a repository is named with its owner, so that nothing is uploaded to a default owner.

    Raises:
        ValueError: If `repo_id` is not a valid `"owner/name"`.
    """
    if "/" not in repo_id or not is_hub_id(repo_id):
        raise ValueError(
            f"repository {repo_id!r}: expected owner/name, of letters, digits and the signs - _ and . alone."
        )


def check_engine(engine: str, repo_id: str | None) -> None:
    """Check the name of an engine repository.

    Raises:
        ValueError: If it is not a valid `"owner/name"`, holds `--`, or is the draft's own repository.
    """
    if "--" in engine:
        raise ValueError(f"engine {engine!r}: `auto_map` separates repository and class by --. Choose another name.")
    check_repo_id(engine)
    if engine == repo_id:
        raise ValueError(f"engine {engine!r} is the draft's own repository. Name another one, or leave engine out.")


def write_engine(folder: Path, engine: str) -> list[Path]:
    """Write the code that drafts of every kind share into a new folder.

    Args:
        folder (`Path`): Folder to write to.
        engine (`str`): `"owner/name"` of the repository, for its README.md.

    Returns:
        `list[Path]`: The files, relative to `folder`.
    """
    texts = engine_code() | {"README.md": render_engine(engine)}
    _write(texts, folder)
    return sorted(map(Path, texts))


def write_repository(
    draft: Any, folder: Path, card: Card, repo_id: str | None = None, engine: str | None = None
) -> list[Path]:
    """Write the complete repository of a draft into `folder`.

    Existing files of the same names are replaced atomically. Code that an earlier call wrote and that is no longer
    needed is removed. All other files in the folder stay. The folder may be the one that the draft was loaded from.

    Args:
        draft ([`DraftModel`]): The draft to publish.
        folder (`Path`): Folder to write to; created if it does not exist.
        card ([`Card`]): Facts for the model card.
        repo_id (`str`, *optional*): `"owner/name"` for the card. Defaults to the name of the folder.
        engine (`str`, *optional*): Repository that holds the code, which this one then refers to.

    Returns:
        `list[Path]`: The files, relative to `folder`.

    Raises:
        ValueError: If the draft cannot be published. Nothing is written then.
    """
    _check(draft)
    if engine is not None:
        check_engine(engine, repo_id)
    full = card.complete(draft, repo_id or folder.name)
    code = draft_code(draft)  # with an engine, too: it refuses drafts that no engine holds
    code = code if engine is None else {}
    texts = code | {"README.md": render(draft, full, engine), CARD_FACTS: _facts(card)}
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder, prefix=".publish-") as temporary:
        built = Path(temporary)
        draft.save_pretrained(built)
        for file in built.glob("*.py"):  # of a draft that was loaded as remote code
            file.unlink()
        _complete_config(built / "config.json", draft, str(full.base_model), engine)
        _write(texts, built)
        files = sorted(path.relative_to(built) for path in built.rglob("*") if path.is_file())
        _remove_stale(folder, files)
        for file in files:
            (folder / file).parent.mkdir(exist_ok=True)
            os.replace(built / file, folder / file)
    return files


def _write(texts: dict[str, str], folder: Path) -> None:
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8", newline="\n")


def draft_code(draft: Any) -> dict[str, str]:
    """Return the sources that a draft runs on without this package, by file name.

    Raises:
        ValueError: If a class is not defined in a file of the package, or an import cannot be followed.
    """
    file = _file_of(type(draft))
    if file.read_text(encoding="utf-8").startswith(MARK):  # loaded from such a repository
        files = [file, *sorted(map(Path, get_relative_import_files(file)))]
        return {path.name: path.read_text(encoding="utf-8") for path in files} | _custom()
    methods = [method for method in _methods() if method.model is type(draft)]
    if not methods:
        raise ValueError(
            f"{type(draft).__name__} needs {PACKAGE.name} installed: only drafts of the package itself are published "
            "with their code."
        )
    return _code_of(methods)


def engine_code() -> dict[str, str]:
    """Return the sources that every kind of draft runs on without this package, by file name."""
    return _code_of(_methods())


def _methods() -> list[RegisteredDraft]:
    """Return the drafts of the package."""
    return [draft for draft in DRAFTS.values() if draft.model.__module__.split(".")[0] == PACKAGE.name]


def _code_of(methods: list[RegisteredDraft]) -> dict[str, str]:
    """Return the entry files of some methods, and the engine below them."""
    wanted = [(_module(part), part.__name__) for method in methods for part in (method.model, method.config)]
    with_ngrams = any(method.config.model_type in WITH_NGRAMS for method in methods)
    sources = flatten(wanted, PACKAGE, LEFT_OUT if with_ngrams else (*LEFT_OUT, NGRAMS))
    for method in methods:
        module = _module(method.model)
        names = {"model": method.model.__name__, "config": method.config.__name__, "sibling": flat_name(module)}
        sources[f"{module.split('/')[-1]}.py"] = ENTRY.format(package=PACKAGE.name, version=FORMAT_VERSION, **names)
    return {name: f"{MARK}Apache-2.0.\n{text}" for name, text in sources.items()} | _custom()


def _custom() -> dict[str, str]:
    text = Path(__file__).with_name("generate.py").read_text(encoding="utf-8")
    return {"custom_generate/generate.py": f"{MARK}Apache-2.0.\n{text}"}


def _module(cls: type) -> str:
    """Return the module of a class of the package, as a path below the package without ending."""
    return "/".join(cls.__module__.split(".")[1:])


def _file_of(cls: type) -> Path:
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    if cls.__module__ == "__main__" or file is None:
        raise ValueError(
            f"{cls.__name__} is defined in {cls.__module__}, which is no file of a package: move it to one."
        )
    return Path(file).resolve()


def _check(draft: Any) -> None:
    if not getattr(draft, "_is_longspec_draft", False) or not hasattr(draft, "save_pretrained"):
        raise ValueError(f"{type(draft).__name__} is no draft of hf_longspec: pass a DraftModel.")
    if getattr(draft, "peft_config", None):
        raise ValueError("the draft has a LoRA adapter, which would be published without its base: merge it first.")


def _complete_config(path: Path, draft: Any, base_model: str, engine: str | None) -> None:
    """Add the file of the draft's classes and the target's Hub id to a config.json."""
    config = json.loads(path.read_text(encoding="utf-8"))
    names = {"AutoConfig": type(draft.config).__name__, "AutoModel": type(draft).__name__}
    entry = f"{engine}--" if engine else ""
    entry += _file_of(type(draft)).stem
    config["auto_map"] = {auto: f"{entry}.{name}" for auto, name in names.items()}
    config["target_name_or_path"] = base_model
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _facts(card: Card) -> str:
    """Return the given facts as JSON, without the acceptance table, which is made from a results file each time."""
    given = {name: value for name, value in asdict(card).items() if value and name != "acceptance"}
    return json.dumps(given, indent=2) + "\n"


def _remove_stale(folder: Path, files: list[Path]) -> None:
    for path in [*folder.glob("*.py"), *folder.glob("custom_generate/*.py")]:
        if path.relative_to(folder) not in files and path.read_text(encoding="utf-8").startswith(MARK):
            path.unlink()
