"""Commands that are run as `python -m hf_longspec.cli.<command>`."""


class CommandError(Exception):
    """Ends a command: the message is one line that names what is wrong and the remedy."""


def first_line(error: BaseException) -> str:
    """The message of an error as one line; its type if it has none."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
