"""The run that every benchmark writes to, its clocks, and the arguments, targets and prompts that benchmarks share.

Nothing here imports an optional package before it is needed: `gpu.py` runs with torch, triton and transformers alone.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks.pages import PAGES
from hf_longspec.bench.calls import PrefilledPrompts, endless, prefill
from hf_longspec.bench.machine import git_commit
from hf_longspec.bench.prompts import BUILTIN, cut_windows, encode, num_disjoint, read_source
from hf_longspec.bench.report import summarize
from hf_longspec.bench.results import Record, ResultFile, in_turns

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
HUB_CARDS = ROOT / "hub_cards"
STDLIB = "stdlib"
MIN_REPEATS = 5


class Run(ResultFile):
    """The result file of a benchmark, with its progress. A context manager.

    The report is written beside the file at the end, also after an interruption.

    Args:
        benchmark (`str`): Name of the benchmark in `benchmarks/pages.py`.
        quiet (`bool`, *optional*): Show no progress on standard error.
        options: The other arguments of [`ResultFile`].
    """

    report_every = math.inf

    def __init__(
        self,
        path: Path,
        benchmark: str,
        seconds: float,
        settings: Mapping[str, Any] | None = None,
        *,
        quiet: bool = False,
        facts: Mapping[str, Any] | None = None,
        **options: Any,
    ):
        self.quiet = quiet
        facts = {"commit": git_commit() or "unknown"} | dict(facts or {})
        super().__init__(path, benchmark, PAGES[benchmark].report, seconds, settings or {}, facts, **options)

    def skip(self, reason: str, **what: Any) -> None:
        """Add a line about a measurement that was left out."""
        super().skip(reason, **what)
        self.say(f"left out, {reason}: {', '.join(map(str, what.values()))}")

    def has_time(self, expected: float = 0.0, **what: Any) -> bool:
        """Return whether `expected` seconds are left; if not, add a line with the reason."""
        if self.fits(expected):
            return True
        needed = f"it would take {expected:.0f} s and {self.left:.0f} s are left"
        self.skip(needed if self.left else "no time left", **what)
        return False

    def say(self, text: str) -> None:
        """Show the present task, with the time since the start."""
        if not self.quiet:
            minutes, seconds = divmod(int(self.elapsed), 60)
            print(f"[{minutes:3d}:{seconds:02d}] {text}", file=sys.stderr, flush=True)

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        super().__exit__(kind, *error)
        if kind is None:
            print(self._report(self.records))


def time_in_turns(functions: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Call functions that return their seconds in turns, each repeat beginning with another one; a list for each."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _, name in in_turns(list(functions), repeats):
        seconds[name].append(functions[name]())
    return seconds


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> dict[str, float]:
    """Summary of the ratios of values that were measured side by side.

    >>> ratios([2.0, 4.0, 9.0], [1.0, 2.0, 3.0])["median"]
    2.0
    """
    return summarize([a / b for a, b in zip(numerators, denominators, strict=True)])


class Skip(Exception):
    """The reason for leaving a measurement out; becomes a `skipped` line."""


@dataclass(frozen=True)
class Timing:
    """The time of a call that does the same work every time."""

    milliseconds: list[float]  # one entry per repeat
    # "graph" (replay of a CUDA graph), "events" (calls between CUDA events, launches included), or "wall" (the clock of
    # the host)
    how: str
    note: str | None = None  # why it is not "graph"

    @property
    def median(self) -> float:
        """Milliseconds."""
        return statistics.median(self.milliseconds)

    def scaled(self, count: int) -> "Timing":
        """One of `count` equal parts of the call."""
        return Timing([value / count for value in self.milliseconds], self.how, self.note)

    def to_dict(self) -> Record:
        """For JSON."""
        found: Record = {"ms": summarize(self.milliseconds), "how": self.how}
        return found if self.note is None else found | {"note": self.note}


# Calls that a timing makes at least, the warm-up included.
FEWEST_CALLS = 12


def time_call(
    function: Callable[[], object], device: torch.device, *, graph: bool = True, ms: float = 100.0, limit: float = 6.0
) -> Timing:
    """Time a function: on a GPU by `triton.testing`, on a processor by `torch.utils.benchmark`.

    Args:
        function (`Callable`): Reads nothing back from the device if it is to be captured.
        graph (`bool`, *optional*, defaults to `True`): Replay it from a CUDA graph where that can be done.
        ms (`float`, *optional*, defaults to 100): Milliseconds that the repeats take together.
        limit (`float`, *optional*, defaults to 6): Seconds that the whole measurement may take.

    Raises:
        Skip: If one call takes so long that the measurement would not end in time.
    """
    once = min(_seconds_until_done(function, device) for _ in range(2))  # the first may compile
    if once * FEWEST_CALLS > limit:
        raise Skip(f"one call takes {once * 1e3:.0f} ms, and {FEWEST_CALLS} do not fit into {limit:.1f} s")
    if device.type != "cuda":
        from torch.utils.benchmark import Timer

        timer = Timer("function()", globals={"function": function}, num_threads=torch.get_num_threads())
        return Timing([seconds * 1e3 for seconds in timer.blocked_autorange(min_run_time=ms / 1e3).times], "wall")
    from triton.testing import do_bench, do_bench_cudagraph

    note = None
    if graph:
        torch.cuda.empty_cache()  # a graph has memory of its own
        try:
            return Timing(do_bench_cudagraph(function, rep=ms / 5, return_mode="all"), "graph")
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # such as a function that reads from the device
            torch.cuda.synchronize()
            note = f"not captured: {str(error).splitlines()[0]}"
    return Timing(do_bench(function, rep=ms, return_mode="all"), "events", note)


def _seconds_until_done(function: Callable[[], object], device: torch.device) -> float:
    started = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def parser(
    description: str | None, name: str, minutes: float, repeats: int | None = None, prompts: bool = False
) -> argparse.ArgumentParser:
    """Make a parser with the arguments of every benchmark.

    Args:
        description (`str`): The docstring of the benchmark.
        name (`str`): Its default result file in `benchmarks/results`.
        minutes (`float`): Its default time limit.
        repeats (`int`, *optional*): Default of `--repeats`, for benchmarks that time something.
        prompts (`bool`, *optional*): Add `--target` and `--data`, for benchmarks that run a real model.
    """
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--minutes", type=float, default=minutes, help="time limit (default: %(default)s)")
    made.add_argument("--threads", type=int, help="default: one per core")
    output = RESULTS / f"{name}.jsonl"
    made.add_argument("--output", type=Path, default=output, help="a .jsonl file; the report goes next to it")
    made.add_argument("--quiet", action="store_true", help="no progress")
    if repeats is not None:
        made.add_argument("--repeats", type=_repeats, default=repeats, help="turns, at least 5 (default: %(default)s)")
    if prompts:
        add_prompts(made)
    return made


def add_prompts(made: argparse.ArgumentParser) -> None:
    """Add `--target` and `--data`."""
    made.add_argument(
        "--target", default=str(HUB_CARDS / "tiny-target"), help="folder or Hub id (default: %(default)s)"
    )
    made.add_argument(
        "--data",
        action="append",
        help="folder of text files that the target was not trained on, or 'stdlib' for the standard library modules "
        "that the tiny target was not trained on (default); repeatable, the prompts then alternate",
    )


def start(args: argparse.Namespace, benchmark: str, settings: Mapping[str, Any], **options: Any) -> Run:
    """Apply `--threads` and begin the run; `options` are those of [`Run`]."""
    if args.threads:
        torch.set_num_threads(args.threads)
    return Run(args.output, benchmark, args.minutes * 60, settings, quiet=args.quiet, **options)


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
    """Prompts `(count, window)` from every source in turn, and the settings for the result file that describe them.

    A source without a text of `window` tokens is left out.

    Args:
        target (`str`): Folder or Hub id with the tokenizer.
        sources (`Sequence[str]`, *optional*): Values of `--data`.

    Raises:
        ValueError: If no source has one.
    """
    tokenizer, config = AutoTokenizer.from_pretrained(target), AutoConfig.from_pretrained(target).get_text_config()
    found, described = [], []
    for source in sources or [STDLIB]:
        documents = read_source(BUILTIN if source == STDLIB else source)
        encoded = [encode(tokenizer, document.text) for document in documents]
        lengths = [len(ids) for ids in encoded]
        room = num_disjoint(lengths, window)
        described.append({"source": Path(source).name, "tokens": sum(lengths), "disjoint_windows": room})
        if max(lengths) >= window:
            found.append(encoded)
    if not found:
        raise ValueError(f"no text of {window} tokens in {sources}. Pass longer texts with --data.")
    parts = [cut_windows(documents, window, -(-count // len(found))) for documents in found]
    turns = torch.stack(parts, dim=1).flatten(0, 1)[:count]
    named = f"{Path(target).name}, {config.num_hidden_layers} layers"
    return turns, {"target": named, "sources": described, "prompts": count, "window": window}


def prefilled(model: PreTrainedModel, tokens: torch.Tensor, run: Run) -> PrefilledPrompts:
    """Prefill prompts, with a line of progress for each."""
    return prefill(model, tokens, lambda index: run.say(f"prefilled prompt {index + 1} of {len(tokens)}"))
