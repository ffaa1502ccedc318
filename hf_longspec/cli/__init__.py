"""Commands that are run as `python -m hf_longspec.cli.<command>`."""


class CommandError(Exception):
    """Ends a command: the message is one line that names what is wrong and the remedy."""


def one_line(error: BaseException) -> str:
    """The message of an error up to the end of a sentence that ends a line, as one line; its type if it has none.

    >>> one_line(ValueError("no backend:\\n  a: no GPU\\n  b: too old\\nTake another.\\nIt is slow."))
    'no backend: a: no GPU; b: too old; Take another.'
    """
    text = ""
    for line in filter(None, map(str.strip, str(error).splitlines())):
        text += line if not text else f" {line}" if text.endswith((":", ",", ";")) else f"; {line}"
        if text.endswith((".", "?", "!")):
            break
    return text or type(error).__name__
