"""Training of LongSpec drafts: see [`DraftTrainer`] and docs/training.md."""

from .arguments import DraftTrainingArguments
from .collator import DraftCollator
from .packing import pack
from .token_windows import TokenWindows
from .trainer import DraftTrainer

__all__ = ["DraftCollator", "DraftTrainer", "DraftTrainingArguments", "TokenWindows", "pack"]
