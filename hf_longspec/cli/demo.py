"""`hf-longspec demo`: one document, continued with and without drafts, a timed call each as in `hf-longspec bench`."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from transformers.utils import CONFIG_NAME

from ..cli import BUILTIN, CommandError, options
from ..modeling.plain.modeling_plain import PlainDraftModel
from ..streaming import FileStreamer
from .bench import name_of, record_of, rows_of, show, ungated
from .measuring import FAILED, HF, PLAIN, HfMethod, Measurement, judge, run_call
from .models import LoadedModels, describe_device, load_models, open_draft, positions_of
from .progress import PromptProgress, noticing_others, say
from .texts import read_source

# The folder that holds the package, which in a checkout holds the tiny models too.
HOME = Path(__file__).resolve().parents[2]
TINY_TARGET, TINY_DRAFTS = "tiny-target", ("tiny-tokenswift", "tiny-longspec")
WARM_UP_PROMPT, WARM_UP_TOKENS = 64, 8
TAIL_CHARACTERS = 300  # of the prompt, shown before its continuation


def run(args: SimpleNamespace) -> bool:
    """Measure and show; returns whether a text is wrong."""
    if args.draft == options.AUTO:
        raise CommandError(f"--draft {args.draft} chooses a draft, and here drafts are compared. Name one.")
    args.target = args.target or tiny_target()
    if args.file is None:
        name, document = "a module of the standard library", read_source(BUILTIN)[0]
    else:
        name, document = options.read_text(args.file, None)
    names = draft_names(args.target, args.draft)
    with load_models(args, names) as loaded:
        loaded.require_room("the shortest prompt", 1, args.max_new_tokens)
        room = positions_of(loaded.config) - args.max_new_tokens
        ids = loaded.encode(name, document)[:, : min(args.context, room)]
        say(f"Loading {args.target}.")
        model = loaded.model
        drafts = {name_of(draft): ungated(open_draft(draft, model)) for draft in names}
        size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
        say(
            f"{type(model).__name__}, {size:.1f}M parameters, {str(model.dtype).removeprefix('torch.')}, "
            f"{describe_device(model.device)}. Prompt: {ids.shape[1]} tokens of {name}.\n"
        )
        methods = {**drafts, HF: HfMethod(), PLAIN: PlainDraftModel.from_target(model)}
        # the last draft first, because its text is the one to show
        order = [*reversed(drafts), HF, PLAIN]
        with noticing_others(one_thread=True):
            calls = {
                method: measure(loaded, method, methods[method], ids, args.max_new_tokens, shown=not turn)
                for turn, method in enumerate(order)
            }
        texts = {method: judge(model, ids, calls[method], calls[HF]) for method in methods}
    rows = rows_of(record_of(calls[method], ids.shape[1], method, 0, texts[method]) for method in methods)
    show(rows)
    if wrong := [method for method in methods if texts[method] in FAILED]:
        say(f"Wrong text: {', '.join(wrong)}. Please report this.")
    else:
        best = max((row for row in rows if row["method"] in drafts), key=lambda row: row["ratio_to_generate"]["median"])
        say(f"{best['method']}: {best['ratio_to_generate']['median']:.1f}x generate, text {best['text']}.")
    return bool(wrong)


def tiny_model(name: str) -> Path:
    """The folder of a tiny model in the checkout that the package lies in, or in the current folder."""
    folders = [folder / "hub_cards" / name for folder in (HOME, Path.cwd())]
    return next((folder for folder in folders if (folder / CONFIG_NAME).is_file()), folders[-1])


def tiny_target() -> str:
    """The folder of the tiny target that comes with the repository."""
    folder = tiny_model(TINY_TARGET)
    if not (folder / CONFIG_NAME).is_file():
        raise CommandError(
            f"the tiny target is not at {folder}. Run this in a checkout of the repository, or pass --target."
        )
    return str(folder)


def draft_names(target: str, draft: str | None) -> list[str]:
    """The draft that the user named; otherwise those without training, and for the tiny target the trained ones."""
    if draft is not None:
        return [draft]
    is_tiny = target == str(tiny_model(TINY_TARGET))
    trained = [tiny_model(name) for name in TINY_DRAFTS] if is_tiny else []
    return ["ngram", "specattn", *(str(folder) for folder in trained if folder.is_dir())]


def measure(
    loaded: LoadedModels, name: str, method: Any, ids: torch.Tensor, tokens: int, *, shown: bool
) -> Measurement:
    """Measure one way to continue `ids` `(1, length)`, under a bar; with `shown` the text is printed as it comes."""

    def call(ids: torch.Tensor, tokens: int, **how: Any) -> Measurement:
        return run_call(loaded.model, method, (ids, torch.ones_like(ids)), tokens=tokens, seed=0, **how)

    call(ids[:, -WARM_UP_PROMPT:], WARM_UP_TOKENS)  # the first call is slow, and not measured
    console = Console(highlight=False, soft_wrap=True)
    with PromptProgress(loaded.model, ids.shape[1], name, 0 if shown else tokens) as bar:

        def arrived(count: int) -> None:
            bar.arrived(count)
            if count == 1 and shown:  # the prompt has been read
                tail = loaded.tokenizer.decode(ids[0], skip_special_tokens=True)[-TAIL_CHARACTERS:]
                console.print(tail, style="dim", end="", markup=False)

        text = FileStreamer(loaded.tokenizer, sys.stdout) if shown else None
        measured = call(ids, tokens, on_arrival=arrived, text=text)
    if shown:
        print("\n")
    return measured
