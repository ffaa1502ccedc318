"""Conversion of drafts that the authors of a method published into the format of this package."""

from transformers import AutoConfig

from .base import DraftModel
from .loading import Checkpoint
from .longspec.convert_longspec import LONGSPEC_TARGETS, longspec_draft
from .tokenswift.convert_tokenswift import HEADS, TOKENSWIFT_TARGETS, tokenswift_draft

# Published draft -> target it was trained for.
PUBLISHED = LONGSPEC_TARGETS | TOKENSWIFT_TARGETS


def convert(source: str, target: str | None = None) -> DraftModel:
    """Convert a checkpoint of the authors of LongSpec or TokenSwift; the names of its tensors decide which.

    Args:
        source (`str`): One of the ids in `PUBLISHED`, a folder, or a weight file.
        target (`str`, *optional*):
            Id, folder or config.json of the target. Defaults to the target in `PUBLISHED`.

    Returns:
        [`DraftModel`]: The draft, in the dtype of the checkpoint.

    Raises:
        ValueError: If `source` is not published and has no target, if there are no weights, if tensors are missing or
            unknown, or if their shapes are not the target's.
    """
    if target is None and source not in PUBLISHED:
        raise ValueError(
            f"no target is known for {source!r}: pass its id or config.json. Known are {', '.join(PUBLISHED)}."
        )
    config = AutoConfig.from_pretrained(target or PUBLISHED[source])
    checkpoint = Checkpoint(source)
    has_heads = any(name.startswith(HEADS) for name in checkpoint.names)
    return tokenswift_draft(checkpoint, config) if has_heads else longspec_draft(checkpoint, config)
