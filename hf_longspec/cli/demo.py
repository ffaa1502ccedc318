"""`hf-longspec demo`: one document, continued with and without drafts, a timed call each as in `hf-longspec bench`."""

import re
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers import PreTrainedModel

from ..auditing import NEAR_TIE
from ..cli import BUILTIN, CommandError, models, options
from ..modeling.plain.modeling_plain import PlainDraftModel
from ..streaming import FileStreamer
from .bench import load_drafts
from .measuring import FAILED, IDENTICAL, REFERENCE, HfMethod, Measurement, judge, run_call
from .models import PromptProgress
from .texts import read_source

GENERATE, NO_DRAFT = "generate", "no draft"
WARM_UP_PROMPT, WARM_UP_TOKENS, SHORTEST_PROMPT = 64, 8, 32
# A prompt is shortened to what takes so many seconds in all, estimated from a call with a piece of so many tokens.
MOST_SECONDS, PIECE = 60, 512
# A prompt is cut after the third of at least six words of a line, so that the continuation is the rest of a sentence.
CUT = re.compile(r".*\n(?:[^\n]*?\b[A-Za-z]{2,}\b){3}(?=(?:[^\n]*?\b[A-Za-z]{2,}\b){3})", re.DOTALL)
TAIL_CHARACTERS = 300  # of the prompt, shown before its continuation
STYLES = {IDENTICAL: "green", "exact": "green", REFERENCE: "dim", NEAR_TIE: "yellow"}


def run(args: SimpleNamespace) -> bool:
    """Measure and show; returns whether a text is wrong."""
    if args.draft == options.AUTO:
        raise CommandError(f"--draft {args.draft} chooses a draft, and here drafts are compared. Name one.")
    console = Console(highlight=False)
    target, context = models.find_target(args.target), args.context
    options.require_target(target)
    name, document = read_document() if args.file is None else options.read_text(args.file, None)
    name = name if args.file is None else args.file.name
    with ExitStack() as stack:
        stack.enter_context(models.quiet(progress_bars=not Path(target).is_dir()))
        config = models.load_config(target)
        names = draft_names(target, args.draft)
        for draft in names:
            models.check_draft(draft, config)
        tokenizer = models.load_tokenizer(target)
        room = models.positions_of(config) - args.max_new_tokens
        if room < SHORTEST_PROMPT:
            raise CommandError(
                f"--max-new-tokens {args.max_new_tokens} leave less than {SHORTEST_PROMPT} of the "
                f"{room + args.max_new_tokens} positions of the model for the prompt. Pass fewer."
            )
        console.print(f"Loading {target}.", markup=False)
        model = models.load_target(target, models.dtype_of(args.dtype, models.default_device()))
        drafts = load_drafts(names, model)
        stack.enter_context(models.noticing_others(one_thread=True))
        text, ids = make_prompt(tokenizer, name, document, min(context or options.DEMO_CONTEXT, room))
        if (read := ids.shape[1]) > PIECE:
            with console.status("Estimating the time"):
                needed, fitting = estimate(model, ids, args.max_new_tokens, 2 + len(drafts))
            models.say(f"{read:,} tokens of {name} take about {models.duration(needed)} or more.")
            if args.context is None and fitting < read:
                text, ids = make_prompt(tokenizer, name, document, fitting)
                models.say("The prompt is shortened to what takes about a minute; --context reads more.")
        size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
        console.print(
            f"{type(model).__name__}, {size:.1f}M parameters, {str(model.dtype).removeprefix('torch.')}, "
            f"{models.describe_device(model.device)}. Prompt: {ids.shape[1]} tokens of {name}.\n",
            markup=False,
        )
        plain = {GENERATE: HfMethod(), NO_DRAFT: PlainDraftModel.from_target(model)}
        try:
            # the last draft first, because its text is the one to show
            calls = {
                name: measure(
                    console, name, model, method, ids, args.max_new_tokens, None if turn else (tokenizer, text)
                )
                for turn, (name, method) in enumerate([*reversed(drafts.items()), *plain.items()])
            }
        except torch.OutOfMemoryError as error:
            raise CommandError("out of memory. Pass a smaller --context, or --dtype bfloat16.") from error
        calls = {name: calls[name] for name in (*plain, *drafts)}
        texts = {name: judge(model, ids, call, calls[GENERATE]) for name, call in calls.items()}
    show(console, calls, texts)
    return any(text in FAILED for text in texts.values())


def read_document() -> tuple[str, str]:
    modules = read_source(BUILTIN)
    if not modules:  # a distribution may leave sources out
        raise CommandError("this Python has no sources of its library. Pass a text with --file.")
    return f"{modules[0].name} of the standard library", modules[0].text


def make_prompt(tokenizer: Any, name: str, text: str, max_tokens: int) -> tuple[str, torch.Tensor]:
    """Text and token ids `(1, length)` of the beginning of a document, ending inside of a sentence if there is one."""
    # verbose=False: texts longer than the model are cut here, which the tokenizer would warn about
    ids = tokenizer(text, verbose=False)["input_ids"]
    if len(ids) > max_tokens:
        text = tokenizer.decode(ids[:max_tokens], skip_special_tokens=True)
        text = beginning[0] if (beginning := CUT.match(text)) else text
        # encoded anew: the shorter text may end in other tokens, and rarely in more of them
        ids = tokenizer(text, verbose=False)["input_ids"][:max_tokens]
    if len(ids) < SHORTEST_PROMPT:
        raise CommandError(
            f"{name} gives a prompt of {len(ids)} tokens, and at least {SHORTEST_PROMPT} are needed. Pass a longer "
            "--file, or a larger --context."
        )
    return text, torch.tensor([ids])


def estimate(model: PreTrainedModel, ids: torch.Tensor, new_tokens: int, calls: int) -> tuple[float, int]:
    """Seconds of so many calls, and the prompt with which they take a minute, from a call with a piece of the prompt.

    Attention takes more than its share of a long prompt, and drafts save a part of the decoding.
    """

    def call(ids: torch.Tensor) -> Measurement:
        prompt = ids, torch.ones_like(ids)
        return run_call(model, HfMethod(), prompt, tokens=WARM_UP_TOKENS, seed=0)

    call(ids[:, -WARM_UP_PROMPT:])  # the first call is slow
    piece = call(ids[:, :PIECE])
    reading = calls * piece.ttft_seconds / PIECE  # per token
    decoding = calls * new_tokens / piece.tokens_per_second if piece.tokens_per_second else 0.0
    return ids.shape[1] * reading + decoding, max(PIECE, int((MOST_SECONDS - decoding) / reading))


def draft_names(target: str, draft: str | None) -> list[str]:
    """The draft that the user named; otherwise those without training, and for the tiny target the trained ones."""
    if draft is not None:
        return [draft]
    is_tiny = target == str(models.tiny_model(models.TINY_TARGET))
    trained = [models.tiny_model(name) for name in models.TINY_DRAFTS] if is_tiny else []
    return ["ngram", "specattn", *(str(folder) for folder in trained if folder.is_dir())]


def measure(
    console: Console,
    name: str,
    model: PreTrainedModel,
    method: Any,
    ids: torch.Tensor,
    tokens: int,
    shown: tuple[Any, str] | None,
) -> Measurement:
    """Measure one way to decode, under a bar while it reads the prompt; `shown` prints the text while it is written."""

    def call(ids: torch.Tensor, tokens: int, **how: Any) -> Measurement:
        prompt = ids, torch.ones_like(ids)
        return run_call(model, method, prompt, tokens=tokens, seed=0, **how)

    call(ids[:, -WARM_UP_PROMPT:], WARM_UP_TOKENS)  # the first call is slow, and not measured
    # rich replaces sys.stdout while the bar is shown, by a file that ends every piece with a new line
    text = None if shown is None else FileStreamer(shown[0], sys.stdout)
    with PromptProgress(model, ids.shape[1], f"{name}: reading the prompt", console) as bar:

        def arrived(count: int) -> None:
            if count == 1 and shown is None:  # the prompt has been read
                bar.next(f"{name}: decoding", tokens, tokens=True)
            bar.step()
            if count == 1 and shown is not None:
                bar.stop()
                tail = shown[1][-TAIL_CHARACTERS:]
                console.print(tail, style="dim", end="", markup=False, soft_wrap=True)

        measured = call(ids, tokens, on_arrival=arrived, text=text)
    if shown is not None:
        console.print("\n")
    return measured


def show(console: Console, calls: dict[str, Measurement], texts: dict[str, str]) -> None:
    """Print the table, a sentence on the fastest draft, and a line on those that are slower than no draft."""
    base = calls[GENERATE].tokens_per_second
    speeds = {name: call.tokens_per_second / base if base else 0.0 for name, call in calls.items()}
    table = Table()
    table.add_column("decoding")
    for heading in ("speed", "tokens/s", "accepted"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("text", no_wrap=True)
    for name, call in calls.items():
        accepted = f"{(call.tokens - call.steps) / call.drafted:.0%}" if call.drafted else ""
        numbers = f"{speeds[name]:.2f}x", f"{call.tokens_per_second:.1f}", accepted
        table.add_row(escape(name), *numbers, f"[{STYLES.get(texts[name], 'bold red')}]{texts[name]}[/]")
    console.print(table)
    drafts = [name for name in calls if name not in (GENERATE, NO_DRAFT)]
    best = max(drafts, key=lambda name: speeds[name])
    if wrong := [name for name in texts if texts[name] in FAILED]:
        console.print(f"Wrong text: {', '.join(wrong)}. Please report this.", style="bold red", markup=False)
    else:
        same = "same text, near-ties aside" if texts[best] == NEAR_TIE else "same text"
        models.say(f"{best}: {speeds[best]:.1f}x {GENERATE}, {same}.")
    if slower := [name for name in drafts if speeds[name] < max(speeds[GENERATE], speeds[NO_DRAFT])]:
        models.say(f"Slower than no draft here: {', '.join(slower)}. docs/results.md shows where each draft pays.")
