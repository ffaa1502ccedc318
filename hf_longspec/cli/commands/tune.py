"""`hf-longspec tune`: the fastest settings of a draft, measured on the user's text and machine."""

import hashlib
import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from hf_longspec import __version__

from .. import CommandError, options


def tune(
    target: options.Target,
    file: Annotated[Path | None, typer.Argument(help="Text of the kind to be continued; - for standard input.")] = None,
    prompt: options.Prompt = None,
    draft: options.Draft = "specattn",
    output: Annotated[
        Path | None, options.output("New folder for the tuned draft.", options.require_writable_folder)
    ] = None,
    results: Annotated[
        Path, options.output("File that keeps what was measured until the end.", suffix=".jsonl")
    ] = Path("tune.jsonl"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted measurement.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Measure and show, write nothing.")] = False,
    context: Annotated[int, options.number(32, "Tokens of a prompt.")] = 4096,
    prompts: Annotated[int, options.number(1, "Prompts, spread over the text.")] = 2,
    batch: Annotated[int, options.number(1, "Prompts that are decoded together.", most=options.MOST_ROWS)] = 1,
    max_new_tokens: Annotated[int, options.number(4, "Tokens per prompt and run.")] = 64,
    repeats: Annotated[int, options.number(1, "Runs of a candidate; their median counts.")] = 3,
    sample: Annotated[bool, typer.Option("--sample", help="At temperature 1 instead of greedily.")] = False,
    setting: options.Setting = None,
    dtype: options.Dtype = options.DtypeName.auto,
    device: options.Device = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Find the fastest settings of a draft for a text and a machine, and write them into the draft.

    specattn: in the three steps of its paper. The share of the cache that drafting reads is raised until acceptance no
    longer grows; then the number of drafted tokens is chosen by speed, and the share once more around its value.
    LongSpec: the widths of its tree. TokenSwift: the branching of its tree. EAGLE-3: what its checkpoint may be wrong
    about (rope_theta, layers), by tau, and the widths of its tree. Prompts are taken from the text and read
    once; all candidates decode after them in turns.

    The winner replaces the present settings if it is faster than they are by more than noise. A draft in a folder gets
    a new generation_config.json, in one step or not at all; other drafts are saved to --output.

    Examples:

    - hf-longspec tune notes.txt --target Qwen/Qwen3-0.6B --dry-run
    - hf-longspec tune notes.txt --target Qwen/Qwen3-0.6B --context 16384 --output tuned
    - hf-longspec tune notes.txt --target Qwen/Qwen3-0.6B --draft ./draft

    Exit status: 0, also if the present settings stay; 2 for what cannot be run; 130 after Ctrl-C.
    """
    with options.one_line_errors(debug):
        from transformers import set_seed

        from ...bench.calls import endless
        from ...bench.prefill import Decoder, prefill
        from ...bench.progress import Progress
        from ...bench.prompts import cut_windows
        from ...bench.results import ResultFile, check_resume
        from ...generation.target import TargetView
        from ..session import describe_device, opened, say
        from ..tune import NOISE, SETTINGS_FILE, Tuner, check_destination, plan_for, show, shown, update_settings

        check_resume(results, resume)
        if not dry_run:
            check_destination(draft, output)
        name, text = options.read_text(file, prompt)
        with opened(target, draft, options.read_settings(setting), dtype, device) as session:
            plan = plan_for(session.draft)
            session.require_room(f"a prompt of --context {context}", context, max_new_tokens + 1)
            ids = session.encode(name, text)[0].cpu()
            if len(ids) < context:
                raise CommandError(
                    f"{name} has {len(ids)} tokens, and a prompt is to have {context}: pass a longer text, or "
                    f"--context {len(ids)} at most."
                )
            windows = cut_windows([ids], context, prompts).to(session.model.device)
            model = endless(session.model)
            set_seed(0)
            how = {"context": context, "prompts": prompts, "batch": batch, "max_new_tokens": max_new_tokens}
            how |= {"repeats": repeats, "sample": sample}
            digest = hashlib.sha256(windows.cpu().numpy().tobytes()).hexdigest()[:16]
            asked = {**session.record(), "set": session.settings, **how, "text_sha256": digest}
            facts = {"device": describe_device(model.device), "hf_longspec": __version__}
            kept = ResultFile(results, "tune", None, math.inf, asked, facts, resume)
            try:
                with kept, Progress(len(windows), "Reading the prompts") as progress:
                    decoder = Decoder(model, prefill(model, windows, lambda index: progress.step()), max_new_tokens)
                    mode = "sample" if sample else "greedy"
                    tuner = Tuner(session, decoder, context, batch, repeats, mode, progress, kept)
                    best = plan(session.draft, TargetView(model), context, tuner.measure)
                    chosen, present, plain = tuner.confirm(best)
            except KeyboardInterrupt as error:
                print(f"\nInterrupted; what was measured is kept in {results}. --resume goes on.", file=sys.stderr)
                raise typer.Exit(options.INTERRUPTED) from error
            wins = chosen.options != present.options and chosen.gain_over(present) > NOISE
            winner = chosen if wins else present
            if not as_json:
                show(tuner.trials, winner)
            written = None if dry_run or not (wins or output) else output or Path(draft)
            if written is not None and output is None:
                update_settings(written, session.settings | winner.options)  # what --set gave was measured too
            elif written is not None:
                for key, value in winner.options.items():
                    setattr(session.draft.generation_config, key, value)
                session.draft.save_pretrained(written)
        results.unlink()
        if as_json:
            found = {
                **session.record(),
                "options": how,
                "trials": [asdict(trial) for trial in tuner.trials],
                "present": present.options,
                "winner": winner.options,
                "gain": round(winner.gain_over(present), 4),
                "gain_over_no_draft": round(winner.gain_over(plain), 4),
                "written": None if written is None else str(written / SETTINGS_FILE),
            }
            print(json.dumps(found))
        elif wins:
            say(f"{'Not written (--dry-run)' if dry_run else f'Written to {written}'}: {shown(winner.options)}.")
        else:
            saved = "" if written is None else f" Saved to {written}."
            say(f"The present settings stay: {shown(winner.options)}.{saved}")
