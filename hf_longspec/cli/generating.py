"""One text from a prompt, streamed, coloured, as a page or as JSON."""

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from transformers import set_seed
from transformers.generation.streamers import BaseStreamer

from ..generation.stats import SpeculationStats
from ..streaming import FileStreamer
from . import CommandError
from .drafted_text import DraftedTextStreamer, StepText
from .html_page import html_page
from .measuring import StopWatch, prefill_work, watched_layers
from .options import INTERRUPTED
from .progress import Bar, bar
from .session import Session

# Two signs, because not everybody sees every colour, and not every terminal shows it.
DRAFTED_STYLE = "underline bright_blue"
TAIL_CHARACTERS = 300  # of the prompt, shown on a page


@dataclass(frozen=True)
class Sampling:
    """How the target chooses its tokens.

    Raises:
        CommandError: If a number is out of range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.top_p <= 1:
            raise CommandError(f"--top-p {self.top_p}: expected a number above 0 and at most 1; 1 keeps all tokens.")
        if self.top_k < 0:
            raise CommandError(f"--top-k {self.top_k}: expected at least 0; 0 keeps all tokens.")
        if self.repetition_penalty <= 0:
            raise CommandError(f"--repetition-penalty {self.repetition_penalty}: expected more than 0; 1 is none.")
        if not self.temperature and (self.top_p, self.top_k) != (1.0, 0):
            raise CommandError("--top-p and --top-k are for sampling: pass a --temperature above 0, such as 1.")

    def arguments(self) -> dict[str, Any]:
        """For `generate`."""
        penalty = {"repetition_penalty": self.repetition_penalty}
        if not self.temperature:
            return {"do_sample": False, **penalty}
        return {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k, **penalty}


class Generation:
    """One text: what it was asked for, and its steps as far as they are wanted.

    Args:
        session ([`Session`]): What decodes.
        sampling ([`Sampling`]): How tokens are chosen.
        max_new_tokens (`int`): Most tokens.
        quiet (`bool`): Write nothing to standard output meanwhile.
        wants_steps (`bool`): Keep which tokens were drafted, in `steps`.
        coloured (`bool`): Mark them on standard output.
    """

    def __init__(
        self, session: Session, sampling: Sampling, max_new_tokens: int, quiet: bool, wants_steps: bool, coloured: bool
    ):
        self.session = session
        self.sampling = sampling
        self.max_new_tokens = max_new_tokens
        self.quiet = quiet
        self.wants_steps = wants_steps
        self.coloured = coloured
        self.seed = torch.seed() % 2**32 if sampling.seed is None else sampling.seed
        self.steps: list[StepText] = []

    def run(self, name: str, text: str, chat: bool) -> None:
        """Generate, under a bar while the prompt is read, and to the end if nothing else is to be seen.

        After Ctrl-C the text so far takes the place of the whole one.

        Raises:
            KeyboardInterrupt: If there is no text yet.
        """
        session = self.session
        self.text = _message(session, text) if chat else text
        ids = session.encode(name, self.text)
        session.require_room(name, ids.shape[1], self.max_new_tokens)
        set_seed(self.seed)
        reading = bar("Reading the prompt", prefill_work(session.model, ids.shape[1]))
        with reading as progress, watched_layers(session.model, progress.advance) as stop_watching:

            def prefill_is_over() -> None:
                stop_watching()
                if self.quiet:
                    progress.next("Generating", self.max_new_tokens)
                else:
                    progress.stop()

            try:
                sequences = session.model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    assistant_model=session.draft,
                    max_new_tokens=self.max_new_tokens,
                    streamer=StopWatch(prefill_is_over, self._streamer(progress)),
                    **self.sampling.arguments(),
                )
            except KeyboardInterrupt:
                stats = session.draft.last_speculation
                if stats is None or stats.partial_sequences is None:
                    raise
                sequences = stats.partial_sequences
        self.prompt_tokens = ids.shape[1]
        self.tokens: list[int] = sequences[0, ids.shape[1] :].tolist()
        self.stats: SpeculationStats = session.draft.last_speculation

    def _streamer(self, progress: Bar) -> BaseStreamer:
        """Where the tokens go while they are generated."""
        session = self.session
        if self.wants_steps:
            console = Console(file=sys.stdout, highlight=False, soft_wrap=True)

            def tell(step: StepText) -> None:
                self.steps.append(step)
                if self.quiet:
                    progress.advance(step.num_accepted + 1)
                elif self.coloured and console.is_terminal:
                    console.print(Text.assemble((step.drafted, DRAFTED_STYLE), step.own), end="")
                else:  # as it is: rich would expand tabs
                    print(step.drafted + step.own, end="", flush=True)

            return DraftedTextStreamer(session.tokenizer, lambda: session.draft.last_speculation, tell)
        return _Counter(progress) if self.quiet else FileStreamer(session.tokenizer, sys.stdout)

    def record(self) -> dict[str, Any]:
        """Text and statistics for JSON, with the steps if they were kept."""
        session = self.session
        return {
            "text": session.tokenizer.decode(self.tokens, skip_special_tokens=True),
            "target": session.target,
            "draft": session.draft_name,
            "dtype": session.dtype,
            "device": str(session.model.device),
            "seed": self.seed if self.sampling.temperature else None,
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": len(self.tokens),
            "statistics": self.stats.to_dict(),
            **({"steps": list(map(asdict, self.steps))} if self.wants_steps else {}),
        }

    def page(self) -> str:
        """The text as an HTML page."""
        stats = self.stats
        target, draft = map(_short, (self.session.target, self.session.draft_name))
        facts = {
            "target": target,
            "draft": draft,
            "tokens per verification": f"{stats.mean_acceptance_length:.2f}",
            "verifications": str(stats.num_spec_steps),
            "drafted tokens accepted": f"{stats.num_accepted_draft_tokens} of {stats.num_draft_tokens} "
            f"({stats.draft_acceptance_rate:.0%})",
            "tokens per second": f"{stats.tokens_per_second:.1f}",
            "type": self.session.dtype,
        }
        tail = ("… " if len(self.text) > TAIL_CHARACTERS else "") + self.text[-TAIL_CHARACTERS:]
        return html_page(f"{target} with {draft}", tail, self.steps, facts)


class _Counter(BaseStreamer):
    """Advances a bar by one for every token."""

    def __init__(self, progress: Bar):
        self.progress = progress
        self.saw_prompt = False

    def put(self, value: torch.Tensor) -> None:
        """Called by `generate` with the prompt, then with every token."""
        if self.saw_prompt:
            self.progress.advance()
        self.saw_prompt = True

    def end(self) -> None:
        """Nothing to close."""


def _message(session: Session, text: str) -> str:
    """A chat with `text` as its first message, as the tokenizer's template writes it."""
    if not getattr(session.tokenizer, "chat_template", None):
        raise CommandError(f"--chat: the tokenizer of {session.target} has no chat template. Leave --chat out.")
    message = [{"role": "user", "content": text}]
    templated: str = session.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    return templated


def _short(name: str) -> str:
    """A Hub id as it is; of a folder its own name, because a page is passed on."""
    return Path(name).resolve().name if Path(name).is_dir() else name


def run(
    session: Session,
    sampling: Sampling,
    name: str,
    text: str,
    max_new_tokens: int,
    chat: bool,
    show_drafts: bool,
    html: Path | None,
    as_json: bool,
) -> int:
    """The command behind its options; returns the exit status."""
    if html is not None:
        _require_writable(html)
    wants_steps = show_drafts or html is not None
    generation = Generation(session, sampling, max_new_tokens, as_json, wants_steps, show_drafts)
    generation.run(name, text, chat)
    if as_json:
        print(json.dumps(generation.record()))
    else:
        print()
        if show_drafts:
            coloured = Text.assemble(("Drafted and accepted", DRAFTED_STYLE), "; plain: the model's own.")
            piped = "Drafted tokens are coloured in a terminal alone; --html FILE writes a page that shows them."
            Console(stderr=True).print(coloured if Console().is_terminal else piped)
        print(generation.stats, file=sys.stderr)
    if html is not None:
        html.write_text(generation.page(), encoding="utf-8")
    return INTERRUPTED if generation.stats.interrupted else 0


def _require_writable(html: Path) -> None:
    """Refuse, before anything is generated, a file that could not be written."""
    folder = html.absolute().parent
    if not folder.is_dir():
        raise CommandError(f"--html {html}: there is no folder {html.parent}. Make it first.")
    if html.is_dir() or not os.access(html if html.exists() else folder, os.W_OK):
        raise CommandError(f"--html {html}: cannot be written. Name another file.")
