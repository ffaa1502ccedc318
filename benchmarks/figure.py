"""Every kind of draft on one target: tau, the cost of an iteration and the speed-up, versus the length of the context.

    make figure
    python -m benchmarks.figure --preset full --resume

Each prompt is prefilled once for all systems. All systems continue the same prompts, in turns, so that every ratio is
one of neighbours in time. Chains have four drafted tokens; trees are named. tau is the number of tokens per
verification, the target's own included. The cost is the time of an iteration in steps of the plain loop. The speed-up
is tau over that cost.

A run that was interrupted goes on with `--resume`. The report and the figure are written at the end, from the file.
"""

import argparse
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, PreTrainedModel

import hf_longspec
from benchmarks.engine import row_windows
from benchmarks.figure_report import draw
from benchmarks.harness import (
    HUB_CARDS,
    Run,
    add_prompts,
    integers,
    load_prompts,
    load_target,
    names,
    parser,
    prefilled,
)
from hf_longspec.bench.calls import HF, PLAIN, Call, HfMethod, endless
from hf_longspec.bench.prefill import Decoder, PrefilledPrompts
from hf_longspec.bench.results import of_kind
from hf_longspec.bench.summaries import rotated, significant

GAMMA = 4
CHAIN = [1] * GAMMA
TREE = [4, 4, 4, 3]
HEADS = {"self_draft": "verify_hidden", "tree_branching": CHAIN}
# Drafts that only comparisons use: trained with one thing left out, or other heads.
VARIANTS = Path(__file__).parent / "drafts"


@dataclass(frozen=True)
class Preset:
    """Sizes of a run.

    Args:
        contexts (`list[int]`): Tokens of the prompts.
        batches (`list[int]`): Rows that are decoded together.
        prompts (`int`): Prompts of each length.
        tokens (`int`): New tokens per prompt.
        minutes (`float`): Time limit.
    """

    contexts: list[int]
    batches: list[int]
    prompts: int
    tokens: int
    minutes: float


PRESETS = {
    "short": Preset([1024, 4096, 16128], [1], prompts=6, tokens=64, minutes=20),
    "full": Preset([1024, 2048, 4096, 8192, 16128], [1, 4], prompts=24, tokens=64, minutes=600),
}


def systems(model: PreTrainedModel, cards: Path) -> dict[str, Any]:
    """Return all systems by name: stock `generate`, the loop without a draft, trained and training-free drafts.

    Args:
        cards (`Path`): Folder of the trained drafts of the target, `tiny-longspec` and so on. Those that are missing
            are left out, here and in `benchmarks/drafts`, which holds variants of them for comparisons.
    """
    chain = {"num_assistant_tokens": GAMMA}
    found: dict[str, Any] = {HF: HfMethod(), PLAIN: hf_longspec.PlainDraftModel.from_target(model)}

    trained: dict[str, tuple[str, dict[str, Any]]] = {
        "LongSpec": ("tiny-longspec", {"tree_widths": CHAIN}),
        "LongSpec, tree": ("tiny-longspec", {"tree_widths": TREE}),
        "EAGLE-3, window": ("tiny-eagle3", {"tree_widths": CHAIN}),
        "EAGLE-3, tree": ("tiny-eagle3", {"tree_widths": TREE}),
        "EAGLE-3, all": ("tiny-eagle3", {"tree_widths": CHAIN, "window": None}),
        "TokenSwift": ("tiny-tokenswift", HEADS),
        "TokenSwift, paper's heads": ("chained-heads", HEADS),
        "LongSpec, no offsets": ("longspec-no-offsets", {"tree_widths": CHAIN}),
        "LongSpec, no noise": ("longspec-no-noise", {"tree_widths": CHAIN}),
        "LongSpec, no cross-attention": ("longspec-no-cross-attention", {"tree_widths": CHAIN}),
        "small model": ("tiny-assistant", {**chain, "window": None}),
        "small model, window": ("tiny-assistant", {**chain, "window": 512}),
    }
    for name, (folder, settings) in trained.items():
        home = cards if folder.startswith("tiny-") else VARIANTS
        if (home / folder / "config.json").is_file():
            found[name] = AutoModel.from_pretrained(home / folder, dtype=model.dtype)
            found[name].generation_config.update(**settings)
    own = hf_longspec.SpecAttnDraftModel
    found |= {
        "SpecAttn": own.from_target(model, **chain),
        "SpecAttn, logits": own.from_target(model, **chain, score="logits"),
        "SpecAttn, all rows": own.from_target(model, **chain, selection="all_rows"),
        "SpecAttn, last accepted": own.from_target(model, **chain, selection="last_accepted"),
        "SpecAttn, window": own.from_target(model, **chain, selection="window"),
        # every layer reads pages, as the other selections are made in every layer
        "Quest": hf_longspec.QuestDraftModel.from_target(model, **chain, num_dense_layers=0),
        "n-grams": hf_longspec.NgramDraftModel.from_target(model),
        "Token Recycling": hf_longspec.TokenRecyclingDraftModel.from_target(model),
        "hf prompt lookup": HfMethod({"prompt_lookup_num_tokens": GAMMA}, max_batch=1),
    }
    if "small model" in found:
        found["hf assisted"] = HfMethod({"assistant_model": assistant_of(found["small model"])}, max_batch=1)
    return found


def assistant_of(draft: Any) -> PreTrainedModel:
    """Return the small model of a draft with the settings by which transformers drafts chains of a constant length."""
    model = endless(draft.assistant)
    how = model.generation_config
    how.num_assistant_tokens, how.num_assistant_tokens_schedule, how.assistant_confidence_threshold = (
        GAMMA,
        "constant",
        0,
    )
    return model


@dataclass
class Comparison:
    """Run all systems on the same prompts.

    Args:
        model (`PreTrainedModel`): The target, in float32.
        prompts ([`PrefilledPrompts`]): One row per prompt.
        tokens (`int`): New tokens per prompt.
        results ([`Run`]): Calls that it holds already are not repeated.
    """

    model: PreTrainedModel
    prompts: PrefilledPrompts
    tokens: int
    results: Run

    def __post_init__(self) -> None:
        self.decoder = Decoder(self.model, self.prompts, self.tokens)
        self.warm: set[tuple[Any, ...]] = set()

    def measure(
        self, methods: Mapping[str, Any], modes: Iterable[str], contexts: Sequence[int], batches: Sequence[int]
    ):
        """Measure prompt by prompt, so that a run that is cut off has about as many of them in every cell.

        Each call is written as soon as it is over.
        """
        count = len(self.prompts.tokens)
        windows = [
            (rows, batch, turn)
            for batch in batches
            for turn, rows in enumerate(row_windows(count, batch, max(1, count // batch)))
        ]
        for rows, batch, turn in sorted(windows, key=lambda window: window[0].stop):
            fitting = [name for name, how in methods.items() if getattr(how, "max_batch", None) in (None, batch)]
            for context, mode, name in product(contexts, modes, rotated(fitting, turn)):
                what: dict[str, Any] = {"mode": mode, "context": context, "batch": batch, "system": name, "turn": turn}
                if of_kind(self.results.records, "call", **what):
                    continue
                if not self.results.has_time(**what):
                    return
                self._measure(methods[name], rows, what)
            self.results.say(f"prompts {rows.start + 1} to {rows.stop} in a batch of {batch}: done")

    def _measure(self, method: Any, rows: slice, what: Mapping[str, Any]) -> None:
        at = rows, what["context"], what["mode"], what["turn"]
        kind = what["system"], what["batch"], what["context"], what["mode"]
        if kind not in self.warm:  # compilation, and the first touch of the buffers
            self.decoder.run(method, *at, min(8, self.tokens))
            self.warm.add(kind)
        self.results.write("call", **what, **self._values(self.decoder.run(method, *at)))

    def _values(self, call: Call) -> dict[str, Any]:
        """Return the numbers of a call, and a digest by which greedy texts are compared."""
        return {
            "tokens": call.tokens,
            "steps": call.steps,
            "seconds": significant(call.decode_seconds, 6),
            "taus": [significant(call.tokens / len(call.text) / max(1, count)) for count in call.row_steps],
            "draft_state_bytes": call.draft_state_bytes,
            "text": hashlib.sha256(call.text.numpy().tobytes()).hexdigest()[:16],
        }


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    sizes = PRESETS[args.preset]
    contexts, batches = args.contexts or sizes.contexts, args.batches or sizes.batches
    count, tokens = args.prompts or sizes.prompts, args.tokens or sizes.tokens
    args.minutes = args.minutes or sizes.minutes
    rows, origin = load_prompts(args.target, args.data, max(contexts), count)
    model = load_target(args.target, torch.float32)
    if args.threads:
        torch.set_num_threads(args.threads)
    settings = {"target": Path(args.target).name, "tokens": tokens, "contexts": contexts, "batches": batches, **origin}
    run = Run(args.output, "figure", args.minutes * 60, settings, quiet=args.quiet, resume=args.resume or None)
    with run as results:
        methods = systems(model, args.cards)
        if args.systems:
            methods = {name: how for name, how in methods.items() if name in (HF, PLAIN, *args.systems)}
        prompts = prefilled(model, rows, results)
        Comparison(model, prompts, tokens, results).measure(methods, args.modes, contexts, batches)
    draw(run.records, args.output.with_suffix(".svg"))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options."""
    made = parser(__doc__, "figure", minutes=0)
    add_prompts(made)
    made.add_argument("--preset", choices=sorted(PRESETS), default="short", help="sizes (default: %(default)s)")
    made.add_argument("--cards", type=Path, default=HUB_CARDS, help="folder of the trained drafts")
    made.add_argument("--systems", type=names, help="only these, and the two baselines")
    made.add_argument("--modes", type=names, default=["greedy", "sample"], help="default: greedy,sample")
    made.add_argument("--contexts", type=integers, help="in place of those of the preset")
    made.add_argument("--batches", type=integers, help="in place of those of the preset")
    made.add_argument("--prompts", type=int, help="in place of those of the preset")
    made.add_argument("--tokens", type=int, help="in place of those of the preset")
    made.add_argument("--resume", action="store_true", help="go on with the result file")
    return made.parse_args(arguments)


if __name__ == "__main__":
    main()
