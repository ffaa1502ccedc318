"""Conversion of drafts that the authors of a method published into the format of this package."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from transformers import AutoConfig, PreTrainedConfig

from .base import DraftModel
from .loading import Checkpoint
from .register_draft import DRAFTS


@dataclass(frozen=True)
class Converter:
    """How checkpoints of a method's authors become drafts. A registered draft names its converter.

    Args:
        published (`Mapping[str, str]`): Id of each published draft, and of the target that it was trained for.
        marker (`str`): A part of a tensor's name that only checkpoints of this method have.
        draft (`Callable`): Function of the [`Checkpoint`] and the config of the target that returns the draft.
    """

    published: Mapping[str, str]
    marker: str
    draft: Callable[[Checkpoint, PreTrainedConfig], DraftModel]


def converters() -> list[Converter]:
    """Return the converters of all registered drafts."""
    return [draft.load("convert") for draft in DRAFTS.values() if draft.convert is not None]


def published_targets() -> dict[str, str]:
    """Return the target of each published draft, by the id of the draft."""
    return {source: target for converter in converters() for source, target in converter.published.items()}


def convert(source: str, target: str | None = None) -> DraftModel:
    """Convert a checkpoint of the authors of a method; the names of its tensors decide which.

    Args:
        source (`str`): Id of a published draft, a folder, or a weight file.
        target (`str`, *optional*):
            Id, folder or config.json of the target. Defaults to the target of the published draft.

    Returns:
        [`DraftModel`]: The draft, in the dtype of the checkpoint.

    Raises:
        ValueError: If `source` is not published and has no target, if there are no weights, if the tensors are of no
            method, missing or unknown, or if their shapes are not the target's.
    """
    known = published_targets()
    if target is None and source not in known:
        raise ValueError(
            f"no target is known for {source!r}: pass its id or config.json. Known are {', '.join(known)}."
        )
    config = AutoConfig.from_pretrained(target or known[source])
    checkpoint = Checkpoint(source)
    for converter in converters():
        if any(converter.marker in name for name in checkpoint.names):
            return converter.draft(checkpoint, config)
    markers = " or ".join(repr(converter.marker) for converter in converters())
    raise ValueError(
        f"{source} is no checkpoint of a known method: the name of a tensor contains {markers} there. Pass a "
        "checkpoint as the authors' training writes it."
    )
