"""The fixtures of tests/training, for the training of this draft."""

from tests.training.conftest import draft, ligers_loss, make_draft, make_trainer, pristine_target, target, tokens

__all__ = ["draft", "ligers_loss", "make_draft", "make_trainer", "pristine_target", "target", "tokens"]
