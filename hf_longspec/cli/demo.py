"""Continue a long document with and without speculation, and compare text, speed and acceptance.

    python -m hf_longspec.cli.demo
    python -m hf_longspec.cli.demo --target Qwen/Qwen3-0.6B --file notes.txt

Exit status: 0; 1 if a text in float32 is not that of plain `generate`; 2 for what cannot be run; 130 after Ctrl-C.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from ..auditing import EXACT, AuditReport, audit
from ..modeling.modeling_ngram import NgramDraftModel
from ..modeling.modeling_plain import PlainDraftModel
from ..modeling.modeling_specattn import SpecAttnDraftModel
from . import CommandError, models
from .documents import make_prompt, read_document
from .measuring import Measurement, StopWatch, measure, prefill_work, warm_up, watched_layers
from .remarks import HF, PLAIN, Group, remarks

if TYPE_CHECKING:
    from .display import Display

CONTEXT, NEW_TOKENS = 6144, 64
QUICK_CONTEXT, QUICK_NEW_TOKENS = 2048, 32
# Without bfloat16 instructions reading the prompt takes 10 times as long as in float32, and every method reads it.
EMULATED_CONTEXT = 2048

EXAMPLES = """\
Examples:
  hf-longspec demo --quick
  hf-longspec demo --target Qwen/Qwen3-0.6B --file notes.txt
  hf-longspec demo --target hub_cards/tiny-target --draft hub_cards/tiny-longspec --dtypes float32

Exit status: 0; 1 if a text in float32 is not that of plain generate; 2 for what cannot be run; 130 after Ctrl-C.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit status."""
    options = parse_arguments(arguments)
    try:
        from .display import Display

        with models.quiet(progress_bars=options.target is not None and not Path(options.target).is_dir()):
            return Demo(options, Display()).run()
    except CommandError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        return 130


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; unknown ones end the process as argparse does."""
    parser = argparse.ArgumentParser(
        prog="hf-longspec demo",
        description=(__doc__ or "").split("\n")[0],
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--target", help="Hub id or folder of the model (default: the tiny target of the repository)")
    parser.add_argument("--draft", help="Hub id or folder of a draft (default: all kinds that there are)")
    parser.add_argument("--file", type=Path, help="text to continue (default: a module of the standard library)")
    parser.add_argument("--context", type=_positive, help=f"most prompt tokens (default: {CONTEXT}, or what fits)")
    parser.add_argument("--max-new-tokens", type=_positive, help=f"tokens to generate (default: {NEW_TOKENS})")
    parser.add_argument("--dtypes", type=_dtypes, default=["float32", "bfloat16"], help="default: float32,bfloat16")
    parser.add_argument(
        "--quick", action="store_true", help=f"{QUICK_CONTEXT} prompt and {QUICK_NEW_TOKENS} new tokens"
    )
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _dtypes(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in models.DTYPES]:
        raise argparse.ArgumentTypeError(
            f"unknown {', '.join(map(repr, unknown))}; choose from {', '.join(models.DTYPES)}"
        )
    return list(dict.fromkeys(names))


class Demo:
    """One run: every way to decode, in every dtype.

    Raises:
        CommandError: If target, text and lengths do not go together.
    """

    def __init__(self, options: argparse.Namespace, display: "Display"):
        self.display = display
        self.dtypes, self.draft_name = options.dtypes, options.draft
        self.target = models.find_target(options.target)
        document = read_document(options.file)
        self.tokenizer = models.load_tokenizer(self.target)
        self.new_tokens = options.max_new_tokens or (QUICK_NEW_TOKENS if options.quick else NEW_TOKENS)
        wanted = options.context or (QUICK_CONTEXT if options.quick else CONTEXT)
        room = models.max_positions(self.target) - self.new_tokens
        if room < 1 or (options.context or 0) > room:
            raise CommandError(
                f"--context {wanted} and {self.new_tokens} new tokens do not fit into the {room + self.new_tokens} "
                f"positions of the model: use at most --context {max(room, 0)}, or fewer --max-new-tokens."
            )
        self.prompt = make_prompt(self.tokenizer, *document, max_tokens=min(wanted, room))
        self.ids = self.prompt.input_ids
        self.shortens = options.context is None

    def run(self) -> int:
        """Measure, show, and return the exit status."""
        groups: list[Group] = []
        for dtype in self.dtypes:
            self.display.say(f"Loading {self.target} in {dtype}.")
            model = models.load_target(self.target, models.DTYPES[dtype])
            if not groups:
                self._introduce(model)
            native_bfloat16 = models.has_native_bfloat16(model.device)
            self.ids = self._prompt_in(dtype, native_bfloat16)
            group = Group(dtype, self._measure_all(model, stream=not groups), self.ids.shape[1])
            self._check(group, model)
            groups.append(group)
            del model  # before the next one is loaded
        self._conclude(groups, native_bfloat16)
        return int(any("no" in group.checks for group in groups))

    def _introduce(self, model: PreTrainedModel) -> None:
        size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
        self.display.say(
            f"{type(model).__name__} with {size:.1f}M parameters on {models.describe_device(model.device)}.\n"
            f"Prompt: the first {self.ids.shape[1]} tokens of {self.prompt.name}; {self.new_tokens} tokens to come.\n"
        )

    def _prompt_in(self, dtype: str, native_bfloat16: bool | None) -> torch.Tensor:
        """The prompt; its beginning where bfloat16 is emulated, unless a length was asked for."""
        ids = self.prompt.input_ids
        if dtype == "bfloat16" and native_bfloat16 is False and self.shortens and ids.shape[1] > EMULATED_CONTEXT:
            self.display.say(
                f"This machine has no bfloat16 instructions: the prompt is cut to {EMULATED_CONTEXT} tokens, so that "
                "reading it does not take minutes. --context takes another length."
            )
            return ids[:, :EMULATED_CONTEXT]
        return ids

    def _measure_all(self, model: PreTrainedModel, stream: bool) -> list[Measurement]:
        """The last draft goes first, because its text is what one wants to see; the table has it last."""
        try:
            drafts = {type(draft).__name__.removesuffix("DraftModel"): draft for draft in self._drafts(model)}
            for draft in drafts.values():
                draft.generation_config.gate = False  # the table compares speculation with plain decoding
            drafted = [
                self._measure(name, model, draft, stream and turn == 0)
                for turn, (name, draft) in enumerate(reversed(drafts.items()))
            ]
            stock = self._measure(HF, model, None)
            plain = self._measure(PLAIN, model, PlainDraftModel.from_target(model))
        except ValueError as error:  # a refusal, which names its rule and remedy
            raise CommandError(str(error)) from error
        except torch.OutOfMemoryError as error:
            raise CommandError("out of memory: pass a smaller --context, or leave float32 out of --dtypes.") from error
        return [stock, plain, *reversed(drafted)]

    def _drafts(self, model: PreTrainedModel) -> list[Any]:
        """The draft that was asked for; otherwise those without training, and for the tiny target its own."""
        if self.draft_name is not None:
            return [models.load_draft(self.draft_name, model)]
        drafts: list[Any] = [kind.from_target(model) for kind in (NgramDraftModel, SpecAttnDraftModel)]
        if self.target == str(models.TINY_TARGET):
            drafts += [models.load_draft(str(folder), model) for folder in models.TINY_DRAFTS if folder.is_dir()]
        return drafts

    def _measure(self, name: str, model: PreTrainedModel, draft: Any, stream: bool = False) -> Measurement:
        """Measure one way to decode, under a bar while it reads the prompt, and then possibly show its text."""
        warm_up(model, draft, self.ids)
        text = self.display.text_streamer(self.tokenizer, self.prompt.text) if stream else None
        bar = self.display.progress(f"{name}: reading the prompt", prefill_work(model, self.ids.shape[1]))
        with bar as (advance, stop_bar), watched_layers(model, advance) as stop_watching:

            def prefill_is_over() -> None:
                stop_watching()
                stop_bar()
                if text is not None:
                    text.begin()

            row = measure(name, model, draft, self.ids, self.new_tokens, StopWatch(prefill_is_over, text))
        self.display.say(
            f"{name}: {len(row.tokens)} tokens, the first after {row.first_token_seconds:.2f} s, then "
            f"{row.tokens_per_second:.1f} tokens/s."
        )
        return row

    def _check(self, group: Group, model: PreTrainedModel) -> None:
        """Fill the last column: in float32 whether the text is plain `generate`'s, otherwise what the audit says."""
        exact = group.dtype == "float32"
        reports: dict[tuple[int, ...], AuditReport] = {}
        for row in group.rows:
            identical = row.tokens == group.rows[0].tokens
            if row.tokens not in reports and not (exact and identical):
                self.display.say(f"Auditing the text of {row.name} in {group.dtype}.")
                sequence = torch.cat([self.ids, torch.tensor([row.tokens], dtype=torch.long)], dim=1)
                reports[row.tokens] = audit(model, sequence, self.ids.shape[1], torch.ones_like(self.ids))
            if exact:
                group.checks.append("reference" if row is group.rows[0] else "yes" if identical else "no")
            else:
                group.checks.append(reports[row.tokens].verdict)
            report = reports.get(row.tokens)
            if report is not None and (exact or report.verdict != EXACT):
                group.details.append(f"{row.name} in {group.dtype}: {report}.")

    def _conclude(self, groups: list[Group], native_bfloat16: bool | None) -> None:
        self.display.say("")
        for group in groups:
            self.display.table(group)
        self.display.say(
            "tokens/s: decoding alone, without the prefill. tau: tokens per verification. speed ratio: to HF generate."
        )
        details = [line for group in groups for line in group.details]
        for line in details + remarks(groups, native_bfloat16):
            self.display.say(line)
        if any("no" in group.checks for group in groups):
            self.display.say("A text in float32 differs from that of plain generate: it must not.", "bold red")


if __name__ == "__main__":
    sys.exit(main())
