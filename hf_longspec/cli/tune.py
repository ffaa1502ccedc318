"""`hf-longspec tune`: the fastest settings of a draft, measured on the user's text and machine."""

import json
import math
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Protocol

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import set_seed

from ..bench.calls import changed, endless
from ..bench.prefill import Decoder, prefill
from ..bench.progress import Progress
from ..bench.prompts import cut_windows
from ..bench.summaries import in_turns
from ..cli import CommandError
from ..generation.draft_tree import num_static_nodes
from ..generation.target import TargetView
from ..modeling.plain.modeling_plain import PlainDraftModel
from ..modeling.register_draft import DRAFTS, weightless_drafts
from .options import (
    Debug,
    Device,
    Draft,
    Dtype,
    Json,
    Prompt,
    Setting,
    Target,
    at_least,
    one_line_errors,
    read_settings,
    read_text,
)
from .session import Session, opened

Options = dict[str, Any]

# SpecAttn. The ratios reach from below the paper's plateau (3 %) to well above its choice (7 %).
RATIOS = (0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.25)
GAMMAS = (1, 2, 3, 4, 5, 6, 8, 10, 12)
LARGE_GAMMA = 12
# Acceptance counts as no longer growing at this share of the highest that any ratio reaches.
PLATEAU = 0.98

# LongSpec: chains, then ever wider trees up to the default.
WIDTHS = ([1], [1, 1], [1, 1, 1], [1, 1, 1, 1], [2, 2], [2, 2, 1], [3, 2, 1, 1], [4, 4, 4, 3])

# TokenSwift: children of every node, and the most nodes of a tree that are worth a try.
BRANCHES, MOST_NODES = (1, 2, 3), 64


@dataclass(frozen=True)
class Trial:
    """One candidate, measured.

    Args:
        step (`str`): The step of the procedure that tried it.
        options (`dict[str, Any]`): Settings, on top of those of the draft.
        tau (`float`): Tokens per verification.
        tokens_per_second (`float`): Median over the repeats.
    """

    step: str
    options: Options
    tau: float
    tokens_per_second: float


class Measure(Protocol):
    """Decodes with every candidate in turns."""

    def __call__(self, step: str, candidates: Sequence[Options], repeats: int | None = None) -> list[Trial]:
        """One trial per candidate; `repeats` defaults to what the user wants."""


def fastest(trials: Sequence[Trial]) -> Options:
    """The settings that decoded fastest; the first of equals."""
    return max(trials, key=lambda trial: trial.tokens_per_second).options


def tune_specattn(draft: Any, target: TargetView, context: int, measure: Measure) -> Options:
    """The paper's three steps.

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


def tune_longspec(draft: Any, target: TargetView, context: int, measure: Measure) -> Options:
    """The fastest of [`WIDTHS`] that the draft accepts."""
    return _fastest_tree("tree_widths", WIDTHS, draft, target, measure)


def tune_tokenswift(draft: Any, target: TargetView, context: int, measure: Measure) -> Options:
    """The fastest of trees over 1, 2, ... heads with one number of children throughout."""
    levels = range(2, draft.config.num_heads + 2)
    trees = [[1] + [branch] * (level - 1) for branch in BRANCHES for level in levels]
    trees = [tree for tree in trees if num_static_nodes(tree) <= MOST_NODES]
    return _fastest_tree("tree_branching", trees, draft, target, measure)


def _fastest_tree(name: str, trees: Sequence[list[int]], draft: Any, target: TargetView, measure: Measure) -> Options:
    present = list(draft.setting(name))
    trees = [present, *(tree for tree in trees if tree != present)]
    return fastest(measure("speed by tree", [{name: tree} for tree in trees if _accepts(draft, target, name, tree)]))


def _accepts(draft: Any, target: TargetView, name: str, value: Any) -> bool:
    before = getattr(draft.generation_config, name)
    try:
        setattr(draft.generation_config, name, value)
        draft.check(target)
    except ValueError:
        return False
    finally:
        setattr(draft.generation_config, name, before)
    return True


Plan = Callable[[Any, TargetView, int, Measure], Options]


def plan_for(draft: Any) -> Plan:
    """Return the function that tunes this kind of draft.

    Raises:
        CommandError: If it is not.
    """
    kind, tuned = draft.config.model_type, [kind for kind, row in DRAFTS.items() if row.tune is not None]
    if kind not in tuned:
        raise CommandError(f"a draft of type {kind} is not tuned: pass one of type {' or '.join(tuned)}.")
    plan: Plan = DRAFTS[kind].load("tune")
    return plan


SETTINGS_FILE = "generation_config.json"


def update_settings(folder: Path, settings: dict[str, Any]) -> Path:
    """Set some keys of the file and keep all others; returns its path.

    The new content is written beside the old file and takes its place when it is complete, so that a reader finds the
    old file or the new one, also after an error.

    Raises:
        OSError: If it cannot be written; the old file is as it was.
    """
    path = folder / SETTINGS_FILE
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    handle, name = tempfile.mkstemp(prefix=f".{SETTINGS_FILE}.", dir=folder)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(json.dumps(content | settings, indent=2, sort_keys=True) + "\n")
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, name)
        else:
            os.chmod(name, 0o644)  # a temporary file is its owner's alone
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    return path


# Two runs of the same settings differ by a few percent; the present settings stay unless others gain more.
NOISE = 0.03


@dataclass(frozen=True)
class TuneOptions:
    """The lengths of the runs."""

    context: int = 4096
    prompts: int = 2
    batch: int = 1
    max_new_tokens: int = 64
    repeats: int = 3
    sample: bool = False

    @property
    def mode(self) -> str:
        """One of `MODES`."""
        return "sample" if self.sample else "greedy"


def check_destination(draft: str, output: Path | None, dry_run: bool) -> None:
    """Refuse, before anything is measured, a draft that could not be written.

    Raises:
        CommandError: If there is no place for it.
    """
    if dry_run:
        return
    if output is not None:
        if output.exists() and (not output.is_dir() or any(output.iterdir())):
            raise CommandError(f"--output {output} is not empty: pass a new folder, or --dry-run.")
        return
    folder = Path(draft)
    if draft in weightless_drafts() or not folder.is_dir():
        raise CommandError(
            f"the draft {draft} is not in a folder: pass --output FOLDER for the tuned one, or --dry-run."
        )
    if not os.access(folder, os.W_OK):
        raise CommandError(f"cannot write to {folder}: pass --output FOLDER for the tuned draft, or --dry-run.")


@dataclass
class Tuner:
    """Measure candidates; the trials so far."""

    session: Session
    decoder: Decoder
    options: TuneOptions
    progress: Progress
    trials: list[Trial] = field(default_factory=list)

    def __call__(self, step: str, candidates: Sequence[Options], repeats: int | None = None) -> list[Trial]:
        """See [`Measure`]."""
        draft = self.session.draft
        return self._in_turns(step, [(step, draft, options) for options in candidates], repeats or self.options.repeats)

    def confirm(self, chosen: Options) -> list[Trial]:
        """The choice, the present settings and decoding without a draft, once more against each other."""
        draft, plain = self.session.draft, PlainDraftModel.from_target(self.session.model)
        present = {name: draft.setting(name) for name in chosen}
        methods = [("chosen", draft, chosen), ("present", draft, present), ("no draft", plain, {})]
        return self._in_turns("comparison with the present settings", methods, self.options.repeats)

    def _in_turns(self, task: str, methods: list[tuple[str, Any, Options]], repeats: int) -> list[Trial]:
        """Decode with `(step, draft, options)` each in turns, after a warm-up."""
        self.progress.next(f"Measuring: {task}", len(methods) * (repeats + 1))
        for _, draft, options in methods:  # the first run is slow, and not measured
            self._decode(draft, options)
        speeds: list[list[float]] = [[] for _ in methods]
        taus = [0.0] * len(methods)
        for _, name in in_turns(list(map(str, range(len(methods)))), repeats):
            place = int(name)
            speed, taus[place] = self._decode(*methods[place][1:])
            speeds[place].append(speed)
        found = [
            Trial(step, options, tau, statistics.median(speed))
            for (step, _, options), tau, speed in zip(methods, taus, speeds, strict=True)
        ]
        self.trials += found
        return found

    def _decode(self, draft: Any, options: Options) -> tuple[float, float]:
        """Tokens per second and tau over all prompts; random numbers are the same for every candidate."""
        prompts, batch = len(self.decoder.prompts.tokens), self.options.batch
        seconds = tokens = steps = 0.0
        # decoding that is measured switches the gate off, which must not be written with the choice
        ungated = {"gate": False} if "gate" in draft.settings else {}
        with changed(draft, ungated | options):
            for start in range(0, prompts, batch):
                rows = slice(start, min(start + batch, prompts))
                run = self.decoder.run(draft, rows, self.options.context, self.options.mode, seed=start)
                seconds, tokens, steps = seconds + run.decode_seconds, tokens + run.tokens, steps + run.steps
        self.progress.step()
        return tokens / seconds, tokens / steps


def run(
    session: Session, name: str, text: str, options: TuneOptions, output: Path | None, dry_run: bool, as_json: bool
) -> None:
    """Measure, choose, show and write."""
    plan = plan_for(session.draft)
    windows = _windows(session, name, text, options)
    model = endless(session.model)
    set_seed(0)
    with Progress(len(windows), "Reading the prompts") as progress:
        prompts = prefill(model, windows, lambda index: progress.step())
        tuner = Tuner(session, Decoder(model, prompts, options.max_new_tokens), options, progress)
        best = plan(session.draft, TargetView(model), options.context, tuner)
        chosen, present, plain = tuner.confirm(best)
    wins = chosen.options != present.options and _gain(chosen, present) > NOISE
    winner = chosen if wins else present
    destination = None if dry_run else output or Path(session.draft_name)
    if not as_json:
        _show(tuner.trials, winner, chosen, present, plain)
    if destination is not None and (wins or output is not None):
        _write(session, winner.options, destination, is_new=output is not None)
    else:
        destination = None
    if as_json:
        print(json.dumps(_record(session, options, tuner.trials, winner, present, plain, destination)))
    else:
        print(_outcome(winner.options, wins, destination, dry_run))


def _windows(session: Session, name: str, text: str, options: TuneOptions) -> torch.Tensor:
    """Prompts `(prompts, context)` spread over the text."""
    session.require_room(f"a prompt of --context {options.context}", options.context, options.max_new_tokens + 1)
    ids = session.encode(name, text)[0].cpu()
    if len(ids) < options.context:
        raise CommandError(
            f"{name} has {len(ids)} tokens, and a prompt is to have {options.context}: pass a longer text, or "
            f"--context {len(ids)} at most."
        )
    return cut_windows([ids], options.context, options.prompts).to(session.model.device)


def _gain(trial: Trial, other: Trial) -> float:
    return trial.tokens_per_second / other.tokens_per_second - 1


def _write(session: Session, settings: Options, destination: Path, is_new: bool) -> None:
    if not is_new:
        update_settings(destination, session.settings | settings)  # what --set gave was measured too
        return
    for name, value in settings.items():
        setattr(session.draft.generation_config, name, value)
    session.draft.save_pretrained(destination)


def _record(
    session: Session,
    options: TuneOptions,
    trials: list[Trial],
    winner: Trial,
    present: Trial,
    plain: Trial,
    destination: Path | None,
) -> dict[str, Any]:
    return {
        "target": session.target,
        "draft": session.draft_name,
        "dtype": session.dtype,
        "device": str(session.model.device),
        "options": asdict(options),
        "trials": [asdict(trial) for trial in trials],
        "present": present.options,
        "winner": winner.options,
        "gain": round(_gain(winner, present), 4),
        "gain_over_no_draft": round(_gain(winner, plain), 4),
        "written": None if destination is None else str(destination / SETTINGS_FILE),
    }


def _show(trials: list[Trial], winner: Trial, chosen: Trial, present: Trial, plain: Trial) -> None:
    """Print all trials as a table, and the gain of the choice."""
    console = Console(highlight=False)
    table = Table()
    for heading in ("step", "settings"):
        table.add_column(heading)
    for heading in ("tau", "tokens/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for trial in trials:
        style = "bold green" if trial is winner else None
        table.add_row(
            trial.step, _shown(trial.options), f"{trial.tau:.2f}", f"{trial.tokens_per_second:.1f}", style=style
        )
    console.print(table)
    console.print("tau: tokens per verification, the model's own included. tokens/s: of all prompts decoded together.")
    console.print(
        f"The choice runs at {1 + _gain(chosen, present):.2f}x the speed of the present settings and at "
        f"{1 + _gain(chosen, plain):.2f}x that of decoding without a draft."
    )
    if _gain(winner, plain) < 0:
        console.print("On this text and machine the draft does not pay: decoding without one is faster.")


def _shown(options: Options) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items())


def _outcome(winner: Options, wins: bool, destination: Path | None, dry_run: bool) -> str:
    if not wins:
        kept = f"The present settings stay: {_shown(winner)}."
        return kept if destination is None else f"{kept} Saved to {destination}."
    return f"{'Not written (--dry-run)' if dry_run else f'Written to {destination}'}: {_shown(winner)}."


DryRun = Annotated[bool, typer.Option("--dry-run", help="Measure and show, write nothing.")]


def tune(
    target: Target,
    file: Annotated[Path | None, typer.Argument(help="Text of the kind to be continued; - for standard input.")] = None,
    prompt: Prompt = None,
    draft: Draft = "specattn",
    output: Annotated[Path | None, typer.Option(help="New folder for the tuned draft.", show_default=False)] = None,
    dry_run: DryRun = False,
    context: Annotated[int, typer.Option(help="Tokens of a prompt.", callback=at_least(32))] = 4096,
    prompts: Annotated[int, typer.Option(help="Prompts, spread over the text.", callback=at_least(1))] = 2,
    batch: Annotated[int, typer.Option(help="Prompts that are decoded together.", callback=at_least(1))] = 1,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens per prompt and run.", callback=at_least(4))] = 64,
    repeats: Annotated[int, typer.Option(help="Runs of a candidate; their median counts.", callback=at_least(1))] = 3,
    sample: Annotated[bool, typer.Option("--sample", help="At temperature 1 instead of greedily.")] = False,
    setting: Setting = None,
    dtype: Dtype = "auto",
    device: Device = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Find the fastest settings of a draft for a text and a machine, and write them into the draft.

    specattn: in the three steps of its paper. The share of the cache that drafting reads is raised until acceptance no
    longer grows; then the number of drafted tokens is chosen by speed, and the share once more around its value.
    LongSpec: the widths of its tree. TokenSwift: the branching of its tree. Prompts are taken from the text and read
    once; all candidates decode after them in turns.

    The winner replaces the present settings if it is faster than they are by more than noise. A draft in a folder gets
    a new generation_config.json, in one step or not at all; other drafts are saved to --output.

    Examples:

    \b
    hf-longspec tune notes.txt --target Qwen/Qwen3-0.6B --dry-run
    hf-longspec tune notes.txt --target Qwen/Qwen3-0.6B --context 16384 --output tuned
    hf-longspec tune notes.txt --target Qwen/Qwen3-0.6B --draft ./draft

    Exit status: 0, also if the present settings stay; 2 for what cannot be run; 130 after Ctrl-C.
    """
    with one_line_errors(debug):
        how = TuneOptions(context, prompts, batch, max_new_tokens, repeats, sample)
        check_destination(draft, output, dry_run)
        name, text = read_text(file, prompt)
        with opened(target, draft, read_settings(setting), dtype, device) as session:
            run(session, name, text, how, output, dry_run, as_json)
