"""`hf-longspec tune`: the fastest settings of a draft, measured on the user's text and machine."""

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from rich.table import Column, Table
from transformers import PreTrainedModel, set_seed

from ..cli import CommandError, options
from ..generation.cache import SpeculativeCache
from ..generation.draft_tree import num_static_nodes
from ..generation.target import TargetView
from ..modeling.plain.modeling_plain import PlainDraftModel
from ..modeling.register_draft import DRAFTS, weightless_drafts
from ..modeling.settings import most_nodes
from .files import claim, replace_file
from .measuring import Measurement, changed, endless, rotated, run_call, sampling
from .models import LoadedModels, Progress, PromptProgress, load_models, noticing_others, say
from .texts import cut_windows

Settings = dict[str, Any]

# SpecAttn. The ratios reach from below the paper's plateau (3 %) to well above its choice (7 %).
RATIOS = (0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.25)
GAMMAS = (1, 2, 3, 4, 5, 6, 8, 10, 12)
LARGE_GAMMA = 12
# Acceptance counts as no longer growing at this share of the highest that any ratio reaches.
PLATEAU = 0.98

# LongSpec: chains, then ever wider trees up to that of the paper.
WIDTHS = ([1], [1, 1], [1, 1, 1], [1, 1, 1, 1], [2, 2], [2, 2, 1], [3, 2, 1, 1], [4, 4, 4, 3], [4, 16, 16, 16, 11])

# EAGLE-3: likewise; its layer is cheaper than a block that reads the target's cache, so trees may be wider.
EAGLE3_WIDTHS = ([1], [1, 1], [1, 1, 1], [1] * 5, [2, 2, 2], [4, 4, 4], [4] * 5, [8] * 5)
# DFlash: nodes of a tree, which costs no further forward; none is a chain.
DFLASH_NODES = (None, 16, 32, 64)
TRAINERS_THETA = 10000.0
# Share of tau that another reading of a checkpoint must gain to be believed.
CLEAR_GAIN = 0.02

# Trees whose verification takes longer are not tried, in steps without a draft.
MOST_STEPS = 1.5

# TokenSwift: children of every node, and the most nodes of a tree that are worth a try.
BRANCHES, MOST_NODES = (1, 2, 3), 64

# Two runs of the same settings differ by a few percent; the present settings are kept unless others gain more.
NOISE = 0.03
SETTINGS_FILE = "generation_config.json"


def run(args: SimpleNamespace) -> None:
    refuse_contradictions(args)
    name, text = options.read_text(args.file, args.prompt)
    with load_models(args) as loaded:
        plan = plan_for(loaded.draft)
        loaded.require_room(f"a prompt of --context {args.context}", args.context, args.max_new_tokens + 1)
        model, ids = endless(loaded.model), loaded.encode(name, text)[0].cpu()
        windows = cut_windows([ids], args.context, args.prompts).to(model.device)
        set_seed(0)
        with noticing_others(), PromptProgress(model, windows.numel(), "Reading the prompts") as progress:
            tuner = Tuner(args, loaded, PrefilledPrompts(model, windows, args.batch, args.max_new_tokens), progress)
            best = plan(loaded.draft, TargetView(model), args.context, tuner.measure)
            chosen, present, plain = tuner.confirm(best)
        wins = chosen.options != present.options and chosen.gain_over(present) > NOISE
        winner = chosen if wins else present
        if not args.as_json:
            show(tuner.trials, winner)
        written = None if args.dry_run or not (wins or args.output) else args.output or Path(args.draft)
        if args.output is not None and written is not None:
            for key, value in winner.options.items():
                setattr(loaded.draft.generation_config, key, value)
            loaded.draft.save_pretrained(written)
        elif written is not None:
            update_settings(written, loaded.settings | winner.options)  # what --set gave was measured too
    if args.as_json:
        result = {
            **loaded.record(),
            "trials": [asdict(trial) for trial in tuner.trials],
            "present": present.options,
            "winner": winner.options,
            "gain": round(winner.gain_over(present), 4),
            "gain_over_no_draft": round(winner.gain_over(plain), 4),
            "written": None if written is None else str(written / SETTINGS_FILE),
        }
        print(json.dumps(result))
    elif wins:
        say(f"{'Not written (--dry-run)' if args.dry_run else f'Written to {written}'}: {shown(winner.options)}.")
    else:
        saved = "" if written is None else f" Saved to {written}."
        say(f"The present settings are kept: {shown(winner.options)}.{saved}")


def refuse_contradictions(args: SimpleNamespace) -> None:
    """Refuse drafts without settings to choose, and a result that could not be written, before anything is loaded."""
    if args.draft == options.AUTO:
        raise CommandError(
            f"--draft {options.AUTO} chooses a draft for a text, and tune measures the settings of one. Name the draft."
        )
    tuned = [list(one.names) for one in DRAFTS.values() if one.tune is not None]
    if args.draft in weightless_drafts() and not any(args.draft in names for names in tuned):
        others = " or ".join(name for name, *_ in tuned)
        raise CommandError(f"{args.draft} drafts have nothing to tune. Pass one of {others}.")
    if args.dry_run:
        return
    if args.output is None and not Path(args.draft).is_dir():
        raise CommandError(
            f"the draft {args.draft} is not a local folder. Pass --output FOLDER for the tuned draft, or --dry-run."
        )
    options.require_writable_folder(args.output or Path(args.draft))
    read = [args.file, args.draft, args.target]
    claim([args.output] if args.output is not None else [], read, overwrite=args.overwrite)


@dataclass(frozen=True)
class Trial:
    """One candidate, measured."""

    step: str  # the step of the procedure that tried it
    options: Settings  # settings, on top of those of the draft
    tau: float  # tokens per verification
    tokens_per_second: float  # median over the repeats

    def gain_over(self, other: "Trial") -> float:
        """How much faster this was than another candidate: 0.1 for 10 %."""
        return self.tokens_per_second / other.tokens_per_second - 1


# Decodes with every candidate in turns: the step, the candidates, and possibly how often, to one trial per candidate.
Measure = Callable[..., list[Trial]]
Plan = Callable[[Any, TargetView, int, Measure], Settings]


def fastest(trials: Sequence[Trial]) -> Settings:
    """The settings that decoded fastest; the first of equals."""
    return max(trials, key=lambda trial: trial.tokens_per_second).options


def tune_self_draft(draft: Any, target: TargetView, context: int, measure: Measure) -> Settings:
    """Tune SpecAttn in the three steps of SpecAttn's paper.

    Source: https://huggingface.co/papers/2602.07223, section 3.4.
    """
    present = float(draft.setting("sparse_ratio"))
    ratios = distinct_ratios(present, context, int(draft.setting("sparse_min_tokens")))
    chosen = present
    if len(ratios) > 1:
        wide = [{"sparse_ratio": ratio, "num_assistant_tokens": LARGE_GAMMA} for ratio in ratios]
        # acceptance does not depend on the clock, so that one run is enough
        trials = measure("1 acceptance by ratio", wide, 1)
        chosen = plateau([(trial.options["sparse_ratio"], trial.tau) for trial in trials])
    gammas = sorted({*GAMMAS, int(draft.setting("num_assistant_tokens"))})
    by_gamma = [{"sparse_ratio": chosen, "num_assistant_tokens": gamma} for gamma in gammas]
    best = fastest(measure("2 speed by gamma", by_gamma))
    place = ratios.index(chosen)
    around = [best | {"sparse_ratio": ratio} for ratio in ratios[max(place - 1, 0) : place + 2]]
    return fastest(measure("3 speed by ratio", around)) if len(around) > 1 else best


def distinct_ratios(present: float, context: int, fewest: int) -> list[float]:
    """The ratios that select different numbers of entries from `context`, `fewest` at least; `present` is one of them.

    >>> distinct_ratios(0.07, context=4096, fewest=256)
    [0.01, 0.07, 0.1, 0.15, 0.25]
    >>> distinct_ratios(0.07, context=200, fewest=256)
    [0.07]
    """
    by_entries: dict[int, float] = {}
    for ratio in (present, *RATIOS):
        by_entries.setdefault(min(context, max(fewest, math.ceil(ratio * context))), ratio)
    return sorted(by_entries.values())


def plateau(taus: Sequence[tuple[float, float]]) -> float:
    """The smallest ratio whose tau is close to the largest, from pairs of ratio and tau in ascending order.

    >>> plateau([(0.01, 2.0), (0.03, 3.95), (0.07, 3.9), (0.15, 4.0)])
    0.03
    """
    highest = max(tau for _, tau in taus)
    return next(ratio for ratio, tau in taus if tau >= PLATEAU * highest)


def tune_longspec(draft: Any, target: TargetView, context: int, measure: Measure) -> Settings:
    """The fastest of [`WIDTHS`] that the draft accepts."""
    return _fastest_tree("tree_widths", _fitting(WIDTHS, draft), draft, target, measure)


def tune_tokenswift(draft: Any, target: TargetView, context: int, measure: Measure) -> Settings:
    """The fastest of trees over 1, 2, ... heads with one number of children throughout."""
    levels = range(2, draft.config.num_heads + 2)
    trees = [[1] + [branch] * (level - 1) for branch in BRANCHES for level in levels]
    trees = [tree for tree in trees if num_static_nodes(tree) <= MOST_NODES]
    return _fastest_tree("tree_branching", trees, draft, target, measure)


def tune_eagle3(draft: Any, target: TargetView, context: int, measure: Measure) -> Settings:
    """The reading of the checkpoint that accepts most, then the fastest tree."""
    best, tree = _best_reading(draft, target, measure), list(draft.setting("tree_widths"))
    trees = [tree, *(other for other in _fitting(EAGLE3_WIDTHS, draft) if other != tree)]
    return fastest(measure("2 speed by tree", [best | {"tree_widths": widths} for widths in trees]))


def tune_dflash(draft: Any, target: TargetView, context: int, measure: Measure) -> Settings:
    """The reading of the checkpoint and the order of slots that accept most, then the chain or the fastest tree."""
    best, present = _best_reading(draft, target, measure), draft.setting("num_tree_nodes")
    causal = draft.setting("causal")
    orders = [causal, *(other for other in (None, False, True) if other is not causal)]
    best = _most_accepted(measure("1 acceptance by causal", [best | {"causal": order} for order in orders], 1))
    most = most_nodes(draft.device.type, MOST_STEPS)
    sizes = [present, *(other for other in DFLASH_NODES if other != present and (other or 0) <= most)]
    return fastest(measure("2 speed by tree", [best | {"num_tree_nodes": nodes} for nodes in sizes]))


def _best_reading(draft: Any, target: TargetView, measure: Measure) -> Settings:
    """The base of the rotary embedding and the layers with which a draft accepts most.

    Published files may be wrong about the base of the rotary embedding, as some trainers used 10000 whatever they
    declare, and about the layers that are read, as they are counted in two ways.
    """
    declared = float((draft.config.rope_parameters or {}).get("rope_theta", TRAINERS_THETA))
    present = draft.setting("rope_theta")
    thetas = {present or declared: present} | {declared: None if present in (None, declared) else declared}
    thetas.setdefault(TRAINERS_THETA, TRAINERS_THETA)
    layers = list(draft.layers_of(target.config))
    readings = [draft.setting("target_layer_ids")]
    for shift in (-1, 1):
        shifted = [layer + shift for layer in layers]
        if min(shifted) >= 0 and _accepts(draft, target, {"target_layer_ids": shifted}):
            readings.append(shifted)
    candidates = [{"rope_theta": theta, "target_layer_ids": ids} for theta in thetas.values() for ids in readings]
    # acceptance does not depend on the clock, so that one run is enough
    return _most_accepted(measure("1 acceptance by reading", candidates, 1))


def _most_accepted(trials: Sequence[Trial]) -> Settings:
    """The settings with the largest tau; the first ones if that is not clearly larger."""
    best = max(trials, key=lambda trial: trial.tau)
    return (best if best.tau > trials[0].tau * (1 + CLEAR_GAIN) else trials[0]).options


def _fitting(trees: Sequence[list[int]], draft: Any) -> list[list[int]]:
    """The trees whose verification takes no longer than [`MOST_STEPS`]."""
    return [widths for widths in trees if 1 + sum(widths) <= most_nodes(draft.device.type, MOST_STEPS)]


def _accepts(draft: Any, target: TargetView, settings: Settings) -> bool:
    try:
        with changed(draft, settings):
            draft.check(target)
    except ValueError:
        return False
    return True


def _fastest_tree(name: str, trees: Sequence[list[int]], draft: Any, target: TargetView, measure: Measure) -> Settings:
    """The fastest among the present tree and those that the draft accepts."""
    present = list(draft.setting(name))
    others = [tree for tree in trees if tree != present and _accepts(draft, target, {name: tree})]
    return fastest(measure("speed by tree", [{name: tree} for tree in [present, *others]]))


def plan_for(draft: Any) -> Plan:
    tuned = {kind: row for kind, row in DRAFTS.items() if row.tune is not None}
    if (kind := draft.config.model_type) not in tuned:
        names = " or ".join(row.names[0] for row in tuned.values())
        raise CommandError(f"{draft.config.short_name()} drafts have nothing to tune. Pass one of {names}.")
    return tuned[kind].load("tune")


def update_settings(folder: Path, settings: Settings) -> Path:
    """Set some keys of the file and keep all others; returns its path."""
    path = folder / SETTINGS_FILE
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    # not through a link: a cache may share the file with other drafts
    replace_file(path, json.dumps(content | settings, indent=2, sort_keys=True) + "\n", through_links=False)
    return path


class PrefilledPrompts:
    """Prompts that are read once, into caches of this package; every run forgets what an earlier one wrote."""

    def __init__(self, model: PreTrainedModel, windows: torch.Tensor, batch: int, tokens: int):
        """Read prompts `(P, T)`, `batch` rows together; `tokens` may follow them."""
        if TargetView(model).has_states:
            raise ValueError(
                f"{type(model).__name__} has recurrent layers, whose states after a prompt cannot be taken back to its "
                "beginning, so its drafts are not tuned. Compare settings with `hf-longspec bench`."
            )
        self.model, self.tokens = model, tokens
        self.caches = []
        for rows in windows.split(batch):
            cache = SpeculativeCache(model.config, len(rows), rows.shape[1] + tokens)
            plain = PlainDraftModel.from_target(model)
            run_call(model, plain, (rows, torch.ones_like(rows)), tokens=1, seed=0, cache=cache)
            self.caches.append((rows, cache))

    def decode(self, draft: Any, temperature: float) -> list[Measurement]:
        """Continue every prompt; random numbers are the same for every draft.

        All but the tokens at which a drafter looks first are in the cache. They run before the first new token, when
        the clock starts.
        """
        nodes, calls = draft.num_tree_nodes(TargetView(self.model)), []
        for seed, (rows, cache) in enumerate(self.caches):
            cache.rollback()
            cache.set_lengths([max(0, rows.shape[1] - max(nodes, draft.prompt_tokens))] * len(rows))
            prompt, how = (rows, torch.ones_like(rows)), sampling(temperature)
            calls.append(run_call(self.model, draft, prompt, tokens=self.tokens, seed=seed, decoding=how, cache=cache))
        return calls


@dataclass
class Tuner:
    """Measure candidates; the trials so far."""

    args: SimpleNamespace  # options of the command
    loaded: LoadedModels  # target and draft
    prompts: PrefilledPrompts
    progress: Progress  # advances by one for every run
    trials: list[Trial] = field(default_factory=list)

    def measure(self, step: str, candidates: Sequence[Settings], repeats: int | None = None) -> list[Trial]:
        """Decode with every candidate in turns; one trial per candidate."""
        return self._in_turns(step, [(step, self.loaded.draft, settings) for settings in candidates], repeats)

    def confirm(self, chosen: Settings) -> list[Trial]:
        """The choice, the present settings and decoding without a draft, once more against each other."""
        draft, plain = self.loaded.draft, PlainDraftModel.from_target(self.loaded.model)
        present = {name: draft.setting(name) for name in chosen}
        methods = [("chosen", draft, chosen), ("present", draft, present), ("no draft", plain, {})]
        return self._in_turns("comparison with the present settings", methods)

    def _in_turns(self, task: str, methods: list[tuple[str, Any, Settings]], repeats: int | None = None) -> list[Trial]:
        """Decode with `(step, draft, settings)` each in turns, after a warm-up."""
        repeats = repeats or self.args.repeats
        self.progress.next(f"Measuring: {task}", len(methods) * repeats)
        runs: list[list[tuple[float, float]]] = [[] for _ in methods]
        for turn in range(repeats):
            for place in rotated(range(len(methods)), turn):
                _, draft, settings = methods[place]
                if not turn:
                    self._decode(draft, settings)
                runs[place].append(self._decode(draft, settings))
                self.progress.step()
                self.progress.say(f"Measuring: {task}, {runs[place][-1][0]:.1f} tokens/s in the last run")
        trials = [
            Trial(step, settings, known[-1][1], statistics.median(speed for speed, _ in known))
            for (step, _, settings), known in zip(methods, runs, strict=True)
        ]
        self.trials += trials
        return trials

    def _decode(self, draft: Any, settings: Settings) -> tuple[float, float]:
        """Tokens per second and tau over all prompts."""
        # the gate is off while speculation is measured, which must not be written with the choice
        ungated = {"gate": False} if "gate" in draft.settings else {}
        with changed(draft, ungated | settings):
            calls = self.prompts.decode(draft, float(self.args.sample))
        tokens = sum(call.tokens for call in calls)
        return tokens / sum(call.decode_seconds for call in calls), tokens / sum(call.steps for call in calls)


def show(trials: Sequence[Trial], winner: Trial) -> None:
    """Print all trials as a table, and the gain of the choice; the last three are those of the comparison."""
    chosen, present, plain = trials[-3:]
    table = Table("step", "settings", Column("tau", justify="right"), Column("tokens/s", justify="right"))
    for trial in trials:
        numbers = f"{trial.tau:.2f}", f"{trial.tokens_per_second:.1f}"
        style = "bold green" if trial is winner else None
        table.add_row(trial.step, shown(trial.options), *numbers, style=style)
    Console(highlight=False).print(table)
    say("tau: tokens per verification, bonus token included. tokens/s: over all prompts.")
    say(
        f"Best settings: {1 + chosen.gain_over(present):.2f}x the speed of the present ones, "
        f"{1 + chosen.gain_over(plain):.2f}x that of decoding without a draft."
    )
    if winner.gain_over(plain) < 0:
        say("On this text and machine, decoding without a draft is faster.")


def shown(settings: Settings) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())
