"""`hf-longspec bench`: speed and acceptance of drafts, compared with other ways to decode the same text."""

import hashlib
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import Console
from rich.markdown import Markdown
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_longspec import __version__

from ..bench.calls import HF, PLAIN, Decoding, HfMethod, endless
from ..bench.machine import PeakMemory, floor_seconds, read_gb_per_second, without_folders
from ..bench.matrix import Matrix, draft_points, grid, split_axes, written
from ..bench.plots import plot_all
from ..bench.prompts import DocumentPrompts
from ..bench.report import FAILED, matrix_report, rows_of
from ..bench.results import OWN_LENGTH, of_kind
from ..bench.runner import Cell, Method, Runner
from ..cli import CommandError, models, options
from ..generation.target import TargetView
from ..modeling.plain.modeling_plain import PlainDraftModel
from ..modeling.register_draft import DRAFTS
from .models import Progress, noticing_others
from .options import name_of

LOOKUP, ASSISTED = "hf prompt lookup", "hf assisted"
LOOKUP_TOKENS = 4  # that prompt lookup drafts
# The drafts and ways to choose tokens of `--preset all`. The loop without a draft is measured in any case.
ALL_DRAFTS = [one.names[0] for one in DRAFTS.values() if one.model.weightless and one.model is not PlainDraftModel]
ALL_WAYS = "temperature=0,1"
PACKAGES = ("pandas", "scipy")


def run(args: SimpleNamespace) -> int:
    require_packages(args.plots)
    bench = Bench(args)
    with models.quiet(progress_bars=not Path(args.target).is_dir()):
        prompts = DocumentPrompts(models.load_tokenizer(args.target), args.documents, args.chat)
        file, interrupted = bench.measure(
            prompts, args.output, math.inf if args.minutes is None else args.minutes * 60, args.resume or None
        )
    show(file, args.plots, args.as_json)
    if interrupted:
        print("Interrupted. Finished calls are kept; --resume continues.", file=sys.stderr)
        return options.INTERRUPTED
    return int(any(row["text"] in FAILED for row in rows_of(file.records)))


class Bench:
    """One run of the command: the values that decide the numbers, under their names in the result file."""

    def __init__(self, args: SimpleNamespace):
        drafts, self.sweeps = args.draft or [], args.sweep or []
        if args.preset is not None:
            drafts += [name for name in ALL_DRAFTS if name not in drafts]
            is_sampled = args.temperature or any(one.startswith("temperature=") for one in self.sweeps)
            self.sweeps += [] if is_sampled else [ALL_WAYS]
        self.target, self.preset, self.assistant = args.target, args.preset, args.assistant
        self.drafts, self.data = drafts or ["ngram"], args.data
        self.column, self.chat = args.column, args.chat
        self.contexts, self.batches = args.context, args.batch
        types = (models.dtype_of(name, models.default_device()) for name in args.dtype)
        self.dtypes = list(dict.fromkeys(str(one).removeprefix("torch.") for one in types))
        self.tokens, self.repeats = args.max_new_tokens, args.repeats
        self.temperature = args.temperature

    def measure(
        self, prompts: DocumentPrompts, output: Path, seconds: float, resume: bool | None
    ) -> tuple[Runner, bool]:
        """Measure all dtypes, with one model in memory at a time; returns also whether Ctrl-C ended the run."""
        model, methods, cells = self._prepare(self.dtypes[0], prompts)
        facts = {
            "device": models.describe_device(model.device),
            "peak_memory": PeakMemory(model.device).how,
            "hf_longspec": __version__,
        }
        settings = self._settings(cells, prompts)
        file = Runner(output, "bench", matrix_report, seconds, settings, facts, resume)
        try:
            total = len(cells) * len(methods) * self.repeats * len(self.dtypes)
            with noticing_others(), file, Progress(total) as progress:
                for name in self.dtypes:
                    if name != self.dtypes[0]:
                        del model, methods  # before the next one is loaded
                        model, methods, cells = self._prepare(name, prompts)
                    matrix = Matrix(model, methods, prompts, file, tokens=self.tokens, repeats=self.repeats)
                    for cell in cells:
                        _write_floor(file, model, cell)
                        matrix.measure(cell, progress)
        except KeyboardInterrupt:
            return file, True
        return file, False

    def _prepare(self, dtype: str, prompts: DocumentPrompts) -> tuple[PreTrainedModel, list[Method], list[Cell]]:
        """Model, methods and cells of one dtype, with every check that is possible before anything is measured."""
        model = endless(models.load_target(self.target, models.TORCH_DTYPES[dtype]))
        drafts = load_drafts(self.drafts, model)
        axes = options.parse_sweeps(self.sweeps)
        decoding, of_drafts, contexts = split_axes(axes, {name: draft.settings for name, draft in drafts.items()})
        methods = [Method(HF, HfMethod()), Method(PLAIN, PlainDraftModel.from_target(model))]
        methods.append(Method(LOOKUP, HfMethod({"prompt_lookup_num_tokens": LOOKUP_TOKENS}, max_batch=1)))
        if self.assistant is not None:
            assistant = load_assistant(self.assistant, model)
            methods.append(Method(ASSISTED, HfMethod({"assistant_model": assistant}, max_batch=1)))
        methods += points_of(drafts, of_drafts, model)
        own = {"temperature": self.temperature} if self.temperature else {}
        ways = [Decoding(**(own | dict(point))) for point in grid(decoding)]
        widths = options.lengths("--context", ",".join(contexts)) if contexts else self.contexts
        if self.preset is not None:
            longest = min(models.positions_of(model.config) - self.tokens, max(prompts.sizes))
            widths = [width for width in widths if width <= longest] or widths[:1]
        self._require_room(model, widths, prompts)
        return model, methods, [Cell(dtype, *rest) for rest in product(widths, self.batches, ways)]

    def _require_room(self, model: PreTrainedModel, widths: Sequence[int], prompts: DocumentPrompts) -> None:
        """Refuse contexts that exceed the model's positions, or the documents."""
        limit = models.positions_of(model.config)
        longest, document = max(widths), max(prompts.sizes)
        if longest + self.tokens > limit:
            raise CommandError(
                f"--context {longest} and {self.tokens} new tokens exceed the {limit} positions of {self.target}. Pass "
                "a shorter --context."
            )
        if longest > document:
            raise CommandError(
                f"--context {longest}: the longest document of --data {' '.join(self.data)} has {document} tokens. "
                f"Use a shorter context, --context {options.OWN}, or longer documents."
            )
        if OWN_LENGTH in widths:
            prompts.own(1, limit - self.tokens)

    def _settings(self, cells: Sequence[Cell], prompts: DocumentPrompts) -> dict[str, Any]:
        """All values; a run is resumed only if none of them has changed."""
        contexts = list(dict.fromkeys(cell.context for cell in cells))
        digest = hashlib.sha256()
        for part in (*prompts.texts, prompts.tail):
            digest.update(part.numpy().tobytes())
        names = [Path(without_folders(source)).name or source for source in self.data]
        return vars(self) | {
            "target": name_of(self.target),
            "drafts": [name_of(name) for name in self.drafts],
            "assistant": None if self.assistant is None else name_of(self.assistant),
            "data": {"source": ", ".join(names), "sha256": digest.hexdigest()[:16], **prompts.describe(contexts)},
            "contexts": contexts,
        }


def points_of(drafts: dict[str, Any], axes: Mapping[str, Sequence[str]], model: PreTrainedModel) -> list[Method]:
    """Every draft with every combination of the settings on `axes` that it has."""
    methods = [
        Method(", ".join(filter(None, [name, written(point)])), draft, point)
        for name, draft in drafts.items()
        for point in draft_points(axes, draft.settings)
    ]
    for method in methods:  # before anything is measured
        try:
            with method.with_settings():
                method.how.check(TargetView(model))
        except ValueError as error:
            raise CommandError(f"--sweep: {method.name}: {error}") from error
    return methods


def load_drafts(names: Sequence[str], model: PreTrainedModel) -> dict[str, Any]:
    return {name_of(name): load_draft(name, model) for name in names}


def load_draft(name: str, model: PreTrainedModel) -> Any:
    """A draft by name, folder or Hub id, which drafts in every iteration."""
    load = models.load_draft if Path(name).is_dir() else models.open_draft
    draft = load(name, model).to(model.device)
    if "gate" in draft.settings:  # it would stop drafting where that does not pay, and hide what is to be measured
        draft.generation_config.gate = False
    return draft


def load_assistant(name: str, model: PreTrainedModel) -> PreTrainedModel:
    with models.loading(name, "assistant"):
        assistant = AutoModelForCausalLM.from_pretrained(name, dtype=model.dtype).eval().to(model.device)
        sizes = [m.config.get_text_config(decoder=True).vocab_size for m in (assistant, model)]
        if sizes[0] != sizes[1]:
            raise ValueError(f"its vocabulary has {sizes[0]} tokens, that of the target {sizes[1]}. Pass another model")
    return endless(assistant)


def _write_floor(file: Runner, model: PreTrainedModel, cell: Cell) -> None:
    """Write the least time of a step once, and before the first the bandwidth, also for the parts of a resumed run."""
    place = {"dtype": cell.dtype, "context": cell.context, "batch": cell.batch}
    known = of_kind(file.records, "ceilings")
    if not known and (found := read_gb_per_second(model.device)) is not None:
        known = [file.write("ceilings", read_gb_per_second=round(found, 1))]
    if known and cell.context != OWN_LENGTH and not of_kind(file.records, "floor", **place):
        seconds = floor_seconds(model, cell.context, cell.batch, known[0]["read_gb_per_second"])
        if seconds is not None:
            file.write("floor", **place, seconds=seconds)


def show(file: Runner, plots: bool, as_json: bool) -> None:
    records = file.records
    paths = [file.path, file.path.with_suffix(".md")]
    if plots:
        paths += plot_all(records, file.path)
    if as_json:
        result = {
            "environment": of_kind(records, "environment")[0],
            "rows": rows_of(records),
            "skipped": of_kind(records, "skipped"),
            "finished": bool(of_kind(records, "end")),
            "files": [str(path) for path in paths],
        }
        print(json.dumps(result))
    else:
        report, console = matrix_report(records, brief=True), Console()
        if console.is_terminal:
            # with spaces, so that a range breaks into lines where a column is too narrow for it
            console.print(Markdown(re.sub(r"\(([\d.]+)-([\d.]+)\)", r"(\1 - \2)", report)))
        else:
            print(report)
    models.say(f"Written: {', '.join(map(str, paths))}", stderr=True)


def require_packages(plots: bool) -> None:
    """Refuse, before anything is measured, to run without the packages that the report needs."""
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        raise CommandError(f"the report needs packages that are not installed: pip install {' '.join(missing)}.")
    if plots and find_spec("matplotlib") is None:
        raise CommandError("the plots need matplotlib: pip install matplotlib, or pass --no-plots.")
