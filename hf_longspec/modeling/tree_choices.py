"""The setting `tree_choices`: further trees from which the gate chooses the fastest."""

from typing import Any

MOST_CHOICES = 3


def other_trees(configured: Any, choices: Any, name: str) -> list[Any]:
    """Return the `choices` that differ from the configured tree, without duplicates.

    Args:
        configured (`Any`): Value of the settings that make up the tree.
        choices (`list[Any]`, *optional*): The setting `tree_choices`, a list of such values.
        name (`str`): Name of these settings, for the message.

    Raises:
        ValueError: If `choices` is not a list, or has more than `MOST_CHOICES` entries.

    >>> other_trees([4, 2], [[1, 1], [4, 2], [1, 1]], "tree_widths"), other_trees(4, None, "num_assistant_tokens")
    ([[1, 1]], [])
    """
    if choices is None:
        return []
    if not isinstance(choices, list | tuple) or len(choices) > MOST_CHOICES:
        raise ValueError(
            f"tree_choices={choices!r}: expected None, or a list of at most {MOST_CHOICES} other values of {name}. The "
            "gate begins with the configured one and takes the fastest."
        )
    found: list[Any] = []
    for choice in choices:
        value = list(choice) if isinstance(choice, list | tuple) else choice
        if value != configured and value not in found:
            found.append(value)
    return found
