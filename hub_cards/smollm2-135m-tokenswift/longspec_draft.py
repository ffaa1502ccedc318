"""The classes of this draft: those of the package hf_longspec, or of a copy of it where that is not installed."""

import os
import sys
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from huggingface_hub import is_offline_mode, snapshot_download
from transformers import AutoConfig, AutoModel

PACKAGE, VERSION = "hf_longspec", "0.1.0"
# Where the copy lies: owner/name@commit on the Hub, or "." for the draft's own repository or folder.
ENGINE = "."


def find_copy(draft: Any, **hub: Any) -> str:
    """Return the folder of the copy. From the Hub, transformers puts this file into a folder named by its commit."""
    place, _, revision = (draft, "", Path(__file__).parent.name) if ENGINE == "." else ENGINE.partition("@")
    if not os.path.isdir(place):
        how: dict[str, Any] = {name: hub[name] for name in ("cache_dir", "token") if name in hub}
        how["local_files_only"] = hub.get("local_files_only") or is_offline_mode()
        place = snapshot_download(place, revision=revision, allow_patterns=f"{PACKAGE}/*", **how)
    if not os.path.isdir(os.path.join(place, PACKAGE)):
        raise ImportError(f"{place} has no copy of {PACKAGE}. Run `pip install {PACKAGE}`.")
    return os.path.abspath(place)


class DraftConfig:
    auto: Any = AutoConfig

    @classmethod
    def register_for_auto_class(cls, *_: Any) -> None:
        """Do nothing: the package writes this file beside a saved draft."""

    @classmethod
    def from_pretrained(cls, draft: Any, *args: Any, **kwargs: Any) -> Any:
        """Let the package load what transformers asks for, after it was imported."""
        try:
            import_module(PACKAGE)
        except ModuleNotFoundError as error:
            if error.name != PACKAGE:
                raise
            sys.path.append(find_copy(draft, **kwargs))
            import_module(PACKAGE).copied_from = ENGINE  # type: ignore[attr-defined]
        resolve_name(f"{PACKAGE}.modeling.saved_config:require_version")(VERSION)
        return cls.auto.from_pretrained(draft, *args, trust_remote_code=False, **kwargs)


class DraftModel(DraftConfig):
    auto = AutoModel
