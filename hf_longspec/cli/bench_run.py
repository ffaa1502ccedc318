"""The run behind `hf-longspec bench`: from the options to methods and cells, and from the results to the terminal."""

import hashlib
import json
import math
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..bench.analysis import analyse_cell
from ..bench.decoding import endless
from ..bench.document_prompts import OWN_LENGTH, DocumentPrompts
from ..bench.floors import bandwidth, floor_seconds
from ..bench.matrix import Cell, Matrix, Method
from ..bench.matrix_report import NOT_RUN, matrix_report
from ..bench.matrix_summary import rows_of
from ..bench.peak_memory import PeakMemory
from ..bench.plots import plot_all
from ..bench.readers import read_source
from ..bench.report_parts import of_kind
from ..bench.resumable import ResumableFile, without_folders
from ..bench.sweep import grid, parse_sweeps, split_axes
from ..bench.timing import TimeGuard
from ..bench.token_choice import decoding_of
from . import CommandError, models
from .bench_methods import baselines, load_drafts, name_of, points_of
from .bench_progress import BenchProgress
from .bench_request import OWN, Request, lengths


def run(request: Request) -> int:
    """Measure, report, and return the exit status."""
    if request.output.suffix != ".jsonl":
        raise CommandError(f"--output {request.output}: expected a name that ends with .jsonl.")
    if request.plots:
        _require_matplotlib()
    documents, layout = read_source(request.data)
    with models.quiet(progress_bars=not Path(request.target).is_dir()):
        prompts = DocumentPrompts(models.load_tokenizer(request.target), documents)
        return Bench(request, prompts, layout).run()


class Bench:
    """One run of the command.

    Args:
        request ([`Request`]): The options.
        prompts ([`DocumentPrompts`]): From `--data`.
        layout (`str`): How the data were written.
    """

    def __init__(self, request: Request, prompts: DocumentPrompts, layout: str):
        self.request = request
        self.prompts = prompts
        self.layout = layout
        self.axes = parse_sweeps(request.sweeps)
        self.bandwidth: float | None = None

    def run(self) -> int:
        """All dtypes, one model in memory at a time."""
        model, methods, cells = self._prepare(self.request.dtypes[0])
        device = models.describe_device(model.device)
        facts = {"device": device, "peak_memory": PeakMemory(model.device).how, "hf_longspec": _own_version()}
        guard = TimeGuard(self.request.minutes if self.request.minutes is not None else math.inf)
        file = ResumableFile(
            self.request.output, "bench", matrix_report, guard, self._settings(cells), facts, self.request.resume
        )
        calls = len(cells) * len(methods) * self.request.repeats * len(self.request.dtypes)
        interrupted = False
        try:
            with file, BenchProgress(calls) as progress:
                self._ceilings(file, model)
                for name in self.request.dtypes:
                    if name != self.request.dtypes[0]:
                        del model, methods  # before the next one is loaded
                        model, methods, cells = self._prepare(name)
                    self._measure(file, model, methods, cells, progress)
        except KeyboardInterrupt:
            interrupted = True
        self._show(file, interrupted)
        if interrupted:
            return 130
        return int(any(row.failed for row in rows_of(file.records)))

    def _prepare(self, dtype: str) -> tuple[PreTrainedModel, list[Method], list[Cell]]:
        """Model, methods and cells of one dtype, everything checked that can be before anything is measured."""
        model = endless(models.load_target(self.request.target, models.DTYPES[dtype]))
        drafts = load_drafts(self.request.drafts, model)
        decoding, of_drafts, contexts = split_axes(self.axes, {n: draft.settings for n, draft in drafts.items()})
        methods = [*baselines(self.request, model), *points_of(drafts, of_drafts, model)]
        own = {"temperature": self.request.temperature} if self.request.temperature else {}
        ways = [decoding_of(own | dict(point)) for point in grid(decoding)]
        widths = lengths("--context", ",".join(contexts)) if contexts else self.request.contexts
        self._require_room(model, widths)
        cells = [Cell(dtype, *rest) for rest in product(widths, self.request.batches, ways)]
        return model, methods, cells

    def _require_room(self, model: PreTrainedModel, widths: Sequence[int]) -> None:
        """Refuse contexts that exceed the model's positions, or the documents.

        Raises:
            CommandError: With both numbers.
        """
        limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or math.inf
        longest = max(widths)
        if longest + self.request.tokens > limit:
            raise CommandError(
                f"--context {longest} and {self.request.tokens} new tokens exceed the {limit} positions of "
                f"{self.request.target}: use shorter ones."
            )
        if longest > self.prompts.longest:
            raise CommandError(
                f"--context {longest}: the longest document of --data {self.request.data} has {self.prompts.longest} "
                f"tokens. Use a shorter context, --context {OWN}, or longer documents."
            )
        if OWN_LENGTH in widths:
            self.prompts.own(1, int(min(limit, 2**40)) - self.request.tokens)

    def _settings(self, cells: Sequence[Cell]) -> dict[str, Any]:
        """What decides the numbers; a run is resumed only if none of it has changed."""
        request = self.request
        contexts = list(dict.fromkeys(cell.context for cell in cells))
        return {
            "target": name_of(request.target),
            "drafts": [name_of(name) for name in request.drafts],
            "assistant": None if request.assistant is None else name_of(request.assistant),
            "data": {"source": _source_name(request.data), "layout": self.layout, "sha256": self._data_hash()}
            | self.prompts.describe(contexts),
            "contexts": contexts,
            "batches": list(request.batches),
            "dtypes": list(request.dtypes),
            "sweeps": list(request.sweeps),
            "analyse": request.analyse,
            "tokens": request.tokens,
            "repeats": request.repeats,
            "temperature": request.temperature,
            "lookup_tokens": request.lookup_tokens,
        }

    def _data_hash(self) -> str:
        digest = hashlib.sha256()
        for part in (*self.prompts.bodies, *self.prompts.tails):
            digest.update(part.numpy().tobytes())
        return digest.hexdigest()[:16]

    def _ceilings(self, file: ResumableFile, model: PreTrainedModel) -> None:
        """The bandwidth: that of the first part of a resumed run, so that all rows have one floor."""
        known = of_kind(file.records, "ceilings")
        self.bandwidth = known[0]["read_gb_per_second"] if known else bandwidth(model.device)
        if not known and self.bandwidth is not None:
            file.write("ceilings", read_gb_per_second=round(self.bandwidth, 1))

    def _measure(
        self,
        file: ResumableFile,
        model: PreTrainedModel,
        methods: Sequence[Method],
        cells: Sequence[Cell],
        progress: BenchProgress,
    ) -> None:
        matrix = Matrix(model, methods, self.prompts, file, tokens=self.request.tokens, repeats=self.request.repeats)
        for cell in cells:
            self._floor(file, model, cell)
            matrix.measure(cell, progress)
            if self.request.analyse:
                analyse_cell(matrix, cell, progress)

    def _floor(self, file: ResumableFile, model: PreTrainedModel, cell: Cell) -> None:
        place = {"dtype": cell.dtype, "context": cell.context, "batch": cell.batch}
        known = any(all(r[k] == v for k, v in place.items()) for r in of_kind(file.records, "floor"))
        if known or self.bandwidth is None or cell.context == OWN_LENGTH:
            return
        seconds = floor_seconds(model, cell.context, cell.batch, self.bandwidth)
        if seconds is not None:
            file.write("floor", **place, seconds=seconds)

    def _show(self, file: ResumableFile, interrupted: bool) -> None:
        """The table or the JSON object, then the plots."""
        report = matrix_report(file.records)
        paths = [file.path, file.path.with_suffix(".md")]
        if self.request.plots:
            paths += plot_all(file.records, file.path.with_suffix(""))
        if self.request.as_json:
            print(json.dumps(summary(file.records) | {"files": [str(path) for path in paths]}))
        else:
            print(report)
        print(f"Written: {', '.join(map(str, paths))}", file=sys.stderr)
        if interrupted:
            print("Interrupted; what was measured is kept. --resume goes on.", file=sys.stderr)


def summary(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Environment and rows, for `--json`."""
    return {
        "environment": of_kind(records, "environment")[0],
        "rows": [row.to_dict() for row in rows_of(records)],
        "analyses": of_kind(records, "analysis"),
        "skipped": of_kind(records, "skipped"),
        "not_run": NOT_RUN,
        "finished": bool(of_kind(records, "end")),
    }


def _source_name(data: str) -> str:
    return Path(without_folders(data)).name or data


def _own_version() -> str | None:
    try:
        return version("hf_longspec")
    except PackageNotFoundError:
        return None


def _require_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise CommandError(
            "the plots need matplotlib, which is not installed: pip install 'hf_longspec[bench]', or pass --no-plots."
        ) from error
