"""Drafters: one idea, one class, one file."""
