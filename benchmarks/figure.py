"""Every kind of draft on one target: tau, the cost of an iteration and the speed-up, versus the length of the context.

    make figure
    python -m benchmarks.figure --preset full --resume

`full` also runs in bfloat16 where the processor has it, with fewer prompts and lengths. The report and the figure are
written at the end. benchmarks/README.md describes the method.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, PreTrainedModel

import hf_longspec
from benchmarks import harness
from benchmarks.figure_report import draw
from hf_longspec.bench.calls import HF, PLAIN, Decoder, HfMethod, PrefilledPrompts, endless
from hf_longspec.bench.report import significant
from hf_longspec.bench.results import of_kind, rotated

GAMMA = 4
CHAIN = [1] * GAMMA
TREE = [4, 4, 4, 3]
HEADS = {"self_draft": "verify_hidden", "tree_branching": CHAIN}
# Drafts that only comparisons use: trained with one thing left out, or other heads.
VARIANTS = Path(__file__).parent / "drafts"


# Contexts, batches, prompts of each length, minutes that a run may take, and prompts of each length in bfloat16.
PRESETS: dict[str, dict[str, Any]] = {
    "short": {"contexts": [1024, 4096, 16128], "batches": [1], "prompts": 6, "minutes": 20, "bfloat16": 0},
    "full": {
        "contexts": [1024, 2048, 4096, 8192, 16128],
        "batches": [1, 4],
        "prompts": 24,
        "minutes": 600,
        "bfloat16": 8,
    },
}
# Contexts in bfloat16.
FEWER_CONTEXTS = (1024, 4096, 16128)


def systems(model: PreTrainedModel, cards: Path) -> dict[str, Any]:
    """Return all systems by name: stock `generate`, the loop without a draft, trained and training-free drafts.

    Args:
        cards (`Path`): Folder of the trained drafts of the target, `tiny-longspec` and so on. Those that are missing
            are left out, here and in `benchmarks/drafts`, which holds variants of them for comparisons.
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
        "LongSpec, no offsets": ("longspec-no-offsets", {"tree_widths": CHAIN}),
        "LongSpec, no noise": ("longspec-no-noise", {"tree_widths": CHAIN}),
        "LongSpec, no cross-attention": ("longspec-no-cross-attention", {"tree_widths": CHAIN}),
        "small model": ("tiny-assistant", {**chain, "window": None}),
        "small model, window": ("tiny-assistant", {**chain, "window": 512}),
    }
    for name, (folder, settings) in with_weights.items():
        home = cards if folder.startswith("tiny-") else VARIANTS
        if (home / folder / "config.json").is_file():
            methods[name] = AutoModel.from_pretrained(home / folder, dtype=model.dtype)
            methods[name].generation_config.update(**settings)
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
    return methods


def compare(
    results: harness.Run,
    model: PreTrainedModel,
    methods: Mapping[str, Any],
    prompts: PrefilledPrompts,
    *,
    modes: Iterable[str],
    contexts: Sequence[int],
    batches: Sequence[int],
    tokens: int,
) -> None:
    """Run all systems on the same prompts, and write each call as soon as it is over.

    Prompt by prompt, so that a run that is cut off has about as many of them in every cell. Calls that the file holds
    already are not repeated.

    Args:
        prompts ([`PrefilledPrompts`]): In the type of the target.
    """
    decoder, warm = Decoder(model, prompts, tokens), set()
    dtype = str(model.dtype).removeprefix("torch.")
    windows = [
        (slice(turn * batch, (turn + 1) * batch), batch, turn)
        for batch in batches
        for turn in range(len(prompts.tokens) // batch)
    ]
    for rows, batch, turn in sorted(windows, key=lambda window: window[0].stop):
        candidates = [name for name, how in methods.items() if getattr(how, "max_batch", None) in (None, batch)]
        for context, mode, name in product(contexts, modes, rotated(candidates, turn)):
            what: dict[str, Any] = {"dtype": dtype, "mode": mode, "context": context, "batch": batch}
            what |= {"system": name, "turn": turn}
            if of_kind(results.records, "call", **what):
                continue
            if not results.has_time(**what):
                return
            at = methods[name], rows, context, mode, turn
            if (name, batch, context, mode) not in warm:  # compilation, and the first touch of the buffers
                decoder.run(*at, min(8, tokens))
                warm.add((name, batch, context, mode))
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
                text=hashlib.sha256(call.text.numpy().tobytes()).hexdigest()[:16],  # by which greedy texts are compared
            )
        results.say(f"prompts {rows.start + 1} to {rows.stop} in a batch of {batch}, {dtype}: done")


def main(arguments: list[str] | None = None) -> None:
    parser = harness.parser(__doc__, "figure", minutes=0, prompts=True)
    parser.add_argument("--preset", choices=sorted(PRESETS), default="short", help="sizes (default: %(default)s)")
    parser.add_argument("--cards", type=Path, default=harness.HUB_CARDS, help="folder of the trained drafts")
    parser.add_argument(
        "--system", dest="systems", action="append", help="only this, and the two baselines; repeatable"
    )
    parser.add_argument("--modes", type=harness.names, default="greedy,sample", help="default: %(default)s")
    parser.add_argument("--contexts", type=harness.integers, help="in place of those of the preset")
    parser.add_argument("--batches", type=harness.integers, help="in place of those of the preset")
    parser.add_argument("--prompts", type=int, help="in place of those of the preset")
    parser.add_argument("--bfloat16", type=int, help="prompts in bfloat16, in place of those of the preset")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens per prompt (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="continue with the result file")
    parser.set_defaults(minutes=None)
    args = parser.parse_args(arguments)

    def selected(model: PreTrainedModel) -> dict[str, Any]:
        methods = systems(model, args.cards)
        return {name: how for name, how in methods.items() if not args.systems or name in (HF, PLAIN, *args.systems)}

    for name, value in PRESETS[args.preset].items():
        setattr(args, name, value if getattr(args, name) is None else getattr(args, name))
    rows, origin = harness.load_prompts(args.target, args.data, max(args.contexts), args.prompts)
    model = harness.load_target(args.target, torch.float32)
    sizes = {"tokens": args.tokens, "contexts": args.contexts, "batches": args.batches}
    with harness.start(args, "figure", {**sizes, **origin}, resume=args.resume or None) as run:
        prompts = harness.prefilled(model, rows, run)
        compare(run, model, selected(model), prompts, modes=args.modes, **sizes)
        if args.bfloat16 and run.records[0]["native_bfloat16"]:
            model = harness.load_target(args.target, torch.bfloat16)
            prompts = prompts.first(args.bfloat16).to(torch.bfloat16)
            sizes |= {"contexts": [size for size in FEWER_CONTEXTS if size <= max(args.contexts)], "batches": [1]}
            compare(run, model, selected(model), prompts, modes=args.modes, **sizes)
    draw(run.records, args.output.with_suffix(".svg"))


if __name__ == "__main__":
    main()
