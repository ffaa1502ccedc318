"""`hf-longspec generate --data`: continue every prompt of a file, many at once, in one process or several."""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import torch
from transformers import set_seed

from ..auto import AutoDraft
from ..batching import Batcher, Request
from ..cli import CommandError, one_line
from .models import LoadedModels, Progress, default_device, dtype_of, find_device, load_models, say
from .prompts import around_a_message, left_padded
from .structure import processors
from .work import Work


def continue_rows(args: SimpleNamespace, how: dict[str, Any], structure: dict[str, Any]) -> int:
    """Continue all rows of `--data`; returns the exit status."""
    state = processes()
    if state.num_processes > 1 and args.device is None:
        args.device = str(state.device)
    prompts = args.prompts
    work = Work(args.output, args.data, prompts, settings_of(args, how | structure))
    done = work.finished() if args.resume else {}
    with load_models(args) as loaded:
        rows = RowDecoder(loaded, args, how | processors(structure, loaded.tokenizer, loaded.model))
        batches = rows.batches([(row, prompt) for row, prompt in enumerate(prompts) if row not in done])
        state.wait_for_everyone()  # all have read what is finished before anyone writes
        if state.is_main_process:
            work.begin(done)
        state.wait_for_everyone()
        rows.run(batches[state.process_index :: state.num_processes], work.writer(state.process_index))
    state.wait_for_everyone()
    if not state.is_main_process:
        return 0
    records = work.end()
    failed = [record for record in records if "error" in record]
    say(f"{len(records)} rows in {args.output}, {len(failed)} failed. {rows.speed()}", stderr=True)
    return 1 if failed else 0


def settings_of(args: SimpleNamespace, how: dict[str, Any]) -> dict[str, Any]:
    """The values that decide the texts; a run is resumed only if none of them has changed."""
    names = {"target": args.target, "draft": args.draft}
    return how | {
        **{name: str(Path(value).resolve()) if Path(value).is_dir() else value for name, value in names.items()},
        "dtype": str(dtype_of(args.dtype, find_device(args.device))),
        "set": sorted(args.setting or []),
        "chat": args.chat,
        "max_new_tokens": args.max_new_tokens,
        "seed": (args.seed or 0) if args.temperature else None,
    }


def processes() -> Any:
    """The processes among which `accelerate launch` or `torchrun` divides the rows, or this one alone."""
    if "WORLD_SIZE" not in os.environ:
        alone = SimpleNamespace(num_processes=1, process_index=0, is_main_process=True)
        alone.wait_for_everyone = lambda: None
        return alone
    from accelerate import PartialState

    return PartialState(cpu=default_device().type == "cpu")


Write = Callable[..., object]  # adds a row to the file of this process, given its number and values


class RowDecoder:
    """Continue rows, each of which takes the place of one that has ended; the seed of a row is its own."""

    def __init__(self, loaded: LoadedModels, args: SimpleNamespace, how: dict[str, Any]):
        self.loaded = loaded
        self.batch, self.seed = args.batch, args.seed or 0
        self.how = how | {"max_new_tokens": args.max_new_tokens}
        self.around = around_a_message(loaded.tokenizer) if args.chat else ("", "")
        ids = loaded.tokenizer.pad_token_id, loaded.tokenizer.eos_token_id, 0
        self.pad = next(token for token in ids if token is not None)
        self.tokens, self.seconds = 0, 0.0

    def batches(self, rows: Sequence[tuple[int, str | None]]) -> list[list[tuple[int, Any]]]:
        """Return rows and token ids in batches, the longest first, so that too little memory shows early.

        A row without a prompt, or whose prompt is too long or has no tokens, comes with the error instead of ids.
        """
        encoded = [(row, self._ids(row, text)) for row, text in rows]
        encoded.sort(key=lambda entry: len(entry[1]) if torch.is_tensor(entry[1]) else 0, reverse=True)
        return [encoded[start : start + self.batch] for start in range(0, len(encoded), self.batch)]

    def _ids(self, row: int, text: str | None) -> torch.Tensor | Exception:
        if text is None:
            return CommandError("the row has no prompt. Pass a text.")
        try:
            written = text.join(self.around)
            return self.loaded.encode(f"row {row}", written, room=self.how["max_new_tokens"])[0]
        except Exception as error:  # of tokenizers, for example about lone surrogates
            return error

    def run(self, batches: Sequence[list[tuple[int, Any]]], write: Write) -> None:
        """Continue all rows, and write each as soon as it is done.

        Where rows cannot be replaced in a batch, batches of similar lengths are continued one after another.
        """
        with Progress(sum(map(len, batches)), "Generating") as progress:

            def step(rows: int) -> None:
                progress.step(rows)
                progress.say(f"Generating, {self.speed()}")

            for row, error in (entry for batch in batches for entry in batch):
                if not torch.is_tensor(error):
                    write(row, error=one_line(error))
                    step(1)
            batches = [[(row, ids) for row, ids in batch if torch.is_tensor(ids)] for batch in batches]
            rows = [entry for batch in batches for entry in batch]
            batcher = None
            with suppress(ValueError):
                batcher = self.batcher(rows)
            if batcher is not None:
                batches = [[entry] for entry in self.continue_together(batcher, rows, write, step)]  # those that failed
            for batch in batches:
                self.decode(batch, write)
                step(len(batch))

    def batcher(self, rows: Sequence[tuple[int, torch.Tensor]]) -> Batcher | None:
        """Return what continues these rows together."""
        if not rows:
            return None
        model, draft = self.loaded.model, self.loaded.draft
        if isinstance(draft, AutoDraft):
            draft.choose(model, rows[0][1][None], do_sample=self.how["do_sample"])
        return Batcher(model, draft, self.batch, max(3, len(rows[0][1]) + self.how["max_new_tokens"]))

    def continue_together(
        self, batcher: Batcher, rows: Sequence[tuple[int, torch.Tensor]], write: Write, step: Callable[[int], None]
    ) -> list[tuple[int, torch.Tensor]]:
        """Continue rows at once, and return those that failed. Rows that have ended are written in this order."""
        ended: Queue[Request] = Queue()
        waiting, running, failed = (
            iter(rows),
            dict[Request, tuple[int, torch.Tensor]](),
            list[tuple[int, torch.Tensor]](),
        )
        started = time.perf_counter()
        with batcher:
            while True:
                for row, ids in islice(waiting, 2 * self.batch - len(running)):
                    try:
                        request = batcher.submit(ids, seed=self.seed + row, pad_token_id=self.pad, **self.how)
                    except Exception:  # of memory, of processors
                        failed.append((row, ids))
                        continue
                    running[request] = row, ids
                    request.add_done_callback(ended.put)  # type: ignore[arg-type]
                if not running:
                    return failed
                request = ended.get()
                row, ids = running.pop(request)
                if request.exception() is not None:
                    failed.append((row, ids))
                    continue
                self.finish(row, ids, request.result()[0, len(ids) :].tolist(), write)
                self.seconds = time.perf_counter() - started
                step(1)

    def decode(self, batch: Sequence[tuple[int, torch.Tensor]], write: Write) -> None:
        """Continue the rows of one batch, one by one if the batch fails; a row that fails alone is written as such."""
        if not batch:
            return
        started = time.perf_counter()
        ids, mask = left_padded([prompt for _, prompt in batch], self.pad)
        set_seed(self.seed + batch[0][0])
        try:
            out = self.loaded.model.generate(
                ids, attention_mask=mask, assistant_model=self.loaded.draft, pad_token_id=self.pad, **self.how
            )
        except Exception as error:  # of memory, of processors
            if len(batch) > 1:
                for entry in batch:
                    self.decode([entry], write)
            else:
                write(batch[0][0], error=one_line(error))
            return
        self.seconds += time.perf_counter() - started
        for (row, prompt), tokens in zip(batch, out[:, ids.shape[1] :].tolist(), strict=True):
            self.finish(row, prompt, tokens, write)

    def finish(self, row: int, prompt: torch.Tensor, tokens: list[int], write: Write) -> None:
        """Write the text of a row, up to its end."""
        ends = self.loaded.model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        count = next((place + 1 for place, token in enumerate(tokens) if token in ends), len(tokens))
        self.tokens += count
        text = self.loaded.tokenizer.decode(tokens[:count], skip_special_tokens=True)
        write(row, text=text, prompt_tokens=len(prompt), new_tokens=count)

    def speed(self) -> str:
        """Tokens per second, with the time to read prompts."""
        return f"{self.tokens / self.seconds:.1f} tokens/s" if self.seconds else "no tokens yet"
