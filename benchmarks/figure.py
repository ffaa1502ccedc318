"""Every kind of draft on one target: tau, the cost of an iteration and the speed-up, versus the length of the context.

    make figure
    python -m benchmarks.figure --preset full --output runs/figure.jsonl --resume

The short form has the usual settings of each draft. `full` also has other settings, drafts that were trained
otherwise, batches of four, and bfloat16 where the processor has it. The report and the figures are written at the end.
benchmarks/README.md describes the method, and benchmarks/suites/figure.yaml has the cells and the systems.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks import harness
from benchmarks.decoder import Decoder, Method, PrefilledPrompts, prefill
from benchmarks.figure_report import SUITE, draw
from hf_longspec.cli.files import Record
from hf_longspec.cli.measuring import HF, PLAIN, HfMethod, Measurement, endless, rotated, significant
from hf_longspec.modeling.register_draft import weightless_drafts

WARM_UP_TOKENS = 8
# Drafts outside of the package, by their names in the suite.
EXAMPLES = {
    "quest": "examples.drafts.quest:QuestDraftModel",
    "token_recycling": "examples.drafts.token_recycling:TokenRecyclingDraftModel",
}
# Drafts that only comparisons use: trained with one thing left out, or other heads.
VARIANTS = Path(__file__).parent / "drafts"


@dataclass(frozen=True)
class Part:
    """Cells of a run that have the same type, batch size, prompts and systems."""

    contexts: tuple[int, ...]
    prompts: int
    dtype: str = "float32"
    batch: int = 1
    systems: tuple[str, ...] = ()  # names or groups of them, all by default; the two baselines always belong to them

    def has(self, name: str) -> bool:
        named = {system for group in self.systems for system in SUITE["groups"].get(group, [group])}
        return not named or name in (HF, PLAIN) or name in named

    def calls(self, methods: Sequence[Method], modes: Sequence[str], block: range) -> Iterator[tuple[Record, Method]]:
        """Yield the place and the method of each call whose prompts all lie in a block."""
        # transformers looks tokens up, or takes them from an assistant, for one row alone
        usable = [one for one in methods if self.batch == 1 or not getattr(one.how, "options", None)]
        chosen = [method for method in usable if self.has(method.name)]
        for turn in range(block.start // self.batch, min(block.stop, self.prompts) // self.batch):
            for context, mode, method in product(self.contexts, modes, rotated(chosen, turn)):
                place = {"dtype": self.dtype, "mode": mode, "context": context, "batch": self.batch}
                yield place | {"system": method.name, "turn": turn}, method


def systems(model: PreTrainedModel, cards: Path) -> tuple[list[Method], list[str]]:
    """Return all systems of the suite, and the names of those whose draft does not exist.

    Args:
        cards (`Path`): Folder of the trained drafts of the target, `tiny-longspec` and so on. `benchmarks/drafts` holds
            variants of them for comparisons.
    """

    @lru_cache(None)
    def opened(name: str) -> Any:
        folder = (cards if name.startswith("tiny-") else VARIANTS) / name
        if name in EXAMPLES:
            return resolve_name(EXAMPLES[name]).from_target(model)
        if name in weightless_drafts():
            return harness.open_draft(name, model)
        return harness.open_draft(str(folder), model) if (folder / "config.json").is_file() else None

    methods, missing = [], []
    for name, settings in SUITE["systems"].items():
        match dict(settings):
            case {"generate": options}:
                methods.append(Method(name, HfMethod(options)))
            case {"draft": draft, **point}:
                methods.append(Method(name, opened(draft), tuple(point.items())))
            case {"assistant": draft, **options}:
                if (pair := opened(draft)) is not None:
                    endless(pair.assistant).generation_config.update(**options)
                    pair = HfMethod({"assistant_model": pair.assistant})
                methods.append(Method(name, pair))
        if methods[-1].how is None:
            missing.append(methods.pop().name)
    return methods, missing


def compare(
    results: harness.Run,
    parts: Sequence[Part],
    targets: Mapping[str, tuple[PreTrainedModel, Sequence[Method]]],
    rows: torch.Tensor,
    *,
    modes: Sequence[str],
    tokens: int,
) -> None:
    """Run all systems on the same prompts, and write each call as soon as it is over.

    A run that is cut off has about as many prompts in every cell, because all parts advance together. The calls that
    the file or an earlier part holds are not repeated, and prompts without further calls are not read. As many prompts
    as the largest batch are read at a time, each of them once for all systems and lengths.

    Args:
        parts (`Sequence[Part]`): Those whose type is in `targets` are measured.
        targets (`Mapping`): Target and systems by type. Prompts are read in float32.
        rows (`torch.Tensor`): Prompts `(P, T)`.
    """
    parts = [part for part in parts if part.dtype in targets]
    size = max(part.batch for part in parts)

    @lru_cache(1)
    def prompts(first: int) -> PrefilledPrompts:
        results.say(f"reading prompts from {first + 1} on")
        return prefill(targets["float32"][0], rows[first : first + size])

    @lru_cache(1)
    def decoder(first: int, dtype: str) -> Decoder:
        return Decoder(targets[dtype][0], prompts(first).to(getattr(torch, dtype)), tokens)

    def measure(first: int, place: Record, method: Method) -> None:
        start = place["turn"] * place["batch"] - first

        def call(tokens: int | None = None) -> Measurement:
            at = slice(start, start + place["batch"]), place["context"], place["mode"], place["turn"], tokens
            with method.with_settings():
                return decoder(first, place["dtype"]).run(method.how, *at)

        # before the first: compilation, and the first touch of the buffers
        results.measure("call", place, lambda: _record(call()), lambda: call(min(WARM_UP_TOKENS, tokens)))

    for first in range(0, len(rows), size):
        for part in parts:
            block = range(first, min(first + size, len(rows)))
            for place, method in part.calls(targets[part.dtype][1], modes, block):
                measure(first, place, method)


def _record(call: Measurement) -> Record:
    return {
        "tokens": call.tokens,
        "steps": call.steps,
        "seconds": significant(call.decode_seconds, 6),
        "taus": [significant(call.tokens / len(call.text) / max(1, steps)) for steps in call.row_steps],
        "shares": {name: significant(share) for name, share in call.shares.items()},
        "draft_state_bytes": call.draft_state_bytes,
        # by which greedy texts are compared
        "text": hashlib.sha256(call.text.numpy().tobytes()).hexdigest()[:16],
    }


def _reduced(part: Part, contexts: Sequence[int] | None, prompts: int | None) -> Part:
    kept = tuple(context for context in part.contexts if contexts is None or context in contexts)
    return replace(part, contexts=kept, prompts=min(part.prompts, prompts or part.prompts))


def main(arguments: list[str] | None = None) -> None:
    parser, presets = harness.parser(__doc__, "figure", minutes=0, prompts=True), SUITE["presets"]
    parser.add_argument("--preset", choices=sorted(presets), default="short", help="sizes (default: %(default)s)")
    parser.add_argument("--cards", type=Path, default=harness.HUB_CARDS, help="folder of the trained drafts")
    parser.add_argument(
        "--system", dest="systems", action="append", help="only this, and the two baselines; repeatable"
    )
    parser.add_argument("--modes", type=harness.names, default="greedy,sample", help="default: %(default)s")
    parser.add_argument("--contexts", type=harness.integers, help="only these of the preset")
    parser.add_argument("--prompts", type=int, help="no more prompts than this in any part of the preset")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens per prompt (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="continue with the result file")
    parser.set_defaults(minutes=None)
    args = parser.parse_args(arguments)
    preset = presets[args.preset]
    args.minutes = preset["minutes"] if args.minutes is None else args.minutes
    parts = [_reduced(Part(**part), args.contexts, args.prompts) for part in preset["parts"]]
    parts = [part for part in parts if part.contexts]
    if not parts:
        parser.error(f"--contexts {args.contexts}: the preset has none of them.")

    def wanted(name: str) -> bool:
        asked = name in (HF, PLAIN) or not args.systems or name in args.systems
        return asked and any(part.has(name) for part in parts)

    window, count = max(max(part.contexts) for part in parts), max(part.prompts for part in parts)
    rows, origin = harness.load_prompts(args.target, args.data, window, count)
    contexts = sorted({context for part in parts for context in part.contexts})
    settings = {"preset": args.preset, "contexts": contexts, "tokens": args.tokens, **origin}
    with harness.start(args, "figure", settings, resume=args.resume) as run:
        targets: dict[str, tuple[PreTrainedModel, list[Method]]] = {}
        for dtype in dict.fromkeys(part.dtype for part in parts):
            if dtype == "bfloat16" and not run.records[0]["native_bfloat16"]:
                run.skip("this processor has no instructions for it", dtype=dtype)
                continue
            model = harness.load_target(args.target, getattr(torch, dtype))
            methods, missing = systems(model, args.cards)
            targets[dtype] = model, [method for method in methods if wanted(method.name)]
        for name in filter(wanted, missing):
            run.skip("no such draft", system=name)
        compare(run, parts, targets, rows, modes=args.modes, tokens=args.tokens)
    draw(run.records, args.output.with_suffix(".svg"))


if __name__ == "__main__":
    main()
