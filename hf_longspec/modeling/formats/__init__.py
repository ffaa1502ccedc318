"""Formats of other projects that several drafts are read from and written in."""
