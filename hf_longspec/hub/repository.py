"""Write or upload the repository of a draft: weights, settings, code, and a model card from the templates here.

The code is a stub, and where the package is not installed, a copy of it. `auto_map` in config.json names the stub.
Transformers imports it from a folder of its own, so that it cannot know where it came from, and calls `from_pretrained`
of its classes with the folder or Hub id of the draft. Then the stub finds the package and lets it load the draft. So
all classes are those of the one package of a process.
"""

import json
import os
import re
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import import_module
from pathlib import Path
from shutil import copytree, ignore_patterns, rmtree
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import HfApi, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from ..modeling.register_draft import DRAFTS
from ..modeling.saved_config import FORMAT_FIELD, FORMAT_VERSION

TEMPLATES = Path(__file__).parent / "templates"
# Not resolved: in the cache of the Hub, files are links to another folder.
PACKAGE = Path(__file__).parents[1]
STUB = "longspec_draft.py"
AUTO_MAP = {"AutoConfig": "longspec_draft.DraftConfig", "AutoModel": "longspec_draft.DraftModel"}
# The engine of a draft that holds the copy itself.
OWN = "."
# Commands, which no draft needs.
LEFT_OUT = "cli", "__pycache__"
CARD_FACTS = "card.json"
NOT_MEASURED = "Not measured."
NO_LICENSE = "The code is licensed under Apache-2.0; the license of the weights was not stated."
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
    held_out: str = ""  # tau on rows of the training text that were held out
    warning: str = ""  # why the draft should not be used as it is
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
    name = (engine or "").partition("@")[0]
    place = f"[{name}](https://huggingface.co/{name}), at the commit that {STUB} names"
    settings = ", ".join(f"`{name}={getattr(draft.generation_config, name, None)!r}`" for name in draft.settings)
    return template("card.md").format(
        place="this repository" if engine is None else place,
        metadata=data.to_yaml().strip(),
        about=about.strip(),
        target=card.target or base_model,
        repo=card.repo,
        settings=_paragraphs(f"Settings in `generation_config.json`: {settings or 'none'}.", card.settings),
        acceptance=_acceptance(card),
        training="" if draft.weightless and not card.training else f"## Training\n\n{_training(card)}\n\n",
        limits=_paragraphs(limits, card.limits, "" if card.license else NO_LICENSE),
    )


def _acceptance(card: Card) -> str:
    measured = card.acceptance.strip() or ("" if card.held_out else NOT_MEASURED)
    return _paragraphs(f"**{card.warning}**" if card.warning else "", measured, card.held_out)


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
        engine (`str`, *optional*): `"owner/name@commit"` of a repository that holds the package, so that the draft's
            own has a stub alone. Without a commit, it is created if it does not exist, never changed if it does, and
            the draft gets its last commit. Defaults to [`engine_of`].
        self_contained (`bool`, *optional*, defaults to `False`): Whether the draft's own repository holds the code.
        facts (`Any`): Facts for the model card by name, such as `license="apache-2.0"`, instead of `card`.

    Raises:
        ValueError: If `repo_id` has no owner, if both `card` and `facts` or both `engine` and `self_contained` are
            given, or if the draft cannot be published. Nothing is uploaded then.
    """
    engine = engine_of(repo_id, engine, self_contained)
    if card is not None and facts:
        raise ValueError(f"card was passed together with {', '.join(facts)}: pass all values in the card.")
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_repository(draft, folder / "draft", card or Card.read(facts), repo_id, engine)
        api = HfApi(token=token)
        if engine is not None and "@" not in engine:
            engine = f"{engine}@{commit_of(engine, api, folder / 'engine', private)}"
            write_code(folder / "draft", engine)
        api.create_repo(repo_id, private=private, exist_ok=True)
        return api.upload_folder(
            repo_id=repo_id,
            folder_path=str(folder / "draft"),
            commit_message=commit_message,
            revision=revision,
            create_pr=create_pr,
        )


def commit_of(engine: str, api: HfApi, folder: Path, private: bool | None) -> str:
    """Return the last commit of an engine, which is written to `folder` and uploaded if it does not exist."""
    if api.repo_exists(engine):
        return str(api.model_info(engine).sha)
    write_engine(folder)
    api.create_repo(engine, private=private, exist_ok=True)
    return api.upload_folder(repo_id=engine, folder_path=str(folder), commit_message="Upload engine").oid


def check_repo_id(repo_id: str) -> None:
    """Check that a repository is named with its owner, so that nothing is uploaded to a default owner."""
    if "/" not in repo_id or not is_hub_id(repo_id):
        raise ValueError(f"repository {repo_id!r}: expected owner/name, with letters, digits, -, _ and . only.")


def engine_of(repo_id: str | None, engine: str | None, self_contained: bool) -> str | None:
    """Return the repository that holds the package for a draft, maybe with a commit; `None` if the draft's own does.

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
        engine = f"{repo_id.split('/')[0]}/hf-longspec-engine-{import_module(PACKAGE.name).__version__}"
    return engine


def check_engine(engine: str, repo_id: str | None) -> None:
    name, at, commit = engine.partition("@")
    check_repo_id(name)
    if at and not re.fullmatch("[0-9a-f]{40}", commit):
        raise ValueError(f"engine {engine!r}: expected owner/name@commit, with all 40 digits of the commit.")
    if name == repo_id:
        raise ValueError(f"engine {engine!r} is the draft's own repository. Pass another one, or omit engine.")


def write_code(folder: Path, engine: str = OWN) -> None:
    """Write the stub into the folder of a draft, and the package if the draft holds it itself.

    Args:
        folder (`Path`): The folder.
        engine (`str`): `"owner/name@commit"` of the repository that holds the package, or `"."`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = template(STUB).replace("{version}", FORMAT_VERSION).replace("{engine}", engine)
    (folder / STUB).write_text(text, encoding="utf-8", newline="\n")
    if engine == OWN:
        write_package(folder)


def write_package(folder: Path) -> None:
    """Copy the package into a folder, unless it is the one that runs."""
    copied = folder / PACKAGE.name
    if not (copied.exists() and copied.samefile(PACKAGE)):
        copytree(PACKAGE, copied, ignore=ignore_patterns(*LEFT_OUT), dirs_exist_ok=True)


def running_engine() -> str | None:
    """Return the engine that this package was copied from; `None` if it is installed."""
    engine: str | None = import_module(PACKAGE.name).copied_from
    return engine


def template(name: str) -> str:
    """Return the text of a template."""
    return (TEMPLATES / name).read_text(encoding="utf-8")


def write_engine(folder: Path) -> list[Path]:
    """Write the package, for drafts of every kind, into a new folder."""
    write_package(folder)
    (folder / "README.md").write_text(template("engine.md"), encoding="utf-8", newline="\n")
    return _files(folder)


def write_repository(
    draft: Any, folder: Path, card: Card, repo_id: str | None = None, engine: str | None = None
) -> list[Path]:
    """Write the complete repository of a draft into `folder`.

    Existing files of the same names are replaced atomically, and all others stay. The folder may be the one that the
    draft was loaded from. If the draft cannot be published, nothing is written. With an `engine`, that repository holds
    the package; its newest commit is used if none is named.
    """
    _check(draft)
    if engine is not None:
        check_engine(engine, repo_id)
    full = card.complete(draft, repo_id or folder.name)
    # without the acceptance table, which is made from a results file each time
    facts = {name: value for name, value in asdict(card).items() if value and name != "acceptance"}
    text = render(draft, full, engine)
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder, prefix=".publish-") as temporary:
        built = Path(temporary)
        draft.save_pretrained(built)
        rmtree(built / PACKAGE.name, ignore_errors=True)  # that of a copy, which is saved with its drafts
        _complete_config(built / "config.json", str(full.base_model))
        write_code(built, OWN if engine is None else engine if "@" in engine else f"{engine}@main")
        texts = {"custom_generate/generate.py": template("generate.py"), "README.md": text}
        texts[CARD_FACTS] = json.dumps(facts, indent=2) + "\n"
        for name, content in texts.items():
            (built / name).parent.mkdir(exist_ok=True)
            (built / name).write_text(content, encoding="utf-8", newline="\n")
        files = _files(built)
        for file in files:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            os.replace(built / file, folder / file)
    return files


def _files(folder: Path) -> list[Path]:
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())


def _check(draft: Any) -> None:
    if not getattr(draft, "_is_longspec_draft", False) or not hasattr(draft, "save_pretrained"):
        raise ValueError(f"{type(draft).__name__} is not a draft of hf_longspec: pass a DraftModel.")
    if getattr(draft, "peft_config", None):
        raise ValueError("the draft has an unmerged LoRA adapter, which would be published without its base: merge it.")
    kind = type(draft)
    if kind.__module__.split(".")[0] != PACKAGE.name:
        raise ValueError(
            f"{kind.__name__} of {kind.__module__} is not part of hf_longspec: only drafts of the package can be "
            "published with their code."
        )


def _complete_config(path: Path, base_model: str) -> None:
    """Add the stub's classes, the version of the format and the target's Hub id to a config.json."""
    config = json.loads(path.read_text(encoding="utf-8"))
    config |= {"auto_map": AUTO_MAP, FORMAT_FIELD: FORMAT_VERSION, "target_name_or_path": base_model}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def is_hub_id(name: str | None) -> bool:
    """Return whether a name is valid for a repository on the Hub."""
    try:
        validate_repo_id(name or "")
    except HFValidationError:
        return False
    return True
