"""`hf-longspec generate --data`: continue every prompt of a file in batches, in one process or several.

Each process writes the rows that it has finished to a file of its own beside the output. The files are merged into the
output, in the order of the prompts, when all rows are done.
"""

import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import set_seed

from ..bench.prompts import around_a_message, left_padded, read_rows
from ..bench.results import read_records, write_anew
from ..cli import CommandError, one_line
from .models import LoadedModels, Progress, default_device, load_models, say

PART = ".part"


def continue_rows(args: SimpleNamespace, how: dict[str, Any]) -> int:
    """Continue all rows of `--data`; returns the exit status."""
    if args.output is None:
        raise CommandError("--data needs --output FILE.jsonl for the texts.")
    state = processes()
    parts = sorted(args.output.parent.glob(f"{args.output.name}{PART}*"))
    done = {row for part in parts for row in finished(part)} | set(finished(args.output))
    if done and not args.resume:
        raise CommandError(f"{args.output} has {len(done)} finished rows. Pass --resume, or another --output.")
    prompts = list(texts_of(args.data, args.column))
    state.wait_for_everyone()  # all have read what is finished before anyone writes
    if state.num_processes > 1 and args.device is None:
        args.device = str(state.device)
    with load_models(args) as loaded:
        own = Part(args.output, state.process_index)
        pending = [(row, prompt) for row, prompt in enumerate(prompts) if row not in done]
        rows = Rows(loaded, args, how, own)
        rows.run(rows.batches(pending)[state.process_index :: state.num_processes])
    state.wait_for_everyone()
    if not state.is_main_process:
        return 0
    records = merge(args.output, len(prompts))
    failed = [record for record in records if "error" in record]
    say(f"{len(records)} rows in {args.output}, {len(failed)} failed. {rows.speed()}", stderr=True)
    return 1 if failed else 0


def processes() -> Any:
    """The processes among which `accelerate launch` or `torchrun` divides the rows, or this one alone."""
    if "WORLD_SIZE" not in os.environ:
        alone = SimpleNamespace(num_processes=1, process_index=0, is_main_process=True)
        alone.wait_for_everyone = lambda: None
        return alone
    from accelerate import PartialState

    return PartialState(cpu=default_device().type == "cpu")


def texts_of(source: str, column: str | None) -> Iterator[str | None]:
    """Yield the prompts; `None` for a row without one. The first row must have one, as it shows a wrong column."""
    name = column or "prompt"
    for number, row in enumerate(read_rows(source)):
        text = row.get(name) if isinstance(row, dict) else None
        if not number and not isinstance(text, str):
            keys = ", ".join(row) if isinstance(row, dict) else f"none, it is a {type(row).__name__}"
            raise CommandError(f"--data {source}: {name} is not a text; the keys are {keys}. Pass --column.")
        yield text if isinstance(text, str) and text else None


class Part:
    """The finished rows of one process, one JSON object per line."""

    def __init__(self, output: Path, process: int):
        self.path = output.with_name(f"{output.name}{PART}{process}")
        output.parent.mkdir(parents=True, exist_ok=True)
        records = finished(self.path)  # without a last line that was cut off
        write_anew(self.path, records.values())
        self._file = self.path.open("a", encoding="utf-8")

    def write(self, row: int, **values: Any) -> None:
        """Add a row."""
        self._file.write(json.dumps({"row": row, **values}) + "\n")
        self._file.flush()


def finished(path: Path) -> dict[int, dict[str, Any]]:
    """The complete lines of a file, by row; empty if there is no such file."""
    return {record["row"]: record for record in read_records(path)} if path.exists() else {}


def merge(output: Path, count: int) -> list[dict[str, Any]]:
    """Write all rows in the order of the prompts, and remove the files of the processes."""
    parts = sorted(output.parent.glob(f"{output.name}{PART}*"))
    found = finished(output)
    for part in parts:
        found |= finished(part)
    if missing := count - len(found):
        raise CommandError(f"{missing} of {count} rows are missing, since a process ended early. Pass --resume.")
    records = [found[row] for row in sorted(found)]
    write_anew(output, records)
    for part in parts:
        part.unlink()
    return records


class Rows:
    """Continue rows in batches of similar lengths."""

    def __init__(self, loaded: LoadedModels, args: SimpleNamespace, how: dict[str, Any], part: Part):
        self.loaded, self.part = loaded, part
        self.batch, self.seed = args.batch, args.seed or 0
        self.how = how | {"max_new_tokens": args.max_new_tokens}
        self.around = around_a_message(loaded.tokenizer) if args.chat else ("", "")
        self.tokens, self.seconds = 0, 0.0

    def batches(self, rows: Sequence[tuple[int, str | None]]) -> list[list[tuple[int, Any]]]:
        """Return rows and token ids in batches, the longest first, so that too little memory shows early.

        A row without a prompt, or whose prompt is too long, comes with the error instead of ids.
        """
        encoded = [(row, self._ids(row, text)) for row, text in rows]
        encoded.sort(key=lambda entry: len(entry[1]) if torch.is_tensor(entry[1]) else 0, reverse=True)
        return [encoded[start : start + self.batch] for start in range(0, len(encoded), self.batch)]

    def _ids(self, row: int, text: str | None) -> torch.Tensor | CommandError:
        if text is None:
            return CommandError("the row has no prompt. Pass a text.")
        try:
            written = text.join(self.around)
            return self.loaded.encode(f"row {row}", written, room=self.how["max_new_tokens"])[0]
        except CommandError as error:
            return error

    def run(self, batches: Sequence[list[tuple[int, Any]]]) -> None:
        """Continue all batches, and write each row as soon as it is done."""
        with Progress(sum(map(len, batches)), "Generating") as progress:
            for batch in batches:
                for row, error in batch:
                    if not torch.is_tensor(error):
                        self.part.write(row, error=one_line(error))
                self.decode([(row, ids) for row, ids in batch if torch.is_tensor(ids)])
                progress.step(len(batch))
                progress.say(f"Generating, {self.speed()}")

    def decode(self, batch: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Continue the rows of one batch, one by one if the batch fails; a row that fails alone is written as such."""
        if not batch:
            return
        tokenizer, started = self.loaded.tokenizer, time.perf_counter()
        config = self.loaded.model.generation_config
        pad = next(token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if token is not None)
        ids, mask = left_padded([prompt for _, prompt in batch], pad)
        set_seed(self.seed + batch[0][0])
        try:
            out = self.loaded.model.generate(
                ids, attention_mask=mask, assistant_model=self.loaded.draft, pad_token_id=pad, **self.how
            )
        except Exception as error:  # of memory, of processors
            if len(batch) > 1:
                for entry in batch:
                    self.decode([entry])
            else:
                self.part.write(batch[0][0], error=one_line(error))
            return
        self.seconds += time.perf_counter() - started
        ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
        for (row, prompt), tokens in zip(batch, out[:, ids.shape[1] :].tolist(), strict=True):
            count = next((place + 1 for place, token in enumerate(tokens) if token in ends), len(tokens))
            self.tokens += count
            text = tokenizer.decode(tokens[:count], skip_special_tokens=True)
            self.part.write(row, text=text, prompt_tokens=len(prompt), new_tokens=count)

    def speed(self) -> str:
        """Tokens per second, with the time to read prompts."""
        return f"{self.tokens / self.seconds:.1f} tokens/s" if self.seconds else "no tokens yet"
