"""The registry of drafts: one call makes a draft known to `AutoModel`, the trainer, the commands and the model cards.

It also converts checkpoints that the authors of a method published: the names of their tensors decide who reads them.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pkgutil import resolve_name
from typing import Any
from weakref import WeakKeyDictionary

from transformers import CONFIG_MAPPING, AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel

from ..generation.route import loaders
from .base import DraftModel
from .configuration_base import DraftConfig
from .loading import WEIGHT_FILES, Checkpoint
from .saved_config import read_config, readable


@dataclass(frozen=True)
class RegisteredDraft:
    """A row of the registry. Its optional parts are named as `"module:attribute"` and imported when they are used."""

    config: type[DraftConfig]
    model: type[DraftModel]
    training: str | None = None  # a [`TrainingMethod`]
    convert: str | None = None  # a [`Converter`] of the checkpoints that the authors of the method published
    card: str | None = None  # template of the model card as `"package:file.md"`, needed to publish the draft
    # a function of the contents of a config.json: whether `from_pretrained(path, target=)` of the draft reads this
    # checkpoint of another project, by `convert`
    reads: str | None = None
    aliases: tuple[str, ...] = ()  # further names on the command line, for drafts without weights
    presets: dict[str, dict[str, Any]] = field(default_factory=dict)  # likewise, with the settings they stand for

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the draft on the command line: the short name of its config, its aliases, and its presets."""
        return self.config.short_name(), *self.aliases, *self.presets

    def load(self, role: str) -> Any:
        """Import the object that the registration names as `"training"`, `"convert"` or `"reads"`."""
        return resolve_name(getattr(self, role))

    def card_template(self) -> str:
        """Return the text of the draft's part of the model card, or refuse a draft that was registered without one."""
        if self.card is None:
            raise ValueError(
                f"{self.model.__name__} was registered without a model card: pass card='package:file.md' to "
                "register_draft."
            )
        package, _, file = self.card.partition(":")
        return files(package).joinpath(file).read_text(encoding="utf-8")


# By `config.model_type`, in the order of registration.
DRAFTS: dict[str, RegisteredDraft] = {}


def register_draft(config: type[DraftConfig], model: type[DraftModel], **parts: Any) -> None:
    """Register a draft under the `model_type` of its config, with the optional parts of a [`RegisteredDraft`].

    `AutoConfig` and `AutoModel` load it from then on, and so do the commands. A draft without weights can also be given
    to the commands by its name, which is its `model_type`. Registering a `model_type` again replaces the former draft.
    Names that are taken are refused.
    """
    kind = config.model_type
    draft = RegisteredDraft(config, model, **parts)
    if kind in CONFIG_MAPPING and CONFIG_MAPPING[kind].__module__.startswith("transformers."):
        raise ValueError(
            f"model_type={kind!r} belongs to a model of transformers: choose another one for {config.__name__}."
        )
    owners = {name: other.model for key, other in DRAFTS.items() if key != kind for name in other.names}
    if both := sorted(owners.keys() & set(draft.names)):
        raise ValueError(
            f"the name {both[0]!r} belongs to {owners[both[0]].__name__}: choose another model_type or other aliases "
            f"for {model.__name__}."
        )
    AutoConfig.register(kind, config, exist_ok=True)
    AutoModel.register(config, model, exist_ok=True)
    DRAFTS[kind] = draft


def weightless_drafts() -> dict[str, type[DraftModel]]:
    """Return the drafts that need no training, by their names on the command line."""
    return {name: draft.model for draft in DRAFTS.values() if draft.model.weightless for name in draft.names}


def preset_of(name: str) -> dict[str, Any]:
    """Return the settings that a name of a draft without weights stands for; none for most."""
    return next((draft.presets[name] for draft in DRAFTS.values() if name in draft.presets), {})


def draft_class_of(config: dict[str, Any]) -> type[DraftModel] | None:
    """Return the draft whose `from_pretrained(path, target=)` reads a checkpoint with this config.json, or `None`.

    It is that of a saved draft, or one that reads checkpoints of other projects.
    """

    def reader(fields: dict[str, Any]) -> type[DraftModel] | None:
        known = (draft for draft in DRAFTS.values() if draft.reads is not None)
        return next((draft.model for draft in known if draft.load("reads")(fields)), None)

    if (kind := config.get("model_type")) in DRAFTS:
        return DRAFTS[kind].model
    with readable("config.json", config, reader):
        return reader(config)


# Drafts that calls gave by their names, for each target.
_named: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()


def draft_by_name(name: str | os.PathLike | type, target: Any, or_none: bool = False) -> Any:
    """Return the draft of a folder or Hub id, loaded once for each target. No code of a repository is run.

    A repository that is no draft is refused, or with `or_none` the result is `None`.
    """
    if isinstance(name, type):
        raise ValueError(
            f"assistant_model is the class {name.__name__}. Pass a draft, such as "
            "SpecAttnDraftModel.from_target(model)."
        )
    drafts = _named.setdefault(target, {})
    if (name := os.fspath(name)) not in drafts:
        try:
            config = read_config(name)
        except OSError as error:
            raise OSError(
                f"assistant_model={name!r} cannot be loaded ({str(error).splitlines()[0]}). Pass a draft, or the "
                "folder or Hub id of a saved or published one."
            ) from error
        if (draft := draft_class_of(config)) is None:
            if or_none:
                return None
            raise ValueError(
                f"assistant_model={name!r} has model_type={config.get('model_type')!r} and is not a draft. For a small "
                "language model, pass AssistantDraftModel.from_pretrained(name, target=model)."
            )
        drafts[name] = draft.from_pretrained(name, target=target, trust_remote_code=False)
    return drafts[name]


loaders.append(draft_by_name)


@dataclass(frozen=True)
class Converter:
    """How checkpoints of a method's authors become drafts. A registered draft names its converter."""

    published: Mapping[str, str]  # id of each published draft, and of the target that it was trained for
    marker: str  # regular expression of a part of a tensor's name that only checkpoints of this method have
    # function of the [`Checkpoint`], the target or its config or `None`, and optionally a dtype in place of that of the
    # checkpoint, that returns the draft
    draft: Callable[..., DraftModel]
    formats: Sequence[str] = WEIGHT_FILES  # names of weight files that `from_pretrained` reads, the preferred one first


def read_published(
    kind: str, source: Any, target: PreTrainedModel | PreTrainedConfig | None, dtype: Any = None, **hub: Any
) -> DraftModel | None:
    """Return a checkpoint of another project as a draft of this `model_type`; `None` if no such draft reads any.

    Args:
        kind (`str`): The `model_type` of the draft.
        source (`str` or `os.PathLike`): Folder or Hub id.
        target (`PreTrainedModel` or `PreTrainedConfig`, *optional*): The target, whose facts the draft records.
        dtype (`torch.dtype` or `str`, *optional*): Type of the weights; that of the checkpoint by default.
        hub (`Any`): Arguments of transformers for the Hub.

    Raises:
        OSError: If there is no config.json.
        ValueError: If it is no draft of this kind, or its files do not fit together or to the target.
    """
    if kind not in DRAFTS or DRAFTS[kind].reads is None:
        return None
    converter: Converter = DRAFTS[kind].load("convert")
    checkpoint = Checkpoint(str(source), converter.formats, **hub)
    with readable(f"config.json of {source}"):
        return converter.draft(checkpoint, target, dtype)


def convert(source: str, target: str | None = None) -> DraftModel:
    """Convert a checkpoint of a method's authors, in its dtype; the names of its tensors decide which method it is.

    Args:
        source (`str`): Id of a published draft, a folder, or a weight file.
        target (`str`, *optional*): Id, folder or config.json of the target. Defaults to that of the published draft.

    Tensors that are missing, unknown or of other shapes than the target's are refused.
    """
    converters: list[Converter] = [draft.load("convert") for draft in DRAFTS.values() if draft.convert is not None]
    targets = {name: own for converter in converters for name, own in converter.published.items()}
    if target is None and source not in targets:
        raise ValueError(
            f"the target of {source!r} is unknown, and it is none of the {len(targets)} drafts whose targets are "
            "known. Pass the target, its id or config.json."
        )
    config = AutoConfig.from_pretrained(target or targets[source])
    checkpoint = Checkpoint(source)
    for converter in converters:
        if any(re.search(converter.marker, name) for name in checkpoint.names):
            return converter.draft(checkpoint, config)
    markers = " or ".join(repr(converter.marker) for converter in converters)
    raise ValueError(
        f"{source} is not a checkpoint of a known method: no tensor name contains {markers}. Pass a checkpoint in the "
        "format of the authors' training code."
    )
