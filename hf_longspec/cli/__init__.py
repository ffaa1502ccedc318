"""Commands that are run as `python -m hf_longspec.cli.<command>`."""


class CommandError(Exception):
    """Ends a command: the message is one line that names what is wrong and the remedy."""


# Facts for the model card of a draft, beside its weights.
CARD_FACTS = "card.json"
# The standard library of this Python as `--data`.
BUILTIN = "builtin"
# Before the message of a `ValueError` that a validator raised.
PYDANTIC = "Value error, "


def one_line(error: BaseException) -> str:
    """The message of an error up to the end of a sentence that ends a line, as one line; with its type if it is a word.

    >>> one_line(ValueError("no backend:\\n  a: no GPU\\n  b: too old\\nTake another.\\nIt is slow."))
    'no backend: a: no GPU; b: too old; Take another.'
    >>> one_line(KeyError("int8"))
    "KeyError: 'int8'"
    >>> one_line(ValueError("1 error for dtype:\\n  Value error, 'int8' is not a type."))
    "1 error for dtype: 'int8' is not a type."
    """
    text = ""
    for line in filter(None, map(str.strip, str(error).splitlines())):
        line = line.removeprefix(PYDANTIC)
        text += line if not text else f" {line}" if text.endswith((":", ",", ";")) else f"; {line}"
        if text.endswith((".", "?", "!")):
            break
    return text if " " in text else ": ".join(filter(None, [type(error).__name__, text]))
