"""`hf-longspec generate`: continue a text with a draft, and show which tokens were drafted."""

import json
import sys
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from transformers import set_seed

from ..auto import AutoDraft
from ..cli import CommandError, options
from ..generation.sequences import SpeculationStats
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
        console = Console(highlight=False, soft_wrap=True)
        is_coloured = args.show_drafts and console.is_terminal and not args.as_json
        is_streamed = not (args.as_json or args.samples > 1 or is_coloured)
        rows, stats = decode(loaded, ids, args, is_streamed=is_streamed, **how)
        texts = [loaded.tokenizer.decode(tokens, skip_special_tokens=True) for tokens in rows]
        steps = verified_texts(loaded.tokenizer, rows[0], stats) if args.show_drafts else []
    status = options.INTERRUPTED if stats.interrupted else 0
    if args.as_json:
        result = {
            **({"text": texts[0]} if args.samples == 1 else {"texts": texts}),
            **loaded.record(),
            "seed": seed if args.temperature else None,
            "prompt_tokens": ids.shape[1],
            "new_tokens": max(map(len, rows)),
            "statistics": stats.to_dict(),
            **({"steps": list(map(asdict, steps))} if args.show_drafts else {}),
        }
        print(json.dumps(result))
        if stats.interrupted:
            print("Interrupted.", file=sys.stderr)
        return status
    if is_coloured:
        console.print(Text.assemble(*(part for step in steps for part in ((step.drafted, DRAFTED_STYLE), step.own))))
        say("Underlined: drafted and accepted. Plain: the model's own.", stderr=True)
    else:
        print("" if is_streamed else "\n\n".join(texts))
        if args.show_drafts:
            say("Drafted tokens are coloured only in a terminal; --json has them as text.", stderr=True)
    say(str(stats), stderr=True)
    return status


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


def verified_texts(tokenizer: Any, tokens: list[int], stats: SpeculationStats) -> list[VerifiedText]:
    """The text of the first row verification by verification; the first token is that of the prompt's forward."""
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens=True)
    pieces = [decoder.feed(token) for token in tokens]
    emitted, drafted = (rows[0] if rows else [] for rows in (stats.emitted_per_step, stats.drafted_per_step))
    steps = []
    for count, proposed in zip([1, *emitted], [0, *drafted], strict=True):
        if count <= len(pieces):  # an interruption stopped the text inside the last step
            steps.append(VerifiedText("".join(pieces[: count - 1]), pieces[count - 1], count - 1, proposed))
            del pieces[:count]
    rest = "".join(pieces) + decoder.end()
    return [*steps, VerifiedText("", rest, 0, 0)] if rest else steps


def decode(
    loaded: LoadedModels, ids: torch.Tensor, args: SimpleNamespace, *, is_streamed: bool, **how: Any
) -> tuple[list[list[int]], SpeculationStats]:
    """Generate, with a bar while the prompt is read, and until the end unless the text itself shows the progress."""
    text = FileStreamer(loaded.tokenizer, sys.stdout) if is_streamed else None
    draft, rows = loaded.draft, ids.repeat_interleave(args.samples, 0)
    how |= {"attention_mask": torch.ones_like(rows), "max_new_tokens": args.max_new_tokens}
    new = 0 if is_streamed and sys.stdout.isatty() else args.samples * args.max_new_tokens
    with PromptProgress(loaded.model, ids.shape[1], "Generating", new, args.samples) as progress:
        clock = TokenClock(args.samples, on_arrival=progress.arrived, text=text)
        try:
            sequences = loaded.model.generate(rows, assistant_model=draft, streamer=clock, **how)
        except KeyboardInterrupt:
            sequences = getattr(draft.last_speculation, "partial_sequences", None)
            if sequences is None:
                raise
            if text is not None:
                text.end()
    return sequences[:, ids.shape[1] :].tolist(), draft.last_speculation
