"""Every kind of draft on one target: tau, the cost of an iteration and the speed-up, versus the length of the context.

    make figure
    python -m benchmarks.figure --preset full --output runs/figure.jsonl --resume

The short form has the usual settings of each draft. `full` also has other settings, drafts that were trained
otherwise, batches of four, and bfloat16 where the processor has it. `--join` adds a run of the other mode, which had a
core of its own. The report and the figures are written at the end. benchmarks/README.md describes the method.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, PreTrainedModel

import hf_longspec
from benchmarks import harness
from benchmarks.figure_report import TRAINED_OTHERWISE, draw
from hf_longspec.bench.calls import HF, PLAIN, Decoder, HfMethod, endless, prefill
from hf_longspec.bench.report import significant
from hf_longspec.bench.results import Record, of_kind, read_records, refuse_other, rotated

GAMMA = 4
CHAIN = [1] * GAMMA
TREE = [4, 4, 4, 3]
HEADS = {"self_draft": "verify_hidden", "tree_branching": CHAIN}
# Drafts that only comparisons use: trained with one thing left out, or other heads.
VARIANTS = Path(__file__).parent / "drafts"


@dataclass(frozen=True)
class Part:
    """Cells of a run that have the same type, batch size, prompts and systems."""

    contexts: tuple[int, ...]
    prompts: int
    dtype: str = "float32"
    batch: int = 1
    systems: tuple[str, ...] = ()  # all by default; the two baselines always belong to them


SHORT = (1024, 4096, 16128)
# The usual settings of each kind of draft.
MAIN = (
    "LongSpec",
    "LongSpec, tree",
    "EAGLE-3, window",
    "DFlash",
    "TokenSwift",
    "small model, window",
    "SpecAttn",
    "SpecAttn, window",
    "Quest",
    "n-grams",
    "Token Recycling",
)
# Minutes that a run may take, and its parts.
PRESETS: dict[str, tuple[float, tuple[Part, ...]]] = {
    "short": (20, (Part(SHORT, 6, systems=MAIN),)),
    "full": (
        900,
        (
            Part(SHORT, 24, systems=(*MAIN, *TRAINED_OTHERWISE)),
            Part((2048, 8192), 24, systems=MAIN),
            Part(SHORT, 12),
            Part(SHORT, 8, "bfloat16", systems=MAIN),
            Part(SHORT, 8, batch=4, systems=MAIN),
        ),
    ),
}
# What tells one call from all others.
PLACE = ("dtype", "mode", "context", "batch", "system", "turn")


def systems(model: PreTrainedModel, cards: Path) -> tuple[dict[str, Any], list[str]]:
    """Return all systems by name: stock `generate`, the loop without a draft, trained and training-free drafts.

    Args:
        cards (`Path`): Folder of the trained drafts of the target, `tiny-longspec` and so on. `benchmarks/drafts` holds
            variants of them for comparisons.

    Returns:
        `tuple`: The systems, and the names of those whose draft does not exist.
    """
    chain = {"num_assistant_tokens": GAMMA}
    methods: dict[str, Any] = {HF: HfMethod(), PLAIN: hf_longspec.PlainDraftModel.from_target(model)}

    with_weights: dict[str, tuple[str, dict[str, Any]]] = {
        "LongSpec": ("tiny-longspec", {"tree_widths": CHAIN}),
        "LongSpec, tree": ("tiny-longspec", {"tree_widths": TREE}),
        "LongSpec, last 1,020 keys": ("tiny-longspec", {"tree_widths": CHAIN, "cross_attention_window": 1020}),
        "EAGLE-3, window": ("tiny-eagle3", {"tree_widths": CHAIN}),
        "EAGLE-3, tree": ("tiny-eagle3", {"tree_widths": TREE}),
        "EAGLE-3, all": ("tiny-eagle3", {"tree_widths": CHAIN, "window": None}),
        "DFlash": ("tiny-dflash", {"num_tree_nodes": None}),
        "TokenSwift": ("tiny-tokenswift", HEADS),
        "TokenSwift, paper's heads": ("chained-heads", HEADS),
        "LongSpec, a third": ("longspec-third", {"tree_widths": CHAIN}),
        "LongSpec, no offsets": ("longspec-no-offsets", {"tree_widths": CHAIN}),
        "LongSpec, no noise": ("longspec-no-noise", {"tree_widths": CHAIN}),
        "LongSpec, uniform noise": ("longspec-uniform-noise", {"tree_widths": CHAIN}),
        "LongSpec, no cross-attention": ("longspec-no-cross-attention", {"tree_widths": CHAIN}),
        "small model": ("tiny-assistant", {**chain, "window": None}),
        "small model, window": ("tiny-assistant", {**chain, "window": 512}),
    }
    missing = []
    for name, (folder, settings) in with_weights.items():
        path = (cards if folder.startswith("tiny-") else VARIANTS) / folder
        if (path / "config.json").is_file():
            methods[name] = AutoModel.from_pretrained(path, dtype=model.dtype)
            methods[name].generation_config.update(**settings)
        else:
            missing.append(name)
    specattn = hf_longspec.SpecAttnDraftModel
    methods |= {
        "SpecAttn": specattn.from_target(model, **chain),
        "SpecAttn, weights": specattn.from_target(model, **chain, score="weights"),
        "SpecAttn, all rows": specattn.from_target(model, **chain, selection="all_rows"),
        "SpecAttn, last accepted": specattn.from_target(model, **chain, selection="last_accepted"),
        "SpecAttn, window": specattn.from_target(model, **chain, selection="window"),
        # every layer reads pages, as the other selections are made in every layer
        "Quest": hf_longspec.QuestDraftModel.from_target(model, **chain, num_dense_layers=0),
        "n-grams": hf_longspec.NgramDraftModel.from_target(model),
        "Token Recycling": hf_longspec.TokenRecyclingDraftModel.from_target(model),
        "hf prompt lookup": HfMethod({"prompt_lookup_num_tokens": GAMMA}, max_batch=1),
    }
    if "small model" in methods:
        assistant = endless(methods["small model"].assistant)
        constant = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0}
        assistant.generation_config.update(num_assistant_tokens=GAMMA, **constant)
        methods["hf assisted"] = HfMethod({"assistant_model": assistant}, max_batch=1)
    return methods, missing


def compare(
    results: harness.Run,
    parts: Sequence[Part],
    targets: Mapping[str, tuple[PreTrainedModel, Mapping[str, Any]]],
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
    known = {tuple(call[name] for name in PLACE) for call in of_kind(results.records, "call")}
    size, warm = max(part.batch for part in parts), set()
    for first in range(0, len(rows), size):
        block = rows[first : first + size]
        planned: list[list[Record]] = [[] for _ in parts]
        for part, cells in zip(parts, planned, strict=True):
            for what in _cells(part, targets[part.dtype][1], modes, range(first, first + len(block))):
                if (place := tuple(what.values())) not in known:
                    known.add(place)
                    cells.append(what)
        if not any(planned):
            continue
        results.say(f"reading prompts {first + 1} to {first + len(block)}")
        prompts = prefill(targets["float32"][0], block)
        for part, cells in zip(parts, planned, strict=True):
            model, methods = targets[part.dtype]
            decoder = Decoder(model, prompts.to(model.dtype), tokens)
            for what in cells:
                if not results.has_time(**what):
                    return
                name, turn = what["system"], what["turn"]
                start = turn * part.batch - first
                at = methods[name], slice(start, start + part.batch), what["context"], what["mode"], turn
                # compilation, and the first touch of the buffers
                if (kind := tuple(what[key] for key in PLACE if key != "turn")) not in warm:
                    decoder.run(*at, min(8, tokens))
                    warm.add(kind)
                call = decoder.run(*at)
                results.write(
                    "call",
                    **what,
                    tokens=call.tokens,
                    steps=call.steps,
                    seconds=significant(call.decode_seconds, 6),
                    taus=[significant(call.tokens / len(call.text) / max(1, steps)) for steps in call.row_steps],
                    shares={name: significant(share) for name, share in call.shares.items()},
                    draft_state_bytes=call.draft_state_bytes,
                    # by which greedy texts are compared
                    text=hashlib.sha256(call.text.numpy().tobytes()).hexdigest()[:16],
                )
        results.say(f"prompts {first + 1} to {first + len(block)}: done")


def join(results: harness.Run, path: Path, settings: Mapping[str, Any]) -> None:
    """Add the calls of another run, such as one of another mode; ValueError for other settings, machines or commits."""
    others = read_records(path)
    refuse_other(path, others[0], "figure", settings, results.records[0], option="--join")
    results.write("joined", **{name: others[0][name] for name in ("date", "command", "load_average")})
    for record in others:
        if record["kind"] in ("call", "skipped"):
            results.write(**record)


def _cells(part: Part, methods: Mapping[str, Any], modes: Sequence[str], block: range) -> Iterator[Record]:
    """Yield the place of each call of a part whose prompts all lie in a block."""
    chosen = [name for name in methods if not part.systems or name in (HF, PLAIN, *part.systems)]
    chosen = [name for name in chosen if getattr(methods[name], "max_batch", None) in (None, part.batch)]
    for turn in range(block.start // part.batch, min(block.stop, part.prompts) // part.batch):
        for context, mode, name in product(part.contexts, modes, rotated(chosen, turn)):
            values = part.dtype, mode, context, part.batch, name, turn
            yield dict(zip(PLACE, values, strict=True))


def _reduced(part: Part, contexts: Sequence[int] | None, prompts: int | None) -> Part:
    """Return a part with no other contexts and no more prompts than these."""
    kept = tuple(context for context in part.contexts if contexts is None or context in contexts)
    return replace(part, contexts=kept, prompts=min(part.prompts, prompts or part.prompts))


def main(arguments: list[str] | None = None) -> None:
    parser = harness.parser(__doc__, "figure", minutes=0, prompts=True)
    parser.add_argument("--preset", choices=sorted(PRESETS), default="short", help="sizes (default: %(default)s)")
    parser.add_argument("--cards", type=Path, default=harness.HUB_CARDS, help="folder of the trained drafts")
    parser.add_argument(
        "--system", dest="systems", action="append", help="only this, and the two baselines; repeatable"
    )
    parser.add_argument("--modes", type=harness.names, default="greedy,sample", help="default: %(default)s")
    parser.add_argument("--contexts", type=harness.integers, help="only these of the preset")
    parser.add_argument("--prompts", type=int, help="no more prompts than this in any part of the preset")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens per prompt (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="continue with the result file")
    parser.add_argument("--join", type=Path, help="result file whose calls are added, of the same settings and commit")
    parser.set_defaults(minutes=None)
    args = parser.parse_args(arguments)
    minutes, parts = PRESETS[args.preset]
    args.minutes = minutes if args.minutes is None else args.minutes
    parts = tuple(reduced for part in parts if (reduced := _reduced(part, args.contexts, args.prompts)).contexts)
    if not parts:
        parser.error(f"--contexts {args.contexts}: the preset has none of them.")

    def wanted(name: str) -> bool:
        in_parts = any(not part.systems or name in part.systems for part in parts)
        return name in (HF, PLAIN) or (in_parts and (not args.systems or name in args.systems))

    window, count = max(max(part.contexts) for part in parts), max(part.prompts for part in parts)
    rows, origin = harness.load_prompts(args.target, args.data, window, count)
    contexts = sorted({context for part in parts for context in part.contexts})
    settings = {"preset": args.preset, "contexts": contexts, "tokens": args.tokens, **origin}
    with harness.start(args, "figure", settings, resume=args.resume or None) as run:
        targets: dict[str, tuple[PreTrainedModel, dict[str, Any]]] = {}
        for dtype in dict.fromkeys(part.dtype for part in parts):
            if dtype == "bfloat16" and not run.records[0]["native_bfloat16"]:
                run.skip("this processor has no instructions for it", dtype=dtype)
                continue
            model = harness.load_target(args.target, getattr(torch, dtype))
            methods, missing = systems(model, args.cards)
            targets[dtype] = model, {name: how for name, how in methods.items() if wanted(name)}
        for name in filter(wanted, missing):
            run.skip("no such draft", system=name)
        compare(run, parts, targets, rows, modes=args.modes, tokens=args.tokens)
        if args.join:
            join(run, args.join, settings)
    draw(run.records, args.output.with_suffix(".svg"))


if __name__ == "__main__":
    main()
