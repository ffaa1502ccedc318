"""The long text that a demonstration continues: one that every machine has, or the user's own."""

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import CommandError

# Of the standard library, and never trained on by the tiny target (HELD_OUT in examples/train_tiny_target.py). More
# than one, because a distribution may leave the source of a module out.
DEFAULT_MODULES = ("argparse", "tarfile", "typing", "zipfile")

# A prompt is cut behind the third of at least six words, so that what follows is the rest of a sentence.
WORD = re.compile(r"\b[A-Za-z]{2,}\b")
WORDS_OF_PROSE, WORDS_KEPT = 6, 3

SHORTEST_PROMPT = 32


@dataclass(frozen=True)
class Prompt:
    """Token ids `(1, length)` of the beginning of a document, its text, and the document's name."""

    name: str
    text: str
    input_ids: torch.Tensor


def read_document(file: Path | None) -> tuple[str, str]:
    """Name and text of `file`, or of a module of the standard library.

    Raises:
        CommandError: If there is no such text.
    """
    if file is not None:
        try:
            return file.name, file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise CommandError(f"cannot read --file {file}: {reason}. Pass a text file.") from error
    for module in DEFAULT_MODULES:
        spec = importlib.util.find_spec(module)
        path = Path(spec.origin) if spec is not None and spec.origin else None
        if path is not None and path.suffix == ".py" and path.is_file():
            return f"{path.name} of the standard library", path.read_text(encoding="utf-8")
    raise CommandError(
        f"this Python comes without the sources of {', '.join(DEFAULT_MODULES)}: pass a text of your own with --file."
    )


def make_prompt(tokenizer: Any, name: str, text: str, max_tokens: int) -> Prompt:
    """At most `max_tokens` tokens from the beginning of `text`, ending in the middle of a line of words.

    Raises:
        CommandError: If the text is too short to be continued.
    """
    ids = _encode(tokenizer, text)
    if len(ids) > max_tokens:
        text = end_inside_a_line(tokenizer.decode(ids[:max_tokens], skip_special_tokens=True))
        # encoded anew: the shorter text may end in other tokens, and rarely in more of them
        ids = _encode(tokenizer, text)[:max_tokens]
    if len(ids) < SHORTEST_PROMPT:
        raise CommandError(
            f"{name} gives a prompt of {len(ids)} tokens, and {SHORTEST_PROMPT} are needed: pass a longer --file, or a "
            "larger --context."
        )
    return Prompt(name, text, torch.tensor([ids]))


def end_inside_a_line(text: str) -> str:
    """`text` up to the third word of its last complete line of at least six words; all of it if there is none."""
    lines = text.splitlines(keepends=True)
    for number in range(len(lines) - 2, 0, -1):
        words = list(WORD.finditer(lines[number]))
        if len(words) >= WORDS_OF_PROSE:
            return "".join(lines[:number]) + lines[number][: words[WORDS_KEPT - 1].end()]
    return text


def _encode(tokenizer: Any, text: str) -> list[int]:
    # verbose=False: texts longer than the model are cut by the caller, which the tokenizer would warn about
    return list(tokenizer(text, verbose=False)["input_ids"])
