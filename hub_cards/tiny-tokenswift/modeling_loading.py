# Published with a draft by hf_longspec, Apache-2.0.
"""What a draft's files may have wrong, said in one line instead of what torch and safetensors say of it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from safetensors import SafetensorError


@contextmanager
def readable_errors(path: Any) -> Iterator[None]:
    """Name the folder and the remedy where weights cannot be loaded.

    Raises:
        OSError: If a file is cut short or is no safetensors file.
        ValueError: If the weights have other shapes than the configuration says.
    """
    try:
        yield
    except SafetensorError as error:
        raise OSError(
            f"the weights in {path} cannot be read ({error}): the file is cut short, or is no safetensors file. "
            "Download or save the draft again."
        ) from error
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        raise ValueError(
            f"the weights in {path} do not have the shapes that its config.json says. Take both files from the same "
            "draft."
        ) from error


def require_complete(path: Any, missing: Any, vocab_size: int) -> None:
    """Refuse a draft some of whose weights would be random, or that does not say its vocabulary.

    Raises:
        ValueError: With the first names that are missing.
    """
    if missing:
        names = ", ".join(sorted(missing)[:3])
        raise ValueError(
            f"{path} lacks {len(missing)} of this draft's weights ({names}...), which would be random. Take its files "
            "from one draft, or begin a new one with from_target(target)."
        )
    if vocab_size < 1:
        raise ValueError(f"config.json in {path} has vocab_size={vocab_size}: expected the target's, at least 1.")


def is_malformed(error: OSError) -> bool:
    """Whether transformers found a JSON file and could not read it, as opposed to finding none."""
    return isinstance(error.__context__, json.JSONDecodeError | UnicodeDecodeError)
