"""tau on held-out text with 95 % intervals over prompts: of the settings of SpecAttn, of n-grams, or of trained drafts.

Nothing is timed, so other programs may run at the same time. benchmarks/suites/acceptance.yaml has the settings.

    python -m benchmarks.acceptance --target hub_cards/tiny-target --data novels --data stdlib --threads 1
    python -m benchmarks.acceptance --draft hub_cards/tiny-longspec --output benchmarks/results/drafts.jsonl
    python -m benchmarks.acceptance --draft ngram --output benchmarks/results/ngram.jsonl
    python -m benchmarks.acceptance --settings draft_weights --output draft-weights.jsonl
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import hf_longspec
from benchmarks import harness, read_yaml
from benchmarks.decoder import MODES, Decoder, Decoding, Method, PrefilledPrompts
from benchmarks.report import mean_interval
from hf_longspec.cli.files import Record
from hf_longspec.cli.measuring import significant
from hf_longspec.modeling.shared.draft_weights import GROUP, rounded_groups, rounded_layers

# Name of a draft, or `None` for SpecAttn; context; how tokens are chosen; settings of the draft on top of its own.
Planned = tuple[str | None, int, Decoding, dict[str, Any]]


def plan(kinds: Mapping[str | None, str], lengths: Sequence[int]) -> list[Planned]:
    """Plan the runs, the most important first: drafts are compared with one setting, the first of a kind has others.

    `kinds` has the model type of each draft by its name.
    """
    suite, middle = read_yaml("suites/acceptance.yaml"), [sorted(lengths)[len(lengths) // 2]]
    first_of_kind = {kind: name for name, kind in reversed(kinds.items())}
    runs = [(name, suite[kind]["main"][0], lengths) for name, kind in kinds.items()]
    runs += [(name, entry, lengths) for kind, name in first_of_kind.items() for entry in suite[kind]["main"][1:]]
    runs += [(name, entry, middle) for kind, name in first_of_kind.items() for entry in suite[kind].get("middle", [])]
    planned: list[Planned] = []
    for name, entry, at in runs:
        options = {key: value for key, value in entry.items() if key not in ("modes", "decoding")}
        for mode in entry.get("modes", MODES):
            decoding = replace(MODES[mode], **entry.get("decoding", {}))
            planned += [(name, length, decoding, options) for length in at]
    return planned


def place_of(name: str | None, length: int, decoding: Decoding, options: Mapping[str, Any]) -> Record:
    """The place of a record; its mode is `sample` or `greedy`, with the changes of it."""
    mode = "greedy" if decoding.greedy else "sample"
    plain = MODES[mode].to_dict()
    changes = [f"{key}={value}" for key, value in decoding.to_dict().items() if plain.get(key) != value]
    options = ({} if name is None else {"draft": name}) | dict(options)
    return {"mode": ", ".join([mode, *changes]), "options": options, "length": length}


def rounded_draft(model: PreTrainedModel, bits: int) -> Any:
    """Return SpecAttn with drafting steps in a number of bits that torch has no kernel for.

    The linear layers but the head have multiples of the scale of 64 weights, their absolute maximum, as in "int4".
    Products are computed in the dtype of the model, so this shows tau and no speed.
    """
    rounded = copy.deepcopy(model)
    for _, layer in rounded_layers(rounded, bits=4):
        multiples, scales = rounded_groups(layer.weight.data, bits, GROUP)
        layer.weight.data = (multiples * scales).view_as(layer.weight).to(model.dtype)
    return hf_longspec.SpecAttnDraftModel.from_target(model, draft_weights=rounded)


def measure(
    results: harness.Run,
    planned: Sequence[Planned],
    drafts: Mapping[str | None, Any],
    model: PreTrainedModel,
    prompts: PrefilledPrompts,
    tokens: int,
    batch: int,
) -> None:
    """Run all planned settings, in the given order, until the time is over.

    Args:
        drafts (`Mapping`): Drafts by their names in the results, or `None` for a single one without a name.
        model (`PreTrainedModel`): The target, in float32.
        prompts (`PrefilledPrompts`): The same for all settings, and so are the random numbers.
        tokens (`int`): Tokens per prompt.
        batch (`int`): Prompts per call; tau is counted per prompt and does not depend on it.
    """
    decoder, size = Decoder(model, prompts, tokens), len(prompts.tokens)
    firsts: dict[tuple[str, str, int], list[float]] = {}
    for name, length, decoding, options in planned:
        draft, place = drafts[name], place_of(name, length, decoding, options)
        if isinstance(bits := options.get("draft_weights"), int):
            draft, options = rounded_draft(model, bits), {**options, "draft_weights": None}
        method = Method("", draft, tuple(options.items()))
        # drafts of one kind are compared setting by setting, and the settings of SpecAttn with its first
        group = "" if name is None or not options else f"{method.how.config.model_type} {options}"
        where = place["mode"], group, length

        def run(method: Method = method, at: int = length, decoding: Decoding = decoding, where: Any = where) -> Record:
            taus: list[float] = []
            with method.with_settings():
                for start in range(0, size, batch):
                    rows = slice(start, min(start + batch, size))
                    call = decoder.run(method.how, rows, at, decoding, seed=start)
                    taus += [call.tokens // len(call.text) / count for count in call.row_steps]
            record: Record = {"tau": mean_interval(taus), "per_prompt": [significant(tau) for tau in taus]}
            if first := firsts.get(where):
                record["difference"] = mean_interval([tau - other for tau, other in zip(taus, first, strict=True)])
            return record

        record = results.measure("acceptance", place, run, alike=())
        if record is not None:
            firsts.setdefault(where, record["per_prompt"])
            results.say(f"{place}: tau {record['tau']['mean']:.3f}")


def main(arguments: list[str] | None = None) -> None:
    parser = harness.parser(__doc__, "acceptance", minutes=40, prompts=True)
    drafts_help = (
        "NAME=FOLDER, a folder or a Hub id of a trained draft, or ngram; repeat to compare (default: SpecAttn)"
    )
    parser.add_argument("--draft", action="append", help=drafts_help)
    parser.add_argument("--settings", help="settings in the file (default: those of the type of each draft)")
    parser.add_argument("--lengths", type=harness.integers, default="2048,8192,15872", help="default: %(default)s")
    parser.add_argument("--prompts", type=int, default=24, help="per length (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="per prompt (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="prompts decoded together (default: %(default)s)")
    args = parser.parse_args(arguments)
    model = harness.load_target(args.target, torch.float32)
    pairs = [entry.split("=", 1) if "=" in entry else (Path(entry).name, entry) for entry in args.draft or ()]
    drafts = {name: harness.open_draft(path, model) for name, path in pairs} or {
        None: harness.open_draft("specattn", model)
    }
    tokens, origin = harness.load_prompts(args.target, args.data, max(args.lengths), args.prompts)
    kinds = {name: args.settings or draft.config.model_type for name, draft in drafts.items()}
    planned = plan(kinds, args.lengths)
    settings = {"tokens": args.tokens, **origin}
    if not args.draft:
        settings["defaults"] = hf_longspec.SpecAttnDraftModel.settings | {"gate": False}
    with harness.start(args, "acceptance", settings) as results:
        prompts = harness.prefilled(model, tokens, results)
        measure(results, planned, drafts, model, prompts, args.tokens, args.batch)


if __name__ == "__main__":
    main()
