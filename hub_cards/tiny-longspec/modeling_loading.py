# Published with a draft by hf_longspec, Apache-2.0.
"""A draft's files: its settings, and what may be wrong, said in one line instead of what torch and safetensors say."""

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from safetensors import SafetensorError
from transformers import GenerationConfig

# Arguments of `from_pretrained` that say where files come from.
HUB_KWARGS = {"revision", "cache_dir", "token", "local_files_only", "subfolder", "force_download", "proxies"}


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


def read_settings(draft: Any, path: Any, **hub: Any) -> None:
    """Give a draft the settings it was saved with; the defaults stand where there are none.

    Args:
        hub: Those of `HUB_KWARGS` that were given.

    Raises:
        OSError: If generation_config.json cannot be read.
    """
    try:
        draft.generation_config = GenerationConfig.from_pretrained(path, **hub)
    except OSError as error:
        if _is_malformed(error):
            raise
        # the repo has no generation_config.json
    for name, value in copy.deepcopy(draft.settings).items():
        if not hasattr(draft.generation_config, name):  # published before there was such a setting
            setattr(draft.generation_config, name, value)


def _is_malformed(error: OSError) -> bool:
    """Whether transformers found a JSON file and could not read it, as opposed to finding none."""
    return isinstance(error.__context__, json.JSONDecodeError | UnicodeDecodeError)
