"""Measuring the candidates of a draft's settings, choosing among them and writing the choice."""

import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import set_seed

from ..bench.acceptance import changed
from ..bench.decoding import Decoder, endless
from ..bench.prefill import prefill
from ..bench.prompts import cut_windows
from ..bench.timing import in_turns
from ..generation.target import TargetView
from ..modeling.modeling_plain import PlainDraftModel
from . import CommandError
from .progress import Bar, bar
from .session import TRAINING_FREE, Session
from .settings_file import NAME, update_settings
from .tune_plans import Options, Trial, plan_for

# Two runs of one thing differ by a few percent; the present settings stay unless others gain more.
NOISE = 0.03


@dataclass(frozen=True)
class TuneOptions:
    """What to decode; the options of the command."""

    context: int = 4096
    prompts: int = 2
    batch: int = 1
    max_new_tokens: int = 64
    repeats: int = 3
    sample: bool = False

    @property
    def mode(self) -> str:
        """As the benchmark calls it."""
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
    if draft in TRAINING_FREE or not folder.is_dir():
        raise CommandError(
            f"the draft {draft} is not in a folder: pass --output FOLDER for the tuned one, or --dry-run."
        )
    if not os.access(folder, os.W_OK):
        raise CommandError(f"cannot write to {folder}: pass --output FOLDER for the tuned draft, or --dry-run.")


@dataclass
class Tuner:
    """Measures candidates; the trials so far."""

    session: Session
    decoder: Decoder
    options: TuneOptions
    progress: Bar
    trials: list[Trial] = field(default_factory=list)

    def __call__(self, step: str, candidates: Sequence[Options], repeats: int | None = None) -> list[Trial]:
        """See [`tune_plans.Measure`]."""
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
        for _, draft, options in methods:  # what is slow only the first time is not measured
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
                seconds, tokens, steps = seconds + run.seconds, tokens + run.tokens, steps + run.steps
        self.progress.advance()
        return tokens / seconds, tokens / steps


def run(
    session: Session, name: str, text: str, options: TuneOptions, output: Path | None, dry_run: bool, as_json: bool
) -> None:
    """The command behind its options."""
    plan = plan_for(session.draft)
    windows = _windows(session, name, text, options)
    model = endless(session.model)
    set_seed(0)
    with bar("Reading the prompts", len(windows)) as progress:
        prompts = prefill(model, windows, lambda index: progress.advance())
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
        "written": None if destination is None else str(destination / NAME),
    }


def _show(trials: list[Trial], winner: Trial, chosen: Trial, present: Trial, plain: Trial) -> None:
    """All trials as a table, and what they say."""
    console = Console(highlight=False)
    table = Table()
    for heading in ("step", "settings"):
        table.add_column(heading)
    for heading in ("tau", "tokens/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for trial in trials:
        style = "bold green" if trial is winner else None
        table.add_row(
            trial.step, _written(trial.options), f"{trial.tau:.2f}", f"{trial.tokens_per_second:.1f}", style=style
        )
    console.print(table)
    console.print("tau: tokens per verification, the model's own included. tokens/s: of all prompts decoded together.")
    console.print(
        f"The choice runs at {1 + _gain(chosen, present):.2f}x the speed of the present settings and at "
        f"{1 + _gain(chosen, plain):.2f}x that of decoding without a draft."
    )
    if _gain(winner, plain) < 0:
        console.print("On this text and machine the draft does not pay: decoding without one is faster.")


def _written(options: Options) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items())


def _outcome(winner: Options, wins: bool, destination: Path | None, dry_run: bool) -> str:
    if not wins:
        kept = f"The present settings stay: {_written(winner)}."
        return kept if destination is None else f"{kept} Saved to {destination}."
    return f"{'Not written (--dry-run)' if dry_run else f'Written to {destination}'}: {_written(winner)}."
