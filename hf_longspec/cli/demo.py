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

from ..auditing import audit
from ..modeling.modeling_plain import PlainDraftModel
from ..modeling.modeling_specattn import SpecAttnDraftModel
from . import CommandError, models
from .documents import Prompt, make_prompt, read_document
from .measuring import Measurement, StopWatch, measure, prefill_work, warm_up, watched_layers
from .remarks import HF, PLAIN, Group, remarks

if TYPE_CHECKING:
    from .display import Display

CONTEXT, NEW_TOKENS = 8192, 96
QUICK_CONTEXT, QUICK_NEW_TOKENS = 2048, 32


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
    parser = argparse.ArgumentParser(prog="python -m hf_longspec.cli.demo", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--target", help="Hub id or folder of the model (default: the tiny target of the repository)")
    parser.add_argument("--draft", help="Hub id or folder of a draft (default: SpecAttn, which needs no training)")
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
    """One run: every way to decode, in every dtype."""

    def __init__(self, options: argparse.Namespace, display: "Display"):
        self.options = options
        self.display = display
        self.new_tokens = options.max_new_tokens or (QUICK_NEW_TOKENS if options.quick else NEW_TOKENS)
        self.prompt: Prompt | None = None
        self.streamed = False

    def run(self) -> int:
        """Measure, show, and return the exit status."""
        target = models.find_target(self.options.target)
        document = read_document(self.options.file)
        tokenizer = models.load_tokenizer(target)
        groups = []
        for dtype in self.options.dtypes:
            self.display.say(f"Loading {target} in {dtype}.")
            model = models.load_target(target, models.DTYPES[dtype])
            if self.prompt is None:
                self.prompt = make_prompt(tokenizer, *document, max_tokens=self._most_prompt_tokens(model))
                self._introduce(model)
            group = Group(dtype, self._measure_all(model, tokenizer))
            self._check(group, model)
            groups.append(group)
        self._conclude(groups, model.device)
        return int(any("no" in group.checks for group in groups))

    def _most_prompt_tokens(self, model: PreTrainedModel) -> int:
        limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        room = sys.maxsize if limit is None else limit - self.new_tokens
        if room < 1 or (self.options.context or 0) > room:
            raise CommandError(
                f"--context {self.options.context or 1} and {self.new_tokens} new tokens do not fit into the {limit} "
                f"positions of the model: use at most --context {max(room, 0)}, or fewer --max-new-tokens."
            )
        return self.options.context or min(QUICK_CONTEXT if self.options.quick else CONTEXT, room)

    def _introduce(self, model: PreTrainedModel) -> None:
        assert self.prompt is not None
        size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
        self.display.say(
            f"{type(model).__name__} with {size:.1f}M parameters on {models.describe_device(model.device)}.\n"
            f"Prompt: the first {self.prompt.input_ids.shape[1]} tokens of {self.prompt.name}. Then "
            f"{self.new_tokens} new tokens.\n"
        )

    def _measure_all(self, model: PreTrainedModel, tokenizer: Any) -> list[Measurement]:
        """The draft goes first, because its text is what one wants to see; the table has it last."""
        try:
            if self.options.draft is not None:
                draft = models.load_draft(self.options.draft, model)
            else:
                draft = SpecAttnDraftModel.from_target(model)
            name = type(draft).__name__.removesuffix("DraftModel")
            drafted = self._measure(name, model, draft, None if self.streamed else tokenizer)
            self.streamed = True
            stock = self._measure(HF, model, None)
            plain = self._measure(PLAIN, model, PlainDraftModel.from_target(model))
        except ValueError as error:  # a refusal, which names its rule and remedy
            raise CommandError(str(error)) from error
        except torch.OutOfMemoryError as error:
            raise CommandError("out of memory: pass a smaller --context, or leave float32 out of --dtypes.") from error
        return [stock, plain, drafted]

    def _measure(self, name: str, model: PreTrainedModel, draft: Any, tokenizer: Any = None) -> Measurement:
        """Measure one way to decode under a progress bar; with a tokenizer, stream its text."""
        assert self.prompt is not None
        ids, text = self.prompt.input_ids, None
        if tokenizer is not None:
            text = self.display.text_streamer(tokenizer, self.prompt.text)
        warm_up(model, draft, ids)
        with (
            self.display.progress(f"{name}: reading the prompt", prefill_work(model, ids.shape[1])) as (
                advance,
                stop_bar,
            ),
            watched_layers(model, advance) as stop_watching,
        ):

            def prefill_is_over() -> None:
                stop_watching()
                stop_bar()
                if text is not None:
                    text.begin()

            row = measure(name, model, draft, ids, self.new_tokens, StopWatch(prefill_is_over, text))
        self.display.say(
            f"{name}: {len(row.tokens)} tokens, the first after {row.first_token_seconds:.2f} s, then "
            f"{row.tokens_per_second:.1f} tokens/s."
        )
        return row

    def _check(self, group: Group, model: PreTrainedModel) -> None:
        """Fill the last column: in float32 the text itself, otherwise the audit of every different text."""
        assert self.prompt is not None
        length = self.prompt.input_ids.shape[1]
        reports: dict[tuple[int, ...], str] = {}
        for row in group.rows:
            identical = row.tokens == group.rows[0].tokens
            if row.tokens not in reports and (group.dtype != "float32" or not identical):
                sequence = torch.cat([self.prompt.input_ids, torch.tensor([row.tokens], dtype=torch.long)], dim=1)
                self.display.say(f"Auditing the text of {row.name} in {group.dtype}.")
                reports[row.tokens] = str(audit(model, sequence, length, torch.ones(1, length)))
            if group.dtype == "float32":
                group.checks.append("reference" if row is group.rows[0] else "yes" if identical else "no")
            else:
                group.checks.append(reports[row.tokens].partition(":")[0])
            if group.checks[-1] not in ("reference", "yes", "exact"):
                group.details.append(f"{row.name} in {group.dtype}: {reports[row.tokens]}.")

    def _conclude(self, groups: list[Group], device: torch.device) -> None:
        assert self.prompt is not None
        self.display.say("")
        for group in groups:
            self.display.table(group)
        self.display.say(
            "tokens/s: decoding alone, without the prefill. tau: tokens per verification. speed ratio: to HF generate."
        )
        details = [line for group in groups for line in group.details]
        native = models.has_native_bfloat16(device)
        for line in details + remarks(groups, self.prompt.input_ids.shape[1], native):
            self.display.say(line)
        if any("no" in group.checks for group in groups):
            self.display.say("A text in float32 differs from that of plain generate: it must not.", "bold red")


if __name__ == "__main__":
    sys.exit(main())
