"""Training of drafts: see [`DraftTrainer`] and docs/training.md."""

from .along import DraftAlong
from .arguments import DraftTrainingArguments
from .data import DraftCollator, TokenWindows, pack
from .trainer import DraftTrainer

__all__ = ["DraftAlong", "DraftCollator", "DraftTrainer", "DraftTrainingArguments", "TokenWindows", "pack"]
