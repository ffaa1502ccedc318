"""Mutations of training."""

# fmt: off
ROWS = (
    ("Tokens after the anchors are shifted by the offset", "training/row_noise.py",
     "* (places >= anchors)", "", "tests/training/test_training_longspec.py"),
    ("Tokens that do not count add nothing to the loss", "training/losses.py",
     "losses @ counts.to(losses.dtype)", "losses.sum()", "tests/training/test_losses.py"),
)
