"""tau on held-out text with 95 % intervals over prompts: of the settings of SpecAttn, of n-grams, or of trained drafts.

Nothing is timed, so other programs may run at the same time. The most important settings come first.

    python -m benchmarks.acceptance --target hub_cards/tiny-target --data novels --data stdlib --threads 1
    python -m benchmarks.acceptance --draft hub_cards/tiny-longspec --output benchmarks/results/drafts.jsonl
    python -m benchmarks.acceptance --draft ngram --output benchmarks/results/ngram.jsonl
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, PreTrainedModel

import hf_longspec
from benchmarks import harness
from hf_longspec.bench.calls import MODES, Decoder, Decoding, PrefilledPrompts, changed
from hf_longspec.bench.report import mean_interval, significant
from hf_longspec.modeling.tokenswift.generation_tokenswift import POLICIES


@dataclass(frozen=True)
class Setting:
    """Settings of a draft, and the way in which the target chooses its tokens."""

    decoding: Decoding  # how the target chooses
    # keys of `draft.generation_config` with their values, on top of the draft's defaults
    options: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, mode: str = "sample", changes: Mapping[str, Any] | None = None, **options: Any) -> "Setting":
        """From the draft's options as keywords, and other values (`changes`) of the mode's [`Decoding`]."""
        return cls(replace(MODES[mode], **(changes or {})), tuple(options.items()))

    @property
    def mode(self) -> str:
        """`sample` or `greedy`, with the changes of it."""
        name = "greedy" if self.decoding.greedy else "sample"
        plain = MODES[name].to_dict()
        changes = {key: value for key, value in self.decoding.to_dict().items() if plain.get(key) != value}
        return ", ".join([name, *(f"{key}={value}" for key, value in changes.items())])


# Name of a draft, setting, length of the prompts.
Planned = tuple[str | None, Setting, int]


@dataclass
class AcceptanceBenchmark:
    """Measure settings of one or several drafts on the same prompts with the same random numbers."""

    model: PreTrainedModel  # the target, in float32
    # by their names in the results, or `None` for a single draft without a name. Their settings are changed from run to
    # run.
    drafts: Mapping[str | None, Any]
    prompts: PrefilledPrompts  # one row per prompt
    tokens: int  # tokens per prompt
    batch: int  # prompts per call; tau is counted per prompt and does not depend on it

    def __post_init__(self) -> None:
        self.decoder = Decoder(self.model, self.prompts, self.tokens)
        self._first: dict[tuple[str, str, int], list[float]] = {}

    def run(self, plan: Sequence[Planned], results: harness.Run) -> None:
        """Run all planned settings, in the given order, until the time is over."""

        def what(planned: Planned) -> dict[str, Any]:
            name, setting, length = planned
            options = ({} if name is None else {"draft": name}) | dict(setting.options)
            return {"mode": setting.mode, "options": options, "length": length}

        for planned in results.in_time(plan, what):
            record = self.measure(*planned)
            results.write("acceptance", **what(planned), **record)
            results.say(f"{what(planned)}: tau {record['tau']['mean']:.3f}")

    def measure(self, name: str | None, setting: Setting, length: int) -> dict[str, Any]:
        """tau of one setting at one length: mean over prompts with interval, and difference to what came first."""
        taus, method = [], self.drafts[name]
        batch = min(self.batch, getattr(method, "max_batch", None) or self.batch)
        with changed(method, dict(setting.options)) if setting.options else nullcontext():
            for start in range(0, len(self.prompts.tokens), batch):
                rows = slice(start, min(start + batch, len(self.prompts.tokens)))
                run = self.decoder.run(method, rows, length, setting.decoding, seed=rows.start)
                taus += [run.tokens // len(run.text) / count for count in run.row_steps]
        record: dict[str, Any] = {"tau": mean_interval(taus), "per_prompt": [significant(tau) for tau in taus]}
        # drafts of one kind are compared setting by setting, and the settings of SpecAttn with its first
        group = "" if name is None or not setting.options else f"{method.config.model_type} {setting.options}"
        first = self._first.setdefault((setting.mode, group, length), taus)
        if first is not taus:
            record["difference"] = mean_interval([tau - other for tau, other in zip(taus, first, strict=True)])
        return record


# Differences are taken to the first setting of each mode.
SETTINGS = (
    Setting.of(selection="two_rows"),
    Setting.of(selection="window"),
    Setting.of(selection="all_rows"),
    Setting.of(selection="last_accepted"),
    Setting.of(selection="accepted_rows"),
    Setting.of(selection="two_rows", score="weights"),
    Setting.of(selection="all_rows", score="weights"),
    Setting.of("greedy", selection="two_rows"),
    Setting.of("greedy", selection="window"),
    Setting.of("greedy", selection="all_rows"),
    Setting.of("greedy", selection="two_rows", score="weights"),
)
# At the middle length only.
MINOR_SETTINGS = (
    *(Setting.of(mode, selection="two_rows", num_assistant_tokens=gamma) for mode in MODES for gamma in range(5, 10)),
    Setting.of(selection="two_rows", granularity="kv_head"),
    Setting.of(selection="two_rows", acceptance="coupled"),
    Setting.of(selection="two_rows", sparse_ratio=0.03),
    Setting.of(selection="two_rows", sparse_ratio=0.15),
)


CHAIN = {"tree_branching": [1, 1, 1, 1]}
# The paper's setting, without the first level of its tree: candidates of the root token are of the target itself.
PAPER = {"self_draft": "partial_kv", "tree_branching": [1, 3, 3, 3]}
NGRAMS = {"ngram_candidates": 20, "ngram_num_tokens": 4}
# By model type of the draft, each in both modes. Drafts are compared with the first of their kind, which has the others
# too.
OF_KIND: dict[str, list[dict[str, Any]]] = {
    "longspec": [{"tree_widths": widths} for widths in ([4, 4, 4, 3], [1, 1, 1], [4, 16, 16, 16, 16])],
    "longspec_eagle3": [{"tree_widths": widths} for widths in ([4, 4, 4, 3], [1, 1, 1])],
    "longspec_dflash": [{"num_tree_nodes": nodes} for nodes in (None, 16)],
    "longspec_assistant": [{"num_assistant_tokens": 3, "window": window} for window in (512, None)],
    "tokenswift": [
        {"self_draft": "partial_kv", **CHAIN},
        {"self_draft": "verify_hidden", **CHAIN},
        {"self_draft": "verify_hidden", **CHAIN, "ngram_candidates": 2, "ngram_num_tokens": 4},
        *(
            {"self_draft": "partial_kv", **CHAIN, "partial_kv_policy": policy, "partial_kv_budget": 512}
            for policy in POLICIES
        ),
        {**PAPER, "self_draft": "verify_hidden"},
        PAPER,
    ],
    "longspec_ngram": [
        {},
        {"ngram_source": "pool"},
        {"ngram_source": "lookup"},
        {"ngram_source": "lookup", "ngram_candidates": 1, "num_assistant_tokens": 10},
        {"ngram_candidates": 4, "num_assistant_tokens": 4},
    ],
}
# At the middle length only: what the paper varies, one at a time.
MINOR_OF_KIND = {
    "tokenswift": [
        *(Setting.of(mode, **PAPER | {"tree_branching": tree}) for mode in MODES for tree in ([3] * 4, [1, 9, 9, 9])),
        *(Setting.of(mode, **PAPER, **NGRAMS | {"ngram_candidates": k}) for mode in MODES for k in (5, 10, 20)),
        *(Setting.of("sample", {"temperature": heat}, **PAPER, **NGRAMS) for heat in (0.4, 0.7, 1.3)),
        *(Setting.of("sample", {"penalty": penalty}, **PAPER, **NGRAMS) for penalty in (1.1, 1.2, 1.5)),
        *(Setting.of("sample", {"penalty": 1.2, "window": window}, **PAPER, **NGRAMS) for window in (64, 256, 4096)),
    ]
}


def main(arguments: list[str] | None = None) -> None:
    parser = harness.parser(__doc__, "acceptance", minutes=40, prompts=True)
    drafts_help = (
        "NAME=FOLDER, a folder or a Hub id of a trained draft, or ngram; repeat to compare (default: SpecAttn)"
    )
    parser.add_argument("--draft", action="append", help=drafts_help)
    parser.add_argument("--lengths", type=harness.integers, default="2048,8192,15872", help="default: %(default)s")
    parser.add_argument("--prompts", type=int, default=24, help="per length (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="per prompt (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="prompts decoded together (default: %(default)s)")
    args = parser.parse_args(arguments)
    model = harness.load_target(args.target, torch.float32)
    drafts = make_drafts(model, args.draft)
    tokens, origin = harness.load_prompts(args.target, args.data, max(args.lengths), args.prompts)
    runs = plan({name: draft.config.model_type for name, draft in drafts.items()}, args.lengths)
    settings = {"tokens": args.tokens, **origin}
    if not args.draft:
        settings["defaults"] = hf_longspec.SpecAttnDraftModel.settings | {"gate": False}
    with harness.start(args, "acceptance", settings) as results:
        prompts = harness.prefilled(model, tokens, results)
        AcceptanceBenchmark(model, drafts, prompts, args.tokens, args.batch).run(runs, results)


def plan(kinds: Mapping[str | None, str], lengths: Sequence[int]) -> list[Planned]:
    """Plan the runs, the most important first: drafts are compared with one setting, the first of a kind has others.

    `kinds` has the model type of each draft by its name, `None` for SpecAttn.
    """
    middle = sorted(lengths)[len(lengths) // 2]
    if None in kinds:
        runs: list[Planned] = [(None, setting, length) for setting in SETTINGS for length in lengths]
        return runs + [(None, setting, middle) for setting in MINOR_SETTINGS]
    first_of_kind = {kind: name for name, kind in reversed(kinds.items())}
    baseline = [(name, OF_KIND[kind][0]) for name, kind in kinds.items()]
    variants = [(name, options) for kind, name in first_of_kind.items() for options in OF_KIND[kind][1:]]
    runs = [
        (name, Setting.of(mode, **options), length)
        for part in (baseline, variants)
        for name, options in part
        for mode in MODES
        for length in lengths
    ]
    minor = [(name, setting, middle) for kind, name in first_of_kind.items() for setting in MINOR_OF_KIND.get(kind, [])]
    return runs + minor


def make_drafts(model: PreTrainedModel, arguments: Sequence[str] | None) -> dict[str | None, Any]:
    """Drafts by the name before "=", or by the last part of the path; SpecAttn, without a name, if none."""
    if not arguments:
        return {None: hf_longspec.SpecAttnDraftModel.from_target(model)}
    pairs = (entry.split("=", 1) if "=" in entry else (Path(entry).name, entry) for entry in arguments)
    return {
        name: hf_longspec.NgramDraftModel.from_target(model)
        if path == "ngram"
        else AutoModel.from_pretrained(path, dtype=torch.float32)
        for name, path in pairs
    }


if __name__ == "__main__":
    main()
