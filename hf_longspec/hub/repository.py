"""Write or upload the repository of a draft: weights, settings, code, and a model card from the templates here."""

import json
import os
import sys
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import HfApi, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from transformers.dynamic_module_utils import get_relative_import_files

from ..modeling.register_draft import DRAFTS, RegisteredDraft
from .flatten import LEFT_OUT, flat_name, flatten

PACKAGE = Path(__file__).resolve().parents[1]
TEMPLATES = Path(__file__).parent / "templates"
CARD_FACTS = "card.json"
# Beginning of every file of code. Files with this mark that are no longer needed are removed.
MARK = "# Published with a draft by hf_longspec, "
# First version of the package that reads these configurations and settings; raised when they change.
FORMAT_VERSION = "0.1.0"
# Methods that use n-grams. In the code of the others, they are left out.
NGRAMS = "modeling/families/ngrams"
WITH_NGRAMS = ("tokenswift", "longspec_ngram")
# The file that `auto_map` names. Transformers saves a class with the file of its `__module__`.
ENTRY = '''"""{model}, from {package} if it is installed, and otherwise from the other files of this repository.

The two are never mixed: if the package is installed, the other files are not imported.
"""

from importlib.metadata import version

from packaging.version import Version

try:
    if Version(version("{package}")) < Version("{version}"):
        raise ImportError("{package} is older than the format of this draft")
    from {package} import {config}, {model}
except ImportError:
    import torch
    from transformers.utils import logging

    from .{sibling} import {config}, {model}

    {config}.__module__ = {model}.__module__ = __name__  # so that saved drafts include this file
    if torch.cuda.is_available():
        logging.get_logger(__name__).warning(
            "{model} runs the code of its repository, which has neither Triton kernels nor CUDA graphs. On a GPU both "
            "save most of the time of a step. To use them, install {package} {version} or newer."
        )
'''
NOT_MEASURED = "Not measured."
NO_LICENSE = "The code is licensed under Apache-2.0; the license of the weights was not stated."
OWN_CODE = """\
This draft needs transformers 5.17 or newer. The code is in this repository; `trust_remote_code=True` runs it."""
ENGINE_CODE = """\
This draft needs transformers 5.17 or newer. The code is in [{engine}](https://huggingface.co/{engine});
`trust_remote_code=True` runs it. `revision` selects the weights and settings of this repository, and
`code_revision="<commit of {engine}>"` the code."""
LISTS = ("datasets", "language")  # fields that may hold several values on the Hub


@dataclass(frozen=True)
class Card:
    """Values on a model card that cannot be read from the draft. Missing values are omitted or marked as missing."""

    # id or folder from which the usage example loads the draft. Defaults to the repository that it is pushed to.
    repo: str | None = None
    base_model: str | None = None  # Hub id of the target. Defaults to the `target_name_or_path` of the draft.
    target: str | None = None  # id or folder from which the usage example loads the target. Defaults to `base_model`.
    # license of the weights, as the Hub spells it: it refuses the upload of another. Defaults to that of the code for
    # drafts without weights.
    license: str | None = None
    language: str | list[str] | None = None  # language of the training text
    datasets: list[str] = field(default_factory=list)  # Hub ids of the training data
    settings: str = ""  # reasons for the values in the draft's `generation_config`
    acceptance: str = ""  # Markdown table of tau by context length, with the method of measurement
    training: str = ""  # steps, tokens, loss
    command: str = ""  # the training command
    commit: str | None = None  # commit of the training code
    limits: str = ""  # further limits of the draft

    @classmethod
    def read(cls, facts: dict[str, Any]) -> "Card":
        defaults = {fact.name: fact.default for fact in fields(cls)}
        if unknown := sorted(set(facts) - set(defaults)):
            raise ValueError(f"unknown on a model card: {', '.join(unknown)}. Expected some of {', '.join(defaults)}.")
        for name, value in facts.items():
            if name in LISTS and isinstance(value, list) and all(isinstance(item, str) for item in value):
                continue
            if name == "datasets" or not (isinstance(value, str) or (value is None and defaults[name] is None)):
                expected = "a list of strings" if name == "datasets" else "a string"
                raise ValueError(f"{name}={value!r} on a model card: expected {expected}. Correct it, or omit it.")
        return cls(**facts)

    def complete(self, draft: Any, repo: str) -> "Card":
        """Return the card with missing facts filled in from the draft and the repository."""
        base_model = self.base_model or draft.config.target_name_or_path
        if not is_hub_id(base_model) or (not self.base_model and Path(str(base_model)).is_dir()):
            raise ValueError(
                f"the target {base_model!r} is not a Hub id, by which others can load it. Pass base_model "
                "(--base-model), such as Qwen/Qwen3-8B."
            )
        has_weights = not draft.weightless or next(draft.parameters(), None) is not None  # a draft by another model
        license = self.license or (None if has_weights else "apache-2.0")
        return replace(self, base_model=base_model, license=license, repo=self.repo or repo)


def render(draft: Any, card: Card, engine: str | None = None) -> str:
    kind = draft.config.model_type
    tags = ["speculative-decoding", kind.replace("_", "-"), "draft-model", "long-context", "custom_code"]
    data = ModelCardData(
        library_name="transformers",
        base_model=card.base_model,
        license=card.license,
        language=card.language,
        datasets=card.datasets or None,
        tags=tags,
    )
    base_model = str(card.base_model)
    if kind not in DRAFTS:
        raise ValueError(
            f"no draft of model_type={kind!r} is registered: call hf_longspec.register_draft, with a card."
        )
    about, limits = (
        DRAFTS[kind]
        .card_template()
        .format(
            config=draft.config,
            parameters=f"{sum(weight.numel() for weight in draft.parameters()) / 1e6:.2f}M",
            name=base_model.split("/")[-1],
            link=f"[{base_model}]({'https://huggingface.co' if '/' in base_model else '..'}/{base_model})",
        )
        .split("\n## Limits\n")
    )
    place = ENGINE_CODE.format(engine=engine) if engine else OWN_CODE
    return _template("card.md").format(
        code=place,
        custom_generate=engine or card.repo,
        metadata=data.to_yaml().strip(),
        about=about.strip(),
        target=card.target or base_model,
        repo=card.repo,
        settings=_settings(draft, card),
        acceptance=card.acceptance.strip() or NOT_MEASURED,
        training="" if draft.weightless and not card.training else f"## Training\n\n{_training(card)}\n\n",
        limits=_paragraphs(limits, card.limits, "" if card.license else NO_LICENSE),
    )


def _settings(draft: Any, card: Card) -> str:
    settings = ", ".join(f"`{name}={getattr(draft.generation_config, name, None)!r}`" for name in draft.settings)
    return _paragraphs(f"Settings in `generation_config.json`: {settings or 'none'}.", card.settings)


def _training(card: Card) -> str:
    command = f"```\n{card.command}\n```" if card.command else "The training command was not recorded."
    commit = f"Commit of the code: {card.commit}." if card.commit else "The commit of the code was not recorded."
    return _paragraphs(card.training, command, commit)


def _paragraphs(*parts: str) -> str:
    return "\n\n".join(part.strip() for part in parts if part.strip())


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
    self_contained: bool = False,
    **facts: Any,
) -> Any:
    """Upload the complete repository of a draft.

    Args:
        repo_id (`str`): `"owner/name"`; created if it does not exist.
        token (`str` or `bool`, *optional*): Access token. Defaults to the one that `hf auth login` stored.
        revision (`str`, *optional*): Branch to commit to.
        create_pr (`bool`, *optional*, defaults to `False`): Whether to open a pull request instead of committing.
        engine (`str`, *optional*): `"owner/name"` of a repository that holds the code, so that the draft's own holds
            none. It is created with its code if it does not exist, and never changed if it does. Defaults to
            [`engine_of`].
        self_contained (`bool`, *optional*, defaults to `False`): Whether the draft's own repository holds the code.
        facts (`Any`): Facts for the model card by name, such as `license="apache-2.0"`, instead of `card`.

    Raises:
        ValueError: If `repo_id` has no owner, if both `card` and `facts` or both `engine` and `self_contained` are
            given, or if the draft cannot be published. Nothing is uploaded then.
    """
    engine = engine_of(repo_id, engine, self_contained)
    if card is not None and facts:
        raise ValueError(f"card was passed together with {', '.join(facts)}: pass all values in the card.")
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
    """Check that a repository is named with its owner, so that nothing is uploaded to a default owner."""
    if "/" not in repo_id or not is_hub_id(repo_id):
        raise ValueError(f"repository {repo_id!r}: expected owner/name, with letters, digits, -, _ and . only.")


def engine_of(repo_id: str | None, engine: str | None, self_contained: bool) -> str | None:
    """Return the repository that holds the code of a draft; `None` if the draft's own does.

    By default, drafts of one owner that this version of the package publishes share `owner/hf-longspec-engine-0.1.0`,
    named by the version, as an existing engine is never changed. A draft without `repo_id` holds its code itself.
    """
    if repo_id is not None:
        check_repo_id(repo_id)
    if engine is not None and self_contained:
        raise ValueError(f"engine {engine!r} and self_contained are opposites. Pass one of the two.")
    if engine is not None:
        check_engine(engine, repo_id)
    elif repo_id is not None and not self_contained:
        engine = f"{repo_id.split('/')[0]}/hf-longspec-engine-{version(PACKAGE.name)}"
    return engine


def check_engine(engine: str, repo_id: str | None) -> None:
    if "--" in engine:
        raise ValueError(f"engine {engine!r}: `auto_map` separates repository and class by --. Choose another name.")
    check_repo_id(engine)
    if engine == repo_id:
        raise ValueError(f"engine {engine!r} is the draft's own repository. Pass another one, or omit engine.")


def write_engine(folder: Path, engine: str) -> list[Path]:
    """Write the code that drafts of every kind share into a new folder."""
    texts = engine_code() | {"README.md": _template("engine.md").format(engine=engine)}
    _write(texts, folder)
    return sorted(map(Path, texts))


def write_repository(
    draft: Any, folder: Path, card: Card, repo_id: str | None = None, engine: str | None = None
) -> list[Path]:
    """Write the complete repository of a draft into `folder`.

    Existing files of the same names are replaced atomically. Code that an earlier call wrote and that is no longer
    needed is removed. All other files in the folder stay. The folder may be the one that the draft was loaded from. If
    the draft cannot be published, nothing is written. With an `engine`, that repository holds the code.
    """
    _check(draft)
    if engine is not None:
        check_engine(engine, repo_id)
    full = card.complete(draft, repo_id or folder.name)
    code = draft_code(draft)  # with an engine, too: it refuses drafts that no engine holds
    code = code if engine is None else {}
    # without the acceptance table, which is made from a results file each time
    facts = {name: value for name, value in asdict(card).items() if value and name != "acceptance"}
    texts = code | {"README.md": render(draft, full, engine), CARD_FACTS: json.dumps(facts, indent=2) + "\n"}
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
    """Return the sources that a draft runs on without this package, by file name."""
    file = _file_of(type(draft))
    if file.read_text(encoding="utf-8").startswith(MARK):  # loaded from such a repository
        files = [file, *sorted(map(Path, get_relative_import_files(file)))]
        return {path.name: path.read_text(encoding="utf-8") for path in files} | _custom()
    methods = [method for method in _methods() if method.model is type(draft)]
    if not methods:
        raise ValueError(
            f"{type(draft).__name__} is not part of {PACKAGE.name}: only drafts of the package itself can be published "
            "with their code."
        )
    return _code_of(methods)


def engine_code() -> dict[str, str]:
    """Return the sources that every kind of draft runs on without this package, by file name."""
    return _code_of(_methods())


def _methods() -> list[RegisteredDraft]:
    return [draft for draft in DRAFTS.values() if draft.model.__module__.split(".")[0] == PACKAGE.name]


def _code_of(methods: list[RegisteredDraft]) -> dict[str, str]:
    """Return the entry files of some methods, and the engine below them."""
    classes = [(_module(part), part.__name__) for method in methods for part in (method.model, method.config)]
    with_ngrams = any(method.config.model_type in WITH_NGRAMS for method in methods)
    sources = flatten(classes, PACKAGE, LEFT_OUT if with_ngrams else (*LEFT_OUT, NGRAMS))
    for method in methods:
        module = _module(method.model)
        names = {"model": method.model.__name__, "config": method.config.__name__, "sibling": flat_name(module)}
        sources[f"{module.split('/')[-1]}.py"] = ENTRY.format(package=PACKAGE.name, version=FORMAT_VERSION, **names)
    return {name: f"{MARK}Apache-2.0.\n{text}" for name, text in sources.items()} | _custom()


def _custom() -> dict[str, str]:
    return {"custom_generate/generate.py": f"{MARK}Apache-2.0.\n{_template('generate.py')}"}


def _module(cls: type) -> str:
    """Return the module of a class of the package, as a path below the package without ending."""
    return "/".join(cls.__module__.split(".")[1:])


def _file_of(cls: type) -> Path:
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    if cls.__module__ == "__main__" or file is None:
        raise ValueError(
            f"{cls.__name__} is defined in {cls.__module__}, which is not a file of a package: move it to one."
        )
    return Path(file).resolve()


def _check(draft: Any) -> None:
    if not getattr(draft, "_is_longspec_draft", False) or not hasattr(draft, "save_pretrained"):
        raise ValueError(f"{type(draft).__name__} is not a draft of hf_longspec: pass a DraftModel.")
    if getattr(draft, "peft_config", None):
        raise ValueError("the draft has an unmerged LoRA adapter, which would be published without its base: merge it.")


def _complete_config(path: Path, draft: Any, base_model: str, engine: str | None) -> None:
    """Add the file of the draft's classes and the target's Hub id to a config.json."""
    config = json.loads(path.read_text(encoding="utf-8"))
    names = {"AutoConfig": type(draft.config).__name__, "AutoModel": type(draft).__name__}
    entry = f"{engine}--" if engine else ""
    entry += _file_of(type(draft)).stem
    config["auto_map"] = {auto: f"{entry}.{name}" for auto, name in names.items()}
    config["target_name_or_path"] = base_model
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _remove_stale(folder: Path, files: list[Path]) -> None:
    for path in [*folder.glob("*.py"), *folder.glob("custom_generate/*.py")]:
        if path.relative_to(folder) not in files and path.read_bytes().startswith(MARK.encode()):
            path.unlink()


def is_hub_id(name: str | None) -> bool:
    """Return whether a name is valid for a repository on the Hub."""
    try:
        validate_repo_id(name or "")
    except HFValidationError:
        return False
    return True


def _template(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")
