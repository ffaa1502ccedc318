"""Commands that are run as `python -m hf_longspec.cli.<command>`."""


class CommandError(Exception):
    """Ends a command: the message is one line that names what is wrong and the remedy."""
