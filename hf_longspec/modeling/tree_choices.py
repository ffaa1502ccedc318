"""The setting `tree_choices`: further trees, of which the gate takes the fastest."""

from typing import Any

MOST_CHOICES = 3


def other_trees(configured: Any, choices: Any, name: str) -> list[Any]:
    """Those of `choices` that are not the configured tree, each once.

    Args:
        configured: Value of the settings that make up the tree.
        choices: The setting `tree_choices`: None or a list of such values.
        name (`str`): What those settings are called.

    Raises:
        ValueError: If it is no list, or too long.

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
