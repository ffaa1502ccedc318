"""Arguments, targets, prompts and timing that the benchmarks share."""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks.parts import PrefilledPrompts, prefill
from hf_longspec.bench.calls import endless
from hf_longspec.bench.progress import Progress
from hf_longspec.bench.prompts import BUILTIN, cut_windows, encode, num_disjoint, read_source
from hf_longspec.bench.results import ResultFile
from hf_longspec.bench.summaries import in_turns

RESULTS = Path(__file__).resolve().parent / "results"
HUB_CARDS = RESULTS.parents[1] / "hub_cards"
STDLIB = "stdlib"
MIN_REPEATS = 5


def parser(description: str | None, name: str, minutes: float) -> argparse.ArgumentParser:
    """Make a parser with the arguments of every benchmark.

    Args:
        description (`str`): The docstring of the benchmark.
        name (`str`): Its default result file in `benchmarks/results`.
        minutes (`float`): Its default time limit.
    """
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--minutes", type=float, default=minutes, help="time limit (default: %(default)s)")
    made.add_argument("--threads", type=int, help="default: one per core")
    output = RESULTS / f"{name}.jsonl"
    made.add_argument("--output", type=Path, default=output, help="a .jsonl file; the report goes next to it")
    made.add_argument("--quiet", action="store_true", help="no progress")
    return made


def add_repeats(made: argparse.ArgumentParser) -> None:
    """Add `--repeats`, for benchmarks that time something."""
    made.add_argument("--repeats", type=_repeats, default=MIN_REPEATS, help="turns, at least 5 (default: %(default)s)")


def add_prompts(made: argparse.ArgumentParser) -> None:
    """Add `--target` and `--data`, for benchmarks that run a real model."""
    made.add_argument(
        "--target", default=str(HUB_CARDS / "tiny-target"), help="folder or Hub id (default: %(default)s)"
    )
    made.add_argument(
        "--data",
        action="append",
        help="folder of text files that the target was not trained on, or 'stdlib' for the standard library modules "
        "that the tiny target was not trained on (default); repeatable, the prompts then alternate",
    )


def _repeats(text: str) -> int:
    if int(text) < MIN_REPEATS:
        raise argparse.ArgumentTypeError(f"{text}: a median needs at least {MIN_REPEATS} turns")
    return int(text)


def integers(text: str) -> list[int]:
    """A list such as `2048,8192`."""
    return [int(part) for part in text.split(",")]


def names(text: str) -> list[str]:
    """A list such as `float32,bfloat16`."""
    return text.split(",")


def trees(text: str) -> list[list[int]]:
    """Widths of several trees.

    >>> trees("4+4+4,1+1")
    [[4, 4, 4], [1, 1]]
    """
    return [[int(width) for width in tree.split("+")] for tree in text.split(",")]


def set_threads(threads: int | None) -> None:
    """Apply `--threads`."""
    if threads:
        torch.set_num_threads(threads)


def load_target(path: str, dtype: torch.dtype) -> PreTrainedModel:
    """A target without an end-of-text token, under transformers' `sdpa` attention.

    Raises:
        ValueError: If there is no such model.
    """
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa").eval()
    except OSError as error:
        raise ValueError(f"no model in {path!r}: pass a folder or a Hub id with --target. ({error})") from error
    return endless(model)


def load_prompts(target: str, sources: Sequence[str] | None, window: int, count: int) -> tuple[torch.Tensor, dict]:
    """Prompts `(count, window)` from every source in turn, and a description of the sources for the result file.

    A source without a text of `window` tokens is left out.

    Args:
        target (`str`): Folder or Hub id with the tokenizer.
        sources (`Sequence[str]`, *optional*): Values of `--data`.

    Raises:
        ValueError: If no source has one.
    """
    tokenizer = AutoTokenizer.from_pretrained(target)
    found, described = [], []
    for source in sources or [STDLIB]:
        documents, _ = read_source(BUILTIN if source == STDLIB else source)
        encoded = [encode(tokenizer, document.body) for document in documents]
        lengths = [len(ids) for ids in encoded]
        room = num_disjoint(lengths, window)
        described.append({"source": Path(source).name, "tokens": sum(lengths), "disjoint_windows": room})
        if max(lengths) >= window:
            found.append(encoded)
    if not found:
        raise ValueError(f"no text of {window} tokens in {sources}. Pass longer texts with --data.")
    parts = [cut_windows(documents, window, -(-count // len(found))) for documents in found]
    turns = torch.stack(parts, dim=1).flatten(0, 1)[:count]
    return turns, {"sources": described, "prompts": count, "window": window}


def prefilled(model: PreTrainedModel, tokens: torch.Tensor, progress: Progress) -> PrefilledPrompts:
    """Prefill prompts, with a line of progress for each."""
    return prefill(model, tokens, lambda index: progress.say(f"prefilled prompt {index + 1} of {len(tokens)}"))


def show(results: ResultFile, progress: Progress | None = None) -> None:
    """Print the report of a finished run."""
    if progress is not None:
        progress.stop()
    print(results.path.with_suffix(".md").read_text(encoding="utf-8"))


def time_in_turns(functions: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Call functions that return seconds in turns; a list of seconds for each, one entry per repeat."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _, name in in_turns(list(functions), repeats):
        seconds[name].append(functions[name]())
    return seconds


def seconds_of(function: Callable[[], Any]) -> float:
    """Time one call."""
    started = time.perf_counter()
    function()
    return time.perf_counter() - started
