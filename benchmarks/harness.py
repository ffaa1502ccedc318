"""The clocks, arguments, targets, drafts and prompts that benchmarks share.

Nothing here imports an optional package before it is needed: `gpu.py` runs with torch, triton and transformers alone.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks.decoder import PrefilledPrompts, prefill
from benchmarks.runner import Run
from hf_longspec.cli import BUILTIN
from hf_longspec.cli.measuring import endless, rotated, summarize
from hf_longspec.cli.texts import cut_windows, encode, read_source
from hf_longspec.modeling.register_draft import preset_of, weightless_drafts

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
HUB_CARDS = ROOT / "hub_cards"
STDLIB = "stdlib"
MIN_REPEATS = 5


def time_in_turns(functions: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Call functions that return their seconds in turns, each repeat beginning with another one; a list for each."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(repeats):
        for name in rotated(list(functions), turn):
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


def parser(
    description: str | None, name: str, minutes: float, repeats: int | None = None, prompts: bool = False
) -> argparse.ArgumentParser:
    """Make a parser with the arguments of every benchmark; `name` is that of its default result file.

    `repeats` is for benchmarks that time something, `prompts` for those that run a real model.
    """
    arguments = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--minutes", type=float, default=minutes, help="time limit (default: %(default)s)")
    arguments.add_argument("--threads", type=int, help="default: one per core")
    output = RESULTS / f"{name}.jsonl"
    arguments.add_argument("--output", type=Path, default=output, help="a .jsonl file; the report goes next to it")
    arguments.add_argument("--quiet", action="store_true", help="no progress")
    if repeats is not None:
        arguments.add_argument(
            "--repeats", type=_repeats, default=repeats, help="turns, at least 5 (default: %(default)s)"
        )
    if prompts:
        arguments.add_argument(
            "--target", default=str(HUB_CARDS / "tiny-target"), help="folder or Hub id (default: %(default)s)"
        )
        arguments.add_argument(
            "--data",
            action="append",
            help="folder of text files that the target was not trained on, or 'stdlib' for the standard library "
            "modules that the tiny target was not trained on (default); repeatable, the prompts then alternate",
        )
    return arguments


def start(
    args: argparse.Namespace,
    benchmark: str,
    settings: Mapping[str, Any],
    make: Callable[..., Any] = Run,
    **options: Any,
) -> Any:
    """Apply `--threads` and begin the run; `options` are those of [`Run`], or of another class in `make`."""
    if args.threads:
        torch.set_num_threads(args.threads)
    return make(args.output, benchmark, args.minutes * 60, settings, quiet=args.quiet, **options)


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


def load_target(path: str, dtype: torch.dtype) -> PreTrainedModel:
    """A target without an end-of-text token, under `sdpa` attention; ValueError if there is no such model."""
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa").eval()
    except OSError as error:
        raise ValueError(f"no model in {path!r}: pass a folder or a Hub id with --target. ({error})") from error
    return endless(model)


def load_prompts(target: str, sources: Sequence[str] | None, window: int, count: int) -> tuple[torch.Tensor, dict]:
    """Prompts `(count, window)` from every source in turn, and the settings for the result file that describe them.

    A source without a text of `window` tokens is left out; ValueError if no source has one.
    """
    tokenizer, config = AutoTokenizer.from_pretrained(target), AutoConfig.from_pretrained(target).get_text_config()
    corpora, origins = [], []
    for source in sources or [STDLIB]:
        documents = read_source(BUILTIN if source == STDLIB else source)
        encoded = [encode(tokenizer, document) for document in documents]
        lengths = [len(ids) for ids in encoded]
        room = sum(length // window for length in lengths)
        origins.append({"source": Path(source).name, "tokens": sum(lengths), "disjoint_windows": room})
        if max(lengths) >= window:
            corpora.append(encoded)
    if not corpora:
        raise ValueError(f"no text of {window} tokens in {sources}. Pass longer texts with --data.")
    parts = [cut_windows(documents, window, -(-count // len(corpora))) for documents in corpora]
    turns = torch.stack(parts, dim=1).flatten(0, 1)[:count]
    target_name = f"{Path(target).name}, {config.num_hidden_layers} layers"
    return turns, {"target": target_name, "sources": origins, "prompts": count, "window": window}


def open_draft(name: str, model: PreTrainedModel) -> Any:
    if (made := weightless_drafts().get(name)) is not None:
        return made.from_target(model, **preset_of(name))
    return AutoModel.from_pretrained(name, dtype=model.dtype)


def prefilled(model: PreTrainedModel, tokens: torch.Tensor, run: Run) -> PrefilledPrompts:
    return prefill(model, tokens, lambda index: run.say(f"prefilled prompt {index + 1} of {len(tokens)}"))
