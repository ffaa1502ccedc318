"""Mutations of training."""

# fmt: off
ROWS = (
    ("Tokens after the anchors are shifted by the offset", "training/row_noise.py",
     "* (places >= anchors)", "", "tests/training/test_training_longspec.py"),
    ("Tokens that do not count add nothing to the loss", "training/frozen_target.py",
     "weight = counts[level, chunk].to(wide)", "weight = torch.ones_like(losses)", "tests/training/test_losses.py"),
)
