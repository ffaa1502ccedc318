"""Requests that join and leave one running batch."""

from .batcher import Batcher, Request

__all__ = ["Batcher", "Request"]
