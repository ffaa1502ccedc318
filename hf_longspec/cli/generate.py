"""`hf-longspec generate`: continue a text with a draft, and show which tokens were drafted."""

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from string import Template
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.text import Text
from transformers import set_seed
from transformers.generation.streamers import BaseStreamer

from ..bench.calls import TokenClock
from ..bench.progress import Progress
from ..cli import CommandError, options
from ..generation.stats import SpeculationStats
from ..streaming import FileStreamer, IncrementalDecoder
from .options import INTERRUPTED, at_least
from .output import prefill_work, watched_layers
from .session import Session, opened


@dataclass(frozen=True)
class StepText:
    """The text that one verification emitted.

    A character that several tokens spell together belongs to the last of them, special tokens have no text.

    Args:
        drafted (`str`): Text of the accepted drafted tokens.
        own (`str`): Text of the one token that the target contributed.
        num_accepted (`int`): Drafted tokens that were emitted.
        num_drafted (`int`): Drafted tokens that were verified.
    """

    drafted: str
    own: str
    num_accepted: int
    num_drafted: int


class DraftedTextStreamer(BaseStreamer):
    """Report the text of one row verification by verification.

    The loop streams the tokens of a step before it has recorded it, so a step is reported when the next one begins.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): Decodes.
        stats (`Callable`): Returns the statistics of the running call.
        report (`Callable[[StepText], None]`): Called with every step. The first is the token that the prompt's own
            forward gave. Tokens of a step that was interrupted before it was recorded come as the target's own.
    """

    def __init__(self, tokenizer: Any, stats: Callable[[], SpeculationStats], report: Callable[[StepText], None]):
        self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens=True)
        self._stats = stats
        self._report = report
        self._expects_prompt = True
        self._waiting: list[int] = []
        self._reported = 0

    def put(self, value: torch.Tensor) -> None:
        """Called by `generate` with the prompt, then with every token."""
        if self._expects_prompt:
            self._expects_prompt = False
            return
        self._report_recorded()
        self._waiting += value.flatten().tolist()

    def end(self) -> None:
        """Called by `generate` after the last token."""
        self._report_recorded()
        for token in self._waiting:
            self._report(StepText("", self._decoder.feed(token), 0, 0))
        self._waiting = []
        if rest := self._decoder.end():
            self._report(StepText("", rest, 0, 0))

    def _report_recorded(self) -> None:
        """Report the steps whose tokens have arrived and that are recorded; step 0 is the prompt's token."""
        emitted, drafted = (rows[0] if rows else [] for rows in self._recorded())
        while self._waiting and self._reported <= len(emitted):
            number = self._reported - 1
            count, proposed = (1, 0) if number < 0 else (emitted[number], drafted[number])
            if len(self._waiting) < count:  # an interruption stopped the stream inside the step
                return
            pieces = [self._decoder.feed(token) for token in self._waiting[:count]]
            del self._waiting[:count]
            self._reported += 1
            self._report(StepText("".join(pieces[:-1]), pieces[-1], count - 1, proposed))

    def _recorded(self) -> tuple[list[Any], list[Any]]:
        stats = self._stats()
        return stats.emitted_per_step, stats.drafted_per_step


# Most bars in the chart; for longer texts each bar shows the mean of several steps.
MIN_BARS, MAX_BARS = 60, 240
BAR_WIDTH, CHART_HEIGHT = 6, 90

PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { color-scheme: light dark; --ink: #1c2127; --paper: #ffffff; --quiet: #5c6670; --line: #d8dde2;
        --drafted: #0b57d0; --drafted-back: #e3edfd; --bar: #4c8df5; --bar-back: #e4e8ec; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ec; --paper: #16191d; --quiet: #9aa5b0; --line: #353c44;
          --drafted: #a8c7fa; --drafted-back: #1d3357; --bar: #6ea3f7; --bar-back: #2b3138; }
}
body { margin: 2rem auto; max-width: 60rem; padding: 0 1.25rem; background: var(--paper); color: var(--ink);
       font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.25rem; margin: 0 0 1rem; }
h2 { font-size: 1rem; margin: 1.75rem 0 .5rem; }
dl { display: flex; flex-wrap: wrap; gap: .75rem 2rem; margin: 0; }
dt { color: var(--quiet); font-size: .8rem; }
dd { margin: 0; font-variant-numeric: tabular-nums; }
p { color: var(--quiet); font-size: .85rem; margin: .4rem 0; }
svg { display: block; width: 100%; height: ${height}px; border-bottom: 1px solid var(--line); }
svg .drafted { fill: var(--bar-back); }
svg .accepted { fill: var(--bar); }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid var(--line); border-radius: 6px; margin: 0;
      padding: 1rem; font: 14px/1.65 ui-monospace, monospace; }
pre .prompt { color: var(--quiet); }
.d { color: var(--drafted); background: var(--drafted-back); text-decoration: underline; text-underline-offset: 3px; }
</style>
</head>
<body>
<h1>$title</h1>
<dl>$facts</dl>
<h2>Acceptance</h2>
<svg viewBox="0 0 $width $height" preserveAspectRatio="none" role="img" aria-label="Acceptance of every verification">
$bars
</svg>
<p>$caption</p>
<h2>Text</h2>
<p><span class="d">Marked</span>: drafted, and accepted by the target. Unmarked: the target's own token, one per
verification. Grey: the end of the prompt. Point at a token for its verification.</p>
<pre>$text</pre>
</body>
</html>
""")


def html_page(title: str, prompt: str, steps: Sequence[StepText], facts: dict[str, str]) -> str:
    """The page.

    Args:
        title (`str`): Heading.
        prompt (`str`): The text before it.
        steps (`Sequence[StepText]`): The text.
        facts (`dict[str, str]`): Shown above it, value by name.
    """
    verified = [step for step in steps if step.num_drafted]
    bars, caption = _chart(verified)
    # step 0 is the token that the prompt's own forward gave
    spans = [_span(step, number) for number, step in enumerate(steps)]
    return PAGE.substitute(
        title=escape(title),
        facts="".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts.items()),
        bars=bars,
        width=max(MIN_BARS, min(len(verified), MAX_BARS)) * BAR_WIDTH,
        height=CHART_HEIGHT,
        caption=caption,
        text="".join([f'<span class="prompt">{escape(prompt)}</span>', *spans]),
    )


def _span(step: StepText, number: int) -> str:
    if not step.num_drafted:
        return escape(step.own)
    title = f"verification {number}: {step.num_accepted} of {step.num_drafted} drafted tokens accepted"
    drafted = f'<span class="d">{escape(step.drafted)}</span>' if step.drafted else ""
    return f'<span title="{title}">{drafted}{escape(step.own)}</span>'


def _chart(steps: Sequence[StepText]) -> tuple[str, str]:
    """Bars and caption: how many tokens were drafted in every step, and how many of them accepted."""
    if not steps:
        return "", "No verification had a drafted token to check."
    size = -(-len(steps) // MAX_BARS)
    groups = [steps[start : start + size] for start in range(0, len(steps), size)]
    tallest = max(sum(step.num_drafted for step in group) / len(group) for group in groups)
    bars = []
    for place, group in enumerate(groups):
        drafted, accepted = (
            sum(values) / len(group) * (CHART_HEIGHT - 4) / tallest
            for values in ([step.num_drafted for step in group], [step.num_accepted for step in group])
        )
        bars += [_rectangle("drafted", place, drafted), _rectangle("accepted", place, accepted)]
    each = "a verification" if size == 1 else f"the mean of {size} verifications"
    return "\n".join(bars), (
        f"A bar is {each} with drafted tokens, from left to right; its full height is what was drafted (at most "
        f"{tallest:.3g} tokens), the coloured part what was accepted of it."
    )


def _rectangle(kind: str, place: int, height: float) -> str:
    return (
        f'<rect class="{kind}" x="{place * BAR_WIDTH}" y="{CHART_HEIGHT - height:.1f}" width="{BAR_WIDTH - 1}" '
        f'height="{height:.1f}"/>'
    )


# Colour and underline, because some readers and some terminals do not see the colour.
DRAFTED_STYLE = "underline bright_blue"
TAIL_CHARACTERS = 300  # of the prompt, shown on a page


@dataclass(frozen=True)
class Sampling:
    """The way in which the target chooses its tokens.

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
    """One text, with its steps if they are wanted.

    Args:
        session ([`Session`]): Target, tokenizer and draft.
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
        """Generate, with a bar while the prompt is read, and until the end if nothing else is shown.

        After Ctrl-C the text so far takes the place of the whole one.

        Raises:
            KeyboardInterrupt: If there is no text yet.
        """
        session = self.session
        self.text = _message(session, text) if chat else text
        ids = session.encode(name, self.text)
        session.require_room(name, ids.shape[1], self.max_new_tokens)
        set_seed(self.seed)
        reading = Progress(prefill_work(session.model, ids.shape[1]), "Reading the prompt")
        with reading as progress, watched_layers(session.model, progress.step) as stop_watching:

            def arrived(tokens: int) -> None:
                if tokens > 1:  # the first token ends the prefill
                    return
                stop_watching()
                if self.quiet:
                    progress.next("Generating", self.max_new_tokens)
                else:
                    progress.stop()

            streamer = TokenClock(on_arrival=arrived, text=self._streamer(progress))
            try:
                sequences = session.model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    assistant_model=session.draft,
                    max_new_tokens=self.max_new_tokens,
                    streamer=streamer,
                    **self.sampling.arguments(),
                )
            except KeyboardInterrupt:
                sequences = getattr(session.draft.last_speculation, "partial_sequences", None)
                if sequences is None:
                    raise
        self.prompt_tokens = ids.shape[1]
        self.tokens: list[int] = sequences[0, ids.shape[1] :].tolist()
        self.stats: SpeculationStats = session.draft.last_speculation

    def _streamer(self, progress: Progress) -> BaseStreamer:
        """Where the tokens go while they are generated."""
        session = self.session
        if self.wants_steps:
            console = Console(file=sys.stdout, highlight=False, soft_wrap=True)

            def report(step: StepText) -> None:
                self.steps.append(step)
                if self.quiet:
                    progress.step(step.num_accepted + 1)
                elif self.coloured and console.is_terminal:
                    console.print(Text.assemble((step.drafted, DRAFTED_STYLE), step.own), end="")
                else:  # as it is: rich would expand tabs
                    print(step.drafted + step.own, end="", flush=True)

            return DraftedTextStreamer(session.tokenizer, lambda: session.draft.last_speculation, report)
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

    def __init__(self, progress: Progress):
        self.progress = progress
        self.saw_prompt = False

    def put(self, value: torch.Tensor) -> None:
        """Called by `generate` with the prompt, then with every token."""
        if self.saw_prompt:
            self.progress.step()
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
    """A Hub id as it is; for a folder its last part, because other people may read the page."""
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
    """Generate, show, and return the exit status."""
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


Output = Annotated[Path | None, typer.Option(help="Write the text as an HTML page with its drafted tokens marked.")]


def generate(
    target: options.Target,
    file: Annotated[Path | None, typer.Argument(help="Text to continue; - for standard input.")] = None,
    prompt: options.Prompt = None,
    draft: options.Draft = "specattn",
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate.", callback=at_least(1))] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy decoding.", callback=at_least(0))] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample among the likeliest tokens of this mass.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample among the k likeliest tokens; 0 for all.")] = 0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: tokens of the text become less likely.")] = 1.0,
    chat: Annotated[bool, typer.Option("--chat", help="The text is a message: apply the chat template.")] = False,
    setting: options.Setting = None,
    dtype: options.Dtype = "auto",
    device: options.Device = None,
    seed: options.Seed = None,
    show_drafts: Annotated[bool, typer.Option("--show-drafts", help="Colour the drafted tokens.")] = False,
    html: Output = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Continue a text, with the words appearing as they are decided.

    The text is what the model alone would write. Statistics follow on standard error.

    With --show-drafts, accepted drafted tokens are blue and underlined, the target's own token of each verification
    is plain; --html FILE writes the same as a page that opens in any browser.

    Examples:

    \b
    hf-longspec generate notes.txt --target Qwen/Qwen3-0.6B --max-new-tokens 512
    hf-longspec generate --prompt "The lighthouse" --target Qwen/Qwen3-0.6B --draft ngram --show-drafts
    hf-longspec generate notes.txt --target Qwen/Qwen3-0.6B --draft org/draft --html notes.html
    hf-longspec generate notes.txt --target Qwen/Qwen3-0.6B --temperature 0.7 --seed 1 --json

    Exit status: 0; 2 for what cannot be run; 130 after Ctrl-C.
    """
    with options.one_line_errors(debug):
        sampling = Sampling(temperature, top_p, top_k, repetition_penalty, seed)
        name, text = options.read_text(file, prompt)
        with opened(target, draft, options.read_settings(setting), dtype, device) as session:
            status = run(session, sampling, name, text, max_new_tokens, chat, show_drafts, html, as_json)
    raise typer.Exit(status)
