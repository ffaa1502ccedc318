"""`hf-longspec generate`: continue a text with a draft, and show which tokens were drafted."""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from transformers import set_seed
from transformers.generation.streamers import BaseStreamer

from ..auto import AutoDraft
from ..cli import CommandError, options
from ..generation.sequences import SpeculationStats
from ..generation.special_cases.gate import PLAIN, message_of
from ..streaming import FileStreamer, IncrementalDecoder
from .measuring import TokenClock
from .models import LoadedModels, load_models
from .progress import PromptProgress, say
from .rows import continue_rows
from .texts import as_message

# Colour and underline, because some readers and some terminals do not see the colour.
DRAFTED_STYLE = "underline bright_blue"


def run(args: SimpleNamespace) -> int:
    refuse_contradictions(args)
    how: dict[str, Any] = {"do_sample": bool(args.temperature), "repetition_penalty": args.repetition_penalty}
    if args.temperature:
        how |= {"temperature": args.temperature, "top_p": args.top_p, "top_k": args.top_k}
    structure = structure_of(args)
    if args.data is not None:
        return continue_rows(args, how, structure)
    name, text = options.read_text(args.file, args.prompt)
    with load_models(args) as loaded:
        text = as_message(loaded.tokenizer, text) if args.chat else text
        ids = loaded.encode(name, text, room=args.max_new_tokens, special=not args.chat)
        how |= loaded.processors(structure)
        seed = torch.seed() % 2**32 if args.seed is None else args.seed
        if isinstance(loaded.draft, AutoDraft):
            with Console(stderr=True).status("Trying drafts"):
                loaded.draft.choose(loaded.model, ids, **how)
        set_seed(seed)
        steps: list[VerifiedText] | None = [] if args.show_drafts else None
        rows, stats = decode(loaded, ids, steps, args, max_new_tokens=args.max_new_tokens, **how)
        texts = [loaded.tokenizer.decode(tokens, skip_special_tokens=True) for tokens in rows]
        if args.as_json:
            result = {
                **({"text": texts[0]} if args.samples == 1 else {"texts": texts}),
                **loaded.record(),
                "seed": seed if args.temperature else None,
                "prompt_tokens": ids.shape[1],
                "new_tokens": max(map(len, rows)),
                "statistics": stats.to_dict(),
                **({} if steps is None else {"steps": list(map(asdict, steps))}),
            }
            print(json.dumps(result))
            if stats.interrupted:
                print("Interrupted.", file=sys.stderr)
        else:
            print("" if args.samples == 1 else "\n\n".join(texts))
            if args.show_drafts:
                coloured = Text.assemble(("Drafted and accepted", DRAFTED_STYLE), "; plain: the model's own.")
                piped = "Drafted tokens are coloured only in a terminal; --json has them as text."
                Console(stderr=True, soft_wrap=True).print(coloured if Console().is_terminal else piped)
            say(str(stats), stderr=True)
            if stats.gate_decisions and stats.gate_decisions[-1].choice == PLAIN:
                say(message_of(stats.gate_decisions[-1], stats.method), stderr=True)
    return options.INTERRUPTED if stats.interrupted else 0


def refuse_contradictions(args: SimpleNamespace) -> None:
    """Refuse options that need or exclude others."""
    if not args.temperature and (args.top_p, args.top_k, args.samples) != (1.0, 0, 1):
        raise CommandError("--top-p, --top-k and --samples need sampling. Pass a --temperature above 0, such as 1.")
    if args.samples > 1 and args.show_drafts:
        raise CommandError("--samples cannot be combined with --show-drafts. Drop one of them.")
    if args.data is None and (args.output is not None or args.resume or args.column is not None or args.shard):
        raise CommandError("--output, --resume, --column and --shard are for --data. Pass --data, or drop them.")
    if args.data is not None and args.output is None:
        raise CommandError("--data needs --output FILE.jsonl for the texts.")
    of_one_text = args.file, args.prompt, args.as_json, args.show_drafts, args.samples > 1
    if args.data is not None and any(of_one_text):
        raise CommandError("--data cannot be combined with a text, --samples, --json or --show-drafts.")


def structure_of(args: SimpleNamespace) -> dict[str, Any]:
    """The structure of the text, as arguments of `StructuredOutput`; empty without one."""
    given = {"regex": args.regex, "json_schema": args.json_schema and options.read_json(args.json_schema)}
    return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True)
class VerifiedText:
    """The text that one verification emitted.

    A character that several tokens spell together belongs to the last of them, special tokens have no text.
    """

    drafted: str  # text of the accepted drafted tokens
    own: str  # text of the one token that the target contributed
    num_accepted: int  # drafted tokens that were emitted
    num_drafted: int  # drafted tokens that were verified


class DraftedTextStreamer(BaseStreamer):
    """Report the text of one row verification by verification.

    The loop streams the tokens of a step before it has recorded it, so a step is reported when the next one begins.
    """

    def __init__(self, tokenizer: Any, stats: Callable[[], SpeculationStats], report: Callable[[VerifiedText], None]):
        self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens=True)
        self._stats = stats
        self._report = report
        self._expects_prompt = True
        self._waiting: list[int] = []
        self._reported = 0

    def put(self, value: torch.Tensor) -> None:
        if self._expects_prompt:
            self._expects_prompt = False
            return
        self._report_recorded()
        self._waiting += value.flatten().tolist()

    def end(self) -> None:
        self._report_recorded()
        for token in self._waiting:
            self._report(VerifiedText("", self._decoder.feed(token), 0, 0))
        self._waiting = []
        if rest := self._decoder.end():
            self._report(VerifiedText("", rest, 0, 0))

    def _report_recorded(self) -> None:
        """Report the steps whose tokens have arrived and that are recorded; step 0 is the prompt's token."""
        stats = self._stats()
        emitted, drafted = (rows[0] if rows else [] for rows in (stats.emitted_per_step, stats.drafted_per_step))
        while self._waiting and self._reported <= len(emitted):
            number = self._reported - 1
            count, proposed = (1, 0) if number < 0 else (emitted[number], drafted[number])
            if len(self._waiting) < count:  # an interruption stopped the stream inside the step
                return
            pieces = [self._decoder.feed(token) for token in self._waiting[:count]]
            del self._waiting[:count]
            self._reported += 1
            self._report(VerifiedText("".join(pieces[:-1]), pieces[-1], count - 1, proposed))


def decode(
    loaded: LoadedModels, ids: torch.Tensor, steps: list[VerifiedText] | None, args: SimpleNamespace, **how: Any
) -> tuple[list[list[int]], SpeculationStats]:
    """Generate, with a bar while the prompt is read, and until the end unless the text itself shows the progress."""
    quiet = args.as_json  # nothing goes to standard output meanwhile
    is_seen = not quiet and args.samples == 1 and sys.stdout.isatty()
    draft, tokenizer = loaded.draft, loaded.tokenizer
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)

    def report(step: VerifiedText) -> None:
        assert steps is not None
        steps.append(step)
        if not quiet and args.show_drafts and console.is_terminal:
            console.print(Text.assemble((step.drafted, DRAFTED_STYLE), step.own), end="")
        elif not quiet:  # as it is: rich would expand tabs
            print(step.drafted + step.own, end="", flush=True)

    text: BaseStreamer | None = None if quiet or args.samples > 1 else FileStreamer(tokenizer, sys.stdout)
    if steps is not None:
        text = DraftedTextStreamer(tokenizer, lambda: draft.last_speculation, report)
    with PromptProgress(loaded.model, ids.shape[1], "Reading the prompt") as progress:

        def arrived(tokens: int) -> None:
            if tokens == 1 and is_seen:  # the prefill is over
                progress.close()
            elif tokens == 1:
                progress.next("Generating", args.samples * args.max_new_tokens)
            progress.update(args.samples)

        rows = ids.repeat_interleave(args.samples, 0)
        mask, clock = torch.ones_like(rows), TokenClock(args.samples, on_arrival=arrived, text=text)
        try:
            sequences = loaded.model.generate(rows, attention_mask=mask, assistant_model=draft, streamer=clock, **how)
        except KeyboardInterrupt:
            sequences = getattr(draft.last_speculation, "partial_sequences", None)
            if sequences is None:
                raise
            if text is not None:
                text.end()
    return sequences[:, ids.shape[1] :].tolist(), draft.last_speculation
