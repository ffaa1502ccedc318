"""`hf-longspec demo`: continue a long document with and without speculation, and compare.

A preset of the measuring code of `hf-longspec bench`: one prompt, one call of every method. The text is shown while it
is written, and sentences about the numbers follow.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers import PreTrainedModel, TextStreamer

from ..auditing import EXACT, AuditReport, audit
from ..bench.calls import PLAIN, Call, Decoding, HfMethod, run_call
from ..bench.machine import native_bfloat16
from ..bench.progress import PromptProgress
from ..bench.prompts import BUILTIN, read_source
from ..cli import CommandError, options, session
from ..modeling.plain.modeling_plain import PlainDraftModel
from .bench import load_draft
from .commands.demo import CONTEXT, NEW_TOKENS, QUICK_CONTEXT, QUICK_NEW_TOKENS

HF = "HF generate"
# Without bfloat16 instructions reading the prompt takes 10 times as long as in float32, and every method reads it.
EMULATED_CONTEXT = 2048
WARM_UP_PROMPT, WARM_UP_TOKENS = 64, 8

# A prompt is cut after the third of at least six words, so that the continuation is the rest of a sentence.
WORD = re.compile(r"\b[A-Za-z]{2,}\b")
WORDS_OF_PROSE, WORDS_KEPT = 6, 3
SHORTEST_PROMPT = 32

CHECK_STYLES = {"yes": "green", "exact": "green", "reference": "dim", "near-tie": "yellow"}
TAIL_CHARACTERS = 300  # of the prompt, shown before its continuation

# Two runs of the same method differ by a few percent; smaller differences are called no difference.
SAME_SPEED = 0.05
# Greedy text of small models falls into loops, which any drafter predicts. More repetition than this gets a remark.
LOOP_LENGTH, LOOPING = 4, 0.5


def read_document(file: Path | None) -> tuple[str, str]:
    """Name and text of `file`, or of a module of the standard library.

    Raises:
        CommandError: If there is no such text.
    """
    if file is not None:
        name, text = options.read_text(file, None)
        return Path(name).name, text
    modules, _ = read_source(BUILTIN)
    if not modules:  # a distribution may leave sources out
        raise CommandError("this Python comes without the sources of its library: pass a text of your own with --file.")
    return f"{modules[0].name} of the standard library", modules[0].body


def make_prompt(tokenizer: Any, name: str, text: str, max_tokens: int) -> tuple[str, torch.Tensor]:
    """Text and token ids `(1, length)` of the beginning of a document, ending in the middle of a line of words.

    Raises:
        CommandError: If the text is too short to be continued.
    """
    ids = _encode(tokenizer, text)
    if len(ids) > max_tokens:
        text = end_inside_a_line(tokenizer.decode(ids[:max_tokens], skip_special_tokens=True))
        # encoded anew: the shorter text may end in other tokens, and rarely in more of them
        ids = _encode(tokenizer, text)[:max_tokens]
    if len(ids) < SHORTEST_PROMPT:
        raise CommandError(
            f"{name} gives a prompt of {len(ids)} tokens, and {SHORTEST_PROMPT} are needed: pass a longer --file, or a "
            "larger --context."
        )
    return text, torch.tensor([ids])


def end_inside_a_line(text: str) -> str:
    """`text` up to the third word of its last complete line of at least six words; all of it if there is none."""
    lines = text.splitlines(keepends=True)
    for number in range(len(lines) - 2, 0, -1):
        words = list(WORD.finditer(lines[number]))
        if len(words) >= WORDS_OF_PROSE:
            return "".join(lines[:number]) + lines[number][: words[WORDS_KEPT - 1].end()]
    return text


def _encode(tokenizer: Any, text: str) -> list[int]:
    # verbose=False: texts longer than the model are cut by the caller, which the tokenizer would warn about
    return list(tokenizer(text, verbose=False)["input_ids"])


@dataclass
class Group:
    """Everything measured in one dtype."""

    dtype: str  # name of the type
    calls: dict[str, Call]  # by name: the stock loop, our loop without a draft, and the drafts, in that order
    context: int  # tokens of the prompt
    checks: dict[str, str] = field(default_factory=dict)  # the last column of the table
    details: list[str] = field(default_factory=list)  # sentences on calls that failed their check

    @property
    def drafts(self) -> list[str]:
        """Names of the calls with a draft."""
        return [name for name in self.calls if name not in (HF, PLAIN)]

    def speed_ratio(self, name: str, base: str = HF) -> float:
        """Speed of decoding, relative to another call."""
        return _ratio(self.calls[name].tokens_per_second, self.calls[base].tokens_per_second)


def remarks(groups: list[Group], native_bfloat16: bool | None) -> list[str]:
    """The ratios of every group, why a draft did not pay where it did not, and what makes the numbers special."""
    timed = [group for group in groups if all(call.tokens_per_second for call in group.calls.values())]
    said = [_ratios(group) for group in timed]
    for name in timed[0].drafts if timed else ():
        if unpaid := [group for group in timed if group.speed_ratio(name, PLAIN) < 1 + SAME_SPEED]:
            said.append(_why_not(name, unpaid))
    repeated = max(repetition(tokens_of(group.calls[group.drafts[-1]])) for group in groups)
    if repeated > LOOPING:
        said.append(
            f"{repeated:.0%} of the {LOOP_LENGTH}-token sequences of the text have occurred in it before: it repeats "
            "itself, as greedy text of small models does, so expect a lower tau on text that does not."
        )
    if native_bfloat16 is False and any(group.dtype == "bfloat16" for group in timed):
        said.append(_emulation({group.dtype: group for group in timed}))
    return said


def _ratios(group: Group) -> str:
    said = [f"the {PLAIN} ran at {group.speed_ratio(PLAIN):.2f}x the speed of {HF}"]
    for name in group.drafts:
        call, gain = group.calls[name], group.speed_ratio(name, PLAIN)
        accepted = _ratio(call.tokens - call.steps, call.drafted)
        said.append(f"{name} at {gain:.2f}x that of the {PLAIN} ({accepted:.0%} of its drafts accepted)")
    return f"{group.dtype}: {', '.join(said)}."


def _why_not(name: str, groups: list[Group]) -> str:
    where = " and ".join(group.dtype for group in groups)
    contexts = " and ".join(dict.fromkeys(str(group.context) for group in groups))
    outcome = (
        "slower than" if all(group.speed_ratio(name, PLAIN) < 1 - SAME_SPEED for group in groups) else "no faster than"
    )
    finding = f"In {where} {name} is {outcome} decoding without a draft here"
    if name != "SpecAttn":
        return f"{finding}: drafting cost as much as it saved, or more."
    return (
        f"{finding}: it rereads all weights of the model for every drafted token and saves only on reading the cache, "
        f"which does not make up for it with this model at {contexts} tokens."
    )


def _emulation(groups: dict[str, Group]) -> str:
    detected = "This machine has no bfloat16 instructions, so PyTorch emulates them"
    if "float32" not in groups:
        return f"{detected}: do not take its bfloat16 speeds for those of other machines."
    if groups["bfloat16"].context != groups["float32"].context:
        return f"{detected}: do not compare the speeds of the two groups, whose prompts differ in length."
    half, full = (groups[name].calls[HF] for name in ("bfloat16", "float32"))
    decoding = _ratio(half.tokens_per_second, full.tokens_per_second)
    prefill = _ratio(half.ttft_seconds, full.ttft_seconds)
    return (
        f"{detected}: {HF} in bfloat16 decoded at {decoding:.2f}x its float32 speed and took {prefill:.1f}x as "
        "long for the first token."
    )


def repetition(tokens: tuple[int, ...]) -> float:
    """Share of the sequences of `LOOP_LENGTH` tokens that have occurred before.

    >>> repetition((1, 2, 3, 1, 2, 3, 1))
    0.25
    """
    grams = list(zip(*(tokens[start:] for start in range(LOOP_LENGTH)), strict=False))
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0


def tokens_of(call: Call) -> tuple[int, ...]:
    """The generated tokens of a call with one row."""
    return tuple(call.text[0].tolist())


class Demo:
    """One run: every way to decode, in every dtype.

    Raises:
        CommandError: If target, text and lengths do not go together.
    """

    def __init__(
        self,
        target: str | None,
        draft: str | None,
        file: Path | None,
        context: int | None,
        max_new_tokens: int | None,
        dtypes: list[str],
        quick: bool,
    ):
        self.console = Console(highlight=False)
        self.dtypes, self.draft_name, self.shortens = dtypes, draft, context is None
        self.target = session.find_target(target)
        self.name, document = read_document(file)
        self.tokenizer = session.load_tokenizer(self.target)
        self.new_tokens = max_new_tokens or (QUICK_NEW_TOKENS if quick else NEW_TOKENS)
        wanted = context or (QUICK_CONTEXT if quick else CONTEXT)
        room = session.max_positions(self.target) - self.new_tokens
        if room < 1 or (context or 0) > room:
            raise CommandError(
                f"--context {wanted} and {self.new_tokens} new tokens do not fit into the {room + self.new_tokens} "
                f"positions of the model: use at most --context {max(room, 0)}, or fewer --max-new-tokens."
            )
        text, self.ids = make_prompt(self.tokenizer, self.name, document, max_tokens=min(wanted, room))
        self.tail = text[-TAIL_CHARACTERS:]

    def run(self) -> int:
        """Measure, show, and return the exit status."""
        groups: list[Group] = []
        for dtype in self.dtypes:
            self.say(f"Loading {self.target} in {dtype}.")
            model = session.load_target(self.target, session.TORCH_DTYPES[dtype])
            native = native_bfloat16(model.device)
            if not groups:
                size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
                self.say(
                    f"{type(model).__name__} with {size:.1f}M parameters on {session.describe_device(model.device)}.\n"
                    f"Prompt: the first {self.ids.shape[1]} tokens of {self.name}; {self.new_tokens} tokens to come.\n"
                )
            ids = self._prompt_in(dtype, native)
            groups.append(Group(dtype, self._measure_all(model, ids, stream=not groups), ids.shape[1]))
            self._check(groups[-1], model, ids)
            del model  # before the next one is loaded
        return self._conclude(groups, native)

    def _prompt_in(self, dtype: str, native: bool | None) -> torch.Tensor:
        """The prompt; its beginning where bfloat16 is emulated, unless the user gave a length."""
        if dtype == "bfloat16" and native is False and self.shortens and self.ids.shape[1] > EMULATED_CONTEXT:
            self.say(
                f"This machine has no bfloat16 instructions: the prompt is cut to {EMULATED_CONTEXT} tokens, so that "
                "reading it does not take minutes. --context takes another length."
            )
            return self.ids[:, :EMULATED_CONTEXT]
        return self.ids

    def say(self, text: str, style: str | None = None) -> None:
        """Print one line or paragraph."""
        self.console.print(text, style=style, markup=False)

    def _measure_all(self, model: PreTrainedModel, ids: torch.Tensor, stream: bool) -> dict[str, Call]:
        """Measure the last draft first, because its text is the one to show; the table has it last."""
        methods = {HF: HfMethod(), PLAIN: PlainDraftModel.from_target(model)}
        for draft in (load_draft(name, model) for name in self._draft_names()):
            methods[type(draft).__name__.removesuffix("DraftModel")] = draft
        try:
            calls = {
                name: self._measure(name, model, methods[name], ids, stream and turn == 0)
                for turn, name in enumerate([*list(methods)[:1:-1], HF, PLAIN])
            }
        except torch.OutOfMemoryError as error:
            raise CommandError("out of memory: pass a smaller --context, or leave float32 out of --dtypes.") from error
        return {name: calls[name] for name in methods}

    def _draft_names(self) -> list[str]:
        """The draft that the user named; otherwise those without training, and for the tiny target its own."""
        if self.draft_name is not None:
            return [self.draft_name]
        is_tiny = self.target == str(session.tiny_model(session.TINY_TARGET))
        own = [session.tiny_model(name) for name in session.TINY_DRAFTS] if is_tiny else []
        return ["ngram", "specattn", *(str(folder) for folder in own if folder.is_dir())]

    def _measure(self, name: str, model: PreTrainedModel, method: Any, ids: torch.Tensor, stream: bool) -> Call:
        """Measure one way to decode, with a bar while it reads the prompt, and then possibly with its text."""

        def call(ids: torch.Tensor, **how: Any) -> Call:
            return run_call(model, method, (ids, torch.ones_like(ids)), decoding=Decoding(), seed=0, **how)

        call(ids[:, -WARM_UP_PROMPT:], tokens=WARM_UP_TOKENS)  # the first call is slow, and not measured
        text = TerminalStreamer(self.console, self.tokenizer, self.tail) if stream else None
        with PromptProgress(model, ids.shape[1], f"{name}: reading the prompt", self.console) as bar:

            def arrived(tokens: int) -> None:
                if tokens == 1:  # the prefill is over
                    bar.stop()
                    if text is not None:
                        text.begin()

            found = call(ids, tokens=self.new_tokens, on_arrival=arrived, text=text)
        self.say(
            f"{name}: {found.text.shape[1]} tokens, the first after {found.ttft_seconds:.2f} s, then "
            f"{found.tokens_per_second:.1f} tokens/s."
        )
        return found

    def _check(self, group: Group, model: PreTrainedModel, ids: torch.Tensor) -> None:
        """Fill the last column: in float32 whether the text is that of `generate`, otherwise the audit's verdict."""
        exact = group.dtype == "float32"
        reports: dict[tuple[int, ...], AuditReport] = {}
        reference = tokens_of(group.calls[HF])
        for name, call in group.calls.items():
            tokens = tokens_of(call)
            if tokens not in reports and not (exact and tokens == reference):
                self.say(f"Auditing the text of {name} in {group.dtype}.")
                sequence = torch.cat([ids, call.text], dim=1)
                reports[tokens] = audit(model, sequence, ids.shape[1], torch.ones_like(ids))
            report = reports.get(tokens)
            if exact:
                group.checks[name] = "reference" if name == HF else "yes" if tokens == reference else "no"
            elif report is not None:
                group.checks[name] = report.verdict
            if report is not None and (exact or report.verdict != EXACT):
                group.details.append(f"{name} in {group.dtype}: {report}.")

    def _conclude(self, groups: list[Group], native: bool | None) -> int:
        self.say("")
        for group in groups:
            self.console.print(_table(group))
        self.say(
            "tokens/s: decoding alone, without the prefill. tau: tokens per verification. speed ratio: to HF generate."
        )
        details = [line for group in groups for line in group.details]
        for line in details + remarks(groups, native):
            self.say(line)
        wrong = any("no" in group.checks.values() for group in groups)
        if wrong:
            self.say("A text in float32 differs from that of plain generate: it must not.", "bold red")
        return int(wrong)


def _table(group: Group) -> Table:
    """The measurements in one dtype."""
    table = Table(title=f"{group.dtype}, after {group.context} tokens", title_justify="left", title_style="bold")
    table.add_column("decoding")
    for heading in ("tokens/s", "speed ratio", "tau", "first token"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("identical text" if group.dtype == "float32" else "verdict", no_wrap=True)
    for name, call in group.calls.items():
        check = group.checks[name]
        table.add_row(
            escape(name),
            f"{call.tokens_per_second:.1f}",
            f"{group.speed_ratio(name):.2f}x",
            "-" if name == HF else f"{call.tau:.2f}",
            f"{call.ttft_seconds:.2f} s",
            f"[{CHECK_STYLES.get(check, 'bold red')}]{check}[/]",
        )
    return table


class TerminalStreamer(TextStreamer):
    """Print text as soon as its words are complete."""

    def __init__(self, console: Console, tokenizer: Any, tail: str):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.console = console
        self.tail = tail

    def begin(self) -> None:
        """Print the end of the prompt, for the continuation to follow."""
        self._write(self.tail, "dim")

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Print a piece of finished text."""
        self._write(text + ("\n" if stream_end else ""), "bold cyan")

    def _write(self, text: str, style: str) -> None:
        self.console.print(text, style=style, end="", markup=False, soft_wrap=True)
