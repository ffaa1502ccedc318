"""The plain loop: a draft that proposes nothing."""
