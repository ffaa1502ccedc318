"""Write or upload the repository of a draft: weights, settings, code and model card."""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import HfApi

from .cards import Card, is_hub_id, render
from .flatten import flatten

PACKAGE = Path(__file__).resolve().parents[1]
CARD_FACTS = "card.json"
# Beginning of every file of code. Files with this mark that are no longer needed are removed.
MARK = "# Published with a draft by hf_longspec, "


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
        write_repository(draft, Path(folder), card or Card.read(facts), repo_id)
        api = HfApi(token=token)
        api.create_repo(repo_id, private=private, exist_ok=True)
        return api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
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


def write_repository(draft: Any, folder: Path, card: Card, repo_id: str | None = None) -> list[Path]:
    """Write the complete repository of a draft into `folder`.

    Existing files of the same names are replaced atomically. Code that an earlier call wrote and that is no longer
    needed is removed. All other files in the folder stay. The folder may be the one that the draft was loaded from.

    Args:
        draft ([`DraftModel`]): The draft to publish.
        folder (`Path`): Folder to write to; created if it does not exist.
        card ([`Card`]): Facts for the model card.
        repo_id (`str`, *optional*): `"owner/name"` for the card. Defaults to the name of the folder.

    Returns:
        `list[Path]`: The files, relative to `folder`.

    Raises:
        ValueError: If the draft cannot be published. Nothing is written then.
    """
    _check(draft)
    full = card.complete(draft, repo_id or folder.name)
    texts = draft_code(draft) | {"README.md": render(draft, full), CARD_FACTS: _facts(card)}
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder, prefix=".publish-") as temporary:
        built = Path(temporary)
        draft.save_pretrained(built)
        for file in built.glob("*.py"):  # of a draft that was loaded as remote code
            file.unlink()
        _complete_config(built / "config.json", draft, str(full.base_model))
        for name, text in texts.items():
            (built / name).parent.mkdir(exist_ok=True)
            (built / name).write_text(text, encoding="utf-8", newline="\n")
        files = sorted(path.relative_to(built) for path in built.rglob("*") if path.is_file())
        _remove_stale(folder, files)
        for file in files:
            (folder / file).parent.mkdir(exist_ok=True)
            os.replace(built / file, folder / file)
    return files


def draft_code(draft: Any) -> dict[str, str]:
    """Return the sources of the draft's class and configuration and custom_generate/generate.py, by file name.

    Raises:
        ValueError: If a class is not defined in a file of a package, or an import cannot be followed.
    """
    sources: dict[str, str] = {}
    for cls in (type(draft), type(draft.config)):
        file = _file_of(cls)
        sources |= flatten(file, PACKAGE if file.is_relative_to(PACKAGE) else file.parent, PACKAGE.name)
    sources["custom_generate/generate.py"] = Path(__file__).with_name("generate.py").read_text(encoding="utf-8")
    return {name: text if text.startswith(MARK) else _marked(text) for name, text in sources.items()}


def _marked(text: str) -> str:
    return f"{MARK}Apache-2.0.\n{text}"


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


def _complete_config(path: Path, draft: Any, base_model: str) -> None:
    """Add the files of the draft's classes and the target's Hub id to a config.json."""
    config = json.loads(path.read_text(encoding="utf-8"))
    names = {"AutoConfig": type(draft.config), "AutoModel": type(draft)}
    config["auto_map"] = {name: f"{_file_of(cls).stem}.{cls.__name__}" for name, cls in names.items()}
    config["target_name_or_path"] = base_model
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _facts(card: Card) -> str:
    """Return the given facts as JSON, without the acceptance table, which is made from a results file each time."""
    given = {name: value for name, value in asdict(card).items() if value and name != "acceptance"}
    return json.dumps(given, indent=2) + "\n"


def _remove_stale(folder: Path, files: list[Path]) -> None:
    for path in folder.glob("*.py"):
        if path.relative_to(folder) not in files and path.read_text(encoding="utf-8").startswith(MARK):
            path.unlink()
