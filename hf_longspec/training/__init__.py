"""Training of drafts: see [`DraftTrainer`] and docs/training.md."""

from .arguments import DraftTrainingArguments
from .data import DraftCollator, TokenWindows, pack
from .trainer import DraftTrainer

__all__ = ["DraftCollator", "DraftTrainer", "DraftTrainingArguments", "TokenWindows", "pack"]
