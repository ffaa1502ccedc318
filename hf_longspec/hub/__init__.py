"""Publish a draft as a Hub repository that transformers loads without this package.

Drafts are handled as objects and their source as text, so this room imports no other room of the package.
"""

from .repository import Card, push, write_repository

__all__ = ["Card", "push", "write_repository"]
