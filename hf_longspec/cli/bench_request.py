"""What `hf-longspec bench` was asked for."""

import re
from dataclasses import dataclass
from pathlib import Path

import torch

from ..bench.document_prompts import OWN_LENGTH
from . import CommandError, models

OWN = "own"


@dataclass(frozen=True)
class Request:
    """What was asked for; see the options of the command."""

    target: str
    drafts: tuple[str, ...]
    data: str
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    dtypes: tuple[str, ...]
    assistant: str | None
    sweeps: tuple[str, ...]
    analyse: bool
    tokens: int
    repeats: int
    temperature: float
    lookup_tokens: int
    minutes: float | None
    output: Path
    resume: bool
    plots: bool
    as_json: bool


def lengths(option: str, text: str) -> tuple[int, ...]:
    """Numbers such as `512,2k`; `own` is 0.

    Raises:
        CommandError: If one is none.

    >>> lengths("--context", "512,2k,own")
    (512, 2048, 0)
    """
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(k?)", part.strip().lower())
        if part.strip() == OWN and option == "--context":
            found.append(OWN_LENGTH)
        elif match and int(match[1]):
            found.append(int(match[1]) * (1024 if match[2] else 1))
        else:
            raise CommandError(f"{option} {part!r}: expected numbers of at least 1, such as 512 or 2k (2048).")
    return tuple(dict.fromkeys(found))


def dtypes(text: str) -> tuple[str, ...]:
    """Names of types; auto is bfloat16 on a GPU and float32 on a CPU.

    Raises:
        CommandError: If one is unknown.
    """
    if text == "auto":
        return ("bfloat16" if torch.cuda.is_available() else "float32",)
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    if unknown := [name for name in names if name not in models.DTYPES]:
        raise CommandError(f"--dtype {','.join(unknown)}: expected auto, or some of {', '.join(models.DTYPES)}.")
    return names
