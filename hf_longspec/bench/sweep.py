"""`--sweep key=v1,v2`: the values of settings that are compared, and their combinations."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

# Keys that change how the target decodes, or after what; every other key is a setting of a draft.
DECODING_KEYS: dict[str, type] = {
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "penalty": float,
    "window": int,
}
CONTEXT_KEYS = ("context", "prefill")

Point = tuple[tuple[str, Any], ...]


def parse_sweeps(texts: Sequence[str]) -> dict[str, list[str]]:
    """Split the texts into the values of each key, which are still texts.

    Raises:
        ValueError: If one is not of the form `key=v1,v2`, or a key comes twice.

    >>> parse_sweeps(["sparse_ratio=0.03,0.07", "tree_widths=4+4,1+1+1"])
    {'sparse_ratio': ['0.03', '0.07'], 'tree_widths': ['4+4', '1+1+1']}
    """
    axes: dict[str, list[str]] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        parts = [part.strip() for part in values.split(",")]
        if not equals or not key.strip() or not all(parts):
            raise ValueError(f"--sweep {text!r}: expected key=v1,v2, such as sparse_ratio=0.03,0.07.")
        if key.strip() in axes:
            raise ValueError(f"--sweep {key.strip()} is given twice: put all its values into one.")
        if len(set(parts)) < len(parts):
            raise ValueError(f"--sweep {text!r} has a value twice: name each once.")
        axes[key.strip()] = parts
    return axes


def read_value(key: str, text: str, like: Any) -> Any:
    """A value in the type of a setting's default; lists are written with `+`.

    Raises:
        ValueError: If it cannot be read so.

    >>> read_value("tree_widths", "4+4+3", [1]), read_value("sparse_ratio", "1", 0.07)
    ([4, 4, 3], 1.0)
    """
    try:
        if isinstance(like, list | tuple):
            return [int(part) for part in text.split("+")]
        if isinstance(like, bool):
            return {"true": True, "false": False}[text.lower()]
        if isinstance(like, int | float):
            return type(like)(text)
    except (ValueError, KeyError) as error:
        kind = "numbers joined by +" if isinstance(like, list | tuple) else f"a {type(like).__name__}"
        raise ValueError(f"--sweep {key}={text}: expected {kind}, such as {_written(like)}.") from error
    return text


def grid(axes: Mapping[str, Sequence[Any]]) -> list[Point]:
    """All combinations, the last key fastest; one empty point if there are no keys.

    >>> grid({"a": [1, 2], "b": ["x"]})
    [(('a', 1), ('b', 'x')), (('a', 2), ('b', 'x'))]
    """
    return [tuple(zip(axes, values, strict=True)) for values in product(*axes.values())]


def draft_points(axes: Mapping[str, Sequence[str]], defaults: Mapping[str, Any]) -> list[Point]:
    """The combinations of those keys that a draft with these settings has."""
    own = {
        key: [read_value(key, text, defaults[key]) for text in texts] for key, texts in axes.items() if key in defaults
    }
    return grid(own)


def written(point: Point) -> str:
    """A point as it is named in tables.

    >>> written((("tree_widths", [4, 4]), ("ngram_candidates", 2)))
    'tree_widths=4+4, ngram_candidates=2'
    """
    return ", ".join(f"{key}={_written(value)}" for key, value in point)


def _written(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "+".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def split_axes(axes: Mapping[str, list[str]], drafts: Mapping[str, Mapping[str, Any]]) -> tuple[dict, dict, list[str]]:
    """Axes of decoding (values read), axes of drafts (not read), values of the context.

    Args:
        drafts (`Mapping`): Settings with their defaults, by the name of the draft.

    Raises:
        ValueError: If a key is none of these and no draft has it.
    """
    decoding: dict[str, list[Any]] = {}
    of_drafts: dict[str, list[str]] = {}
    contexts: list[str] = []
    for key, texts in axes.items():
        if key in CONTEXT_KEYS:
            contexts = texts
        elif key in DECODING_KEYS:
            decoding[key] = [read_value(key, text, DECODING_KEYS[key](0)) for text in texts]
        elif any(key in settings for settings in drafts.values()):
            of_drafts[key] = texts
        else:
            had = "; ".join(f"{name} has {', '.join(sorted(settings))}" for name, settings in drafts.items())
            known = ", ".join([*CONTEXT_KEYS, *DECODING_KEYS])
            raise ValueError(f"--sweep {key}: no draft has such a setting ({had}). Take one of those, or of {known}.")
    return decoding, of_drafts, contexts
