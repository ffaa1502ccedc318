"""`hf-longspec generate --data`: continue every prompt of a file, many at once, and write a line of JSON for each.

A line is appended to the output when its row ends. It has a digest of the prompt and of all settings that decide the
text, by which `--resume` recognises what is done.
"""

import hashlib
import json
import time
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import as_completed
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import set_seed

from ..auto import AutoDraft
from ..batching import Batcher, Request
from ..cli import CommandError, one_line, options
from .files import Record, claim, replace_file
from .models import LoadedModels, dtype_of, find_device, load_models
from .progress import Progress, say
from .texts import as_message, prompts_of

# A line of the output begins so. The last one may be cut off.
BEGINNING = '{"row": '
Row = tuple[int, torch.Tensor]  # number, and token ids `(length,)` of the prompt
Encoded = tuple[int, torch.Tensor | Exception]  # likewise, or what is wrong with the prompt
Ended = tuple[int, torch.Tensor, list[int] | Exception]  # a row, and its new tokens or its error


def continue_rows(args: SimpleNamespace, how: dict[str, Any], structure: dict[str, Any]) -> int:
    """Continue all rows of `--data`; returns the exit status."""
    options.require_sources([args.data])
    claim(args.output, [args.data], overwrite=args.overwrite, suffix=".jsonl", resume=args.resume)
    how = how | {"max_new_tokens": args.max_new_tokens}
    settings = settings_of(args, how | structure)
    share, count = args.shard or (0, 1)
    prompts = {row: text for row, text in enumerate(prompts_of(args.data, args.column)) if row % count == share}
    digests = {row: digest_of(text, settings) for row, text in prompts.items()}
    done = finished_rows(args.output, digests) if args.resume else {}
    num_failed, tokens = 0, 0
    with load_models(args) as loaded:
        how |= loaded.processors(structure)
        rows = encode_rows(loaded, args, {row: text for row, text in prompts.items() if row not in done})
        if rows:
            _ = loaded.draft  # nothing is replaced before the models are loaded
        ended, started = continued(loaded, rows, args.batch, args.seed or 0, how), time.perf_counter()
        with open_output(args, done) as file, closing(ended), Progress(len(rows), "Generating", "rows") as progress:
            for row, ids, result in ended:
                record: Record = {"row": row}
                if isinstance(result, Exception):
                    record["error"] = one_line(result)
                    num_failed += 1
                else:
                    stop = next((n for n, token in enumerate(result, 1) if token in loaded.end_tokens), len(result))
                    record["text"] = loaded.tokenizer.decode(result[:stop], skip_special_tokens=True)
                    record |= {"prompt_tokens": len(ids), "new_tokens": stop}
                    tokens += stop
                file.write(json.dumps(record | {"digest": digests[row]}) + "\n")
                speed = tokens / (time.perf_counter() - started)
                progress.set_description_str(f"Generating, {speed:.1f} tokens/s", refresh=False)
                progress.update()
    say(f"{len(prompts)} rows in {args.output}, {len(rows)} of them new, {num_failed} failed.", stderr=True)
    return 1 if num_failed else 0


def settings_of(args: SimpleNamespace, how: dict[str, Any]) -> dict[str, Any]:
    """The values that decide the texts; a run is resumed only if none of them has changed."""
    names = {"target": args.target, "draft": args.draft}
    return how | {
        **{name: str(Path(value).resolve()) if Path(value).is_dir() else value for name, value in names.items()},
        "dtype": str(dtype_of(args.dtype, find_device(args.device))),
        "set": sorted(args.setting or []),
        "chat": args.chat,
        "seed": (args.seed or 0) if args.temperature else None,
    }


def digest_of(prompt: str | None, settings: Mapping[str, Any]) -> str:
    """Digest of a prompt and of the settings."""
    return hashlib.sha256(json.dumps([prompt, settings]).encode()).hexdigest()[:16]


def finished_rows(output: Path, digests: Mapping[int, str]) -> dict[int, Record]:
    """The lines of an output whose rows have a text, by the number of the row.

    Raises:
        CommandError: If a line is none of this command, or belongs to another prompt or other settings.
    """
    if not output.exists():
        return {}
    remedy = "Pass the same data and settings, another --output, or --overwrite."
    *lines, last = output.read_text(encoding="utf-8", errors="replace").split("\n")
    if not BEGINNING.startswith(last[: len(BEGINNING)]):
        lines.append(last)  # of somebody else
    done = {}
    for number, line in enumerate(lines, 1):
        record: Any = None
        with suppress(ValueError, RecursionError):
            record = json.loads(line)
        if not isinstance(record, dict) or type(record.get("row")) is not int or "digest" not in record:
            raise CommandError(f"--resume {output}, line {number}: not a row of this command. {remedy}")
        if "error" not in record:
            done[record["row"]] = record
    if other := [row for row, record in done.items() if record["digest"] != digests.get(row)]:
        what = f"{len(other)} rows, such as {min(other)}, have another prompt, other settings or another --shard"
        raise CommandError(f"--resume {output}: {what}. {remedy}")
    return done


def open_output(args: SimpleNamespace, done: Mapping[int, Record]) -> Any:
    """Open the output for further lines, which are written one by one. Without `--resume` it begins anew."""
    if args.resume:  # without the rows that failed, and a line that was cut off
        replace_file(args.output, "".join(json.dumps(record) + "\n" for record in done.values()))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    mode = "a" if args.resume else "w" if args.output.exists() else "x"  # not that of a process beside this one
    return args.output.open(mode, encoding="utf-8", buffering=1)


def encode_rows(loaded: LoadedModels, args: SimpleNamespace, prompts: Mapping[int, str | None]) -> list[Encoded]:
    """Return token ids `(length,)` of all rows, the longest first, so that too little memory shows early.

    A row without a prompt, or whose prompt is too long or has no tokens, comes with the error instead of ids.
    """

    def encoded(row: int, text: str | None) -> torch.Tensor | Exception:
        if text is None:
            return CommandError("the row has no prompt. Pass a text.")
        text = as_message(loaded.tokenizer, text) if args.chat else text
        try:
            return loaded.encode(f"row {row}", text, room=args.max_new_tokens, special=not args.chat)[0]
        except Exception as error:  # of tokenizers, for example about lone surrogates
            return error

    rows = [(row, encoded(row, text)) for row, text in prompts.items()]
    return sorted(rows, key=lambda row: len(row[1]) if torch.is_tensor(row[1]) else 0, reverse=True)


def continued(
    loaded: LoadedModels, rows: Sequence[Encoded], batch: int, seed: int, how: dict[str, Any]
) -> Generator[Ended, None, None]:
    """Yield every row when it ends, `batch` of them at once. The seed of a row is `seed` plus its number.

    A row that fails in a batch, and every row of a model or of settings that a [`Batcher`] refuses, is continued alone.
    """
    none = torch.tensor([], dtype=torch.long)
    yield from ((row, none, ids) for row, ids in rows if isinstance(ids, Exception))
    waiting = [(row, ids) for row, ids in rows if isinstance(ids, torch.Tensor)]
    if not waiting:
        return
    model, draft, longest = loaded.model, loaded.draft, waiting[0][1]
    if isinstance(draft, AutoDraft):
        draft.choose(model, longest[None], do_sample=how["do_sample"])
    known = (loaded.tokenizer.pad_token_id, *loaded.end_tokens, 0)
    how = how | {"pad_token_id": next(token for token in known if token is not None)}
    try:
        batcher = Batcher(model, draft, batch, max(3, len(longest) + how["max_new_tokens"]))
    except ValueError:
        alone = waiting
    else:
        alone = yield from continued_together(batcher, waiting, seed, how)
    for row, ids in alone:
        set_seed(seed + row)
        try:
            out = model.generate(ids[None], attention_mask=torch.ones_like(ids[None]), assistant_model=draft, **how)
        except Exception as error:  # of memory, of processors
            yield row, ids, error
        else:
            yield row, ids, out[0, len(ids) :].tolist()


def continued_together(
    batcher: Batcher, rows: Sequence[Row], seed: int, how: dict[str, Any]
) -> Generator[Ended, None, list[Row]]:
    """Yield the rows that end well, and return those that failed."""
    requests, failed = dict[Request, Row](), list[Row]()
    with batcher:
        for row, ids in rows:
            try:
                requests[batcher.submit(ids, seed=seed + row, **how)] = row, ids
            except Exception:  # of memory, of processors
                failed.append((row, ids))
        for request in as_completed(requests):
            row, ids = requests[request]  # type: ignore[index]
            if request.exception() is not None:
                failed.append((row, ids))
            else:
                yield row, ids, request.result()[0, len(ids) :].tolist()
    return failed
