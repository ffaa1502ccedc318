"""The fixtures of tests/training, for the training of this draft."""

from tests.training.conftest import (
    draft,
    heads,
    ligers_loss,
    make_draft,
    make_heads,
    make_trainer,
    pristine_target,
    target,
    tokens,
)

__all__ = [
    "draft",
    "heads",
    "ligers_loss",
    "make_draft",
    "make_heads",
    "make_trainer",
    "pristine_target",
    "target",
    "tokens",
]
