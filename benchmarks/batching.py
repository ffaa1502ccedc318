"""Many requests at once: a Batcher, whose rows requests join and leave, beside batches of similar lengths.

The requests have prompts and outputs of random lengths. `generate --data` of earlier versions sorted them by the length
of their prompts, and each batch lasted as long as its longest output. Both decode the same requests in turns, with the
same rows. Then as many streaming clients as rows come at once: the time to the first token of each, beside that of
calls one after another. The texts of the clients are compared with those of `generate`.

    python -m benchmarks.batching --threads 1
"""

import statistics
import time
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from benchmarks import harness
from hf_longspec import Batcher
from hf_longspec.cli.measuring import TokenClock
from hf_longspec.modeling.register_draft import DRAFTS

PROMPT, OUTPUT = (16, 384), (16, 512)
DRAFTS_OF = ("plain", "ngram", "tiny-longspec")


def timed(function: Any) -> tuple[float, float]:
    """Seconds, and seconds of the process, that a function takes."""
    started = time.perf_counter(), time.process_time()
    function()
    return time.perf_counter() - started[0], time.process_time() - started[1]


def by_length(model: Any, draft: Any, requests: list[tuple[torch.Tensor, int]], rows: int) -> None:
    """Continue requests in batches of similar lengths of prompts."""
    ordered = sorted(requests, key=lambda request: len(request[0]), reverse=True)
    for start in range(0, len(ordered), rows):
        batch = ordered[start : start + rows]
        prompts = [prompt for prompt, _ in batch]
        ids = pad_sequence(prompts, True, padding_side="left")
        mask = pad_sequence([torch.ones_like(prompt) for prompt in prompts], True, padding_side="left")
        new = max(count for _, count in batch)
        model.generate(
            ids, attention_mask=mask, assistant_model=draft, pad_token_id=0, max_new_tokens=new, do_sample=False
        )


def first_tokens(model: Any, draft: Any, prompts: list[torch.Tensor], new: int, batcher: Batcher | None) -> list[float]:
    """Seconds to the first token of clients that come at once."""
    how: dict[str, Any] = {"max_new_tokens": new, "do_sample": False}
    clients = [TokenClock() for _ in prompts]
    pairs = list(zip(prompts, clients, strict=True))
    if batcher is None:
        texts = [model.generate(ids[None], assistant_model=draft, streamer=one, **how) for ids, one in pairs]
    else:
        requests = [batcher.submit(ids, streamer=one, **how) for ids, one in pairs]
        texts = [request.result() for request in requests]
    for text, ids in zip(texts, prompts, strict=True):
        if batcher is not None and not torch.equal(text, model.generate(ids[None], assistant_model=draft, **how)):
            raise RuntimeError("the text of a client differs from that of generate()")
    return [client.first_token_seconds for client in clients]


def main(arguments: list[str] | None = None) -> None:
    parser = harness.parser(__doc__, "batching", minutes=60, prompts=True)
    parser.add_argument("--requests", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--rows", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--turns", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--drafts", type=harness.names, default=list(DRAFTS_OF), help="default: all three")
    args = parser.parse_args(arguments)
    model = harness.load_target(args.target, torch.float32)
    windows, origin = harness.load_prompts(args.target, args.data, PROMPT[1], args.requests)
    random = torch.Generator().manual_seed(0)
    sizes = (torch.randint(low, high + 1, (len(windows),), generator=random).tolist() for low, high in (PROMPT, OUTPUT))
    requests = [(window[-size:], new) for window, size, new in zip(windows, *sizes, strict=True)]
    settings = {"rows": args.rows, "outputs": OUTPUT, "turns": args.turns, "prompt": PROMPT, **origin}
    with harness.start(args, "batching", settings) as results:
        for name in args.drafts:
            made = DRAFTS["longspec_plain"].model.from_target(model) if name == "plain" else None
            path = str(harness.HUB_CARDS / name) if name.startswith("tiny") else name
            draft = made or harness.open_draft(path, model)
            walls, cpus, clients = [], [], []
            with Batcher(model, draft, rows=args.rows, max_length=PROMPT[1] + OUTPUT[1]) as batcher:

                def joined(batcher: Batcher = batcher) -> None:
                    futures = [batcher.submit(ids, max_new_tokens=new, do_sample=False) for ids, new in requests]
                    for future in futures:
                        future.result()

                for turn in range(args.turns):
                    before = timed(lambda draft=draft: by_length(model, draft, requests, args.rows))
                    after = timed(joined)
                    walls.append(before[0] / after[0])
                    cpus.append(before[1] / after[1])
                    prompts = [ids for ids, _ in requests[: args.rows]]
                    alone, together = (
                        statistics.median(first_tokens(model, draft, prompts, 128, one)) for one in (None, batcher)
                    )
                    clients.append(together / alone)
                    results.say(f"{name}, turn {turn + 1}: {walls[-1]:.2f} {cpus[-1]:.2f} {clients[-1]:.3f}")
            results.write(
                "batching",
                draft=name,
                speed=statistics.median(walls),
                processor=statistics.median(cpus),
                first=statistics.median(clients),
                lowest=min(walls),
                highest=max(walls),
            )


if __name__ == "__main__":
    main()
