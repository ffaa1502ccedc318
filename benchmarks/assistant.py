"""A draft model in this loop beside transformers' assisted generation, with the same pair, greedily.

The draft is the target's first layers with its own head, which needs no second checkpoint. Both sides draft chains of
one length, transformers by its constant schedule without a threshold. Every turn decodes each prompt alone by both, and
all prompts as one batch by this loop. Texts must be equal. Times are of the processor, whole calls with their prefill.

    python -m benchmarks.assistant --target hub_cards/tiny-target --layers 3 --length 512 --tokens 128
"""

import argparse
import copy
import statistics
import time
from typing import Any

import torch
from transformers import PreTrainedModel

import hf_longspec
from benchmarks.harness import add_prompts, load_prompts, load_target
from hf_longspec.bench.calls import Call, Decoding, HfMethod, run_call

PROMPTS = 4


def first_layers(model: PreTrainedModel, count: int) -> PreTrainedModel:
    """Return a copy of `model` with its first `count` layers."""
    small = copy.deepcopy(model)
    small.model.layers = small.model.layers[:count]
    small.config.num_hidden_layers = count
    return small


def main(arguments: list[str] | None = None) -> None:
    """Measure, and print one line per turn and the medians."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_prompts(made)
    made.add_argument("--layers", type=int, default=3, help="layers of the draft")
    made.add_argument("--gamma", type=int, default=4, help="drafted tokens per verification")
    made.add_argument("--window", type=int, help="window of the draft")
    made.add_argument("--length", type=int, default=512, help="tokens of a prompt")
    made.add_argument("--tokens", type=int, default=128, help="new tokens")
    made.add_argument("--turns", type=int, default=3)
    made.add_argument("--threads", type=int, default=1)
    args = made.parse_args(arguments)
    torch.set_num_threads(args.threads)
    target = load_target(args.target, torch.float32)
    tokens, _ = load_prompts(args.target, args.data, args.length, PROMPTS)
    draft = hf_longspec.AssistantDraftModel.from_model(
        first_layers(target, args.layers), target, num_assistant_tokens=args.gamma, gate=False, window=args.window
    )
    constant = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0}
    draft.assistant.generation_config.update(num_assistant_tokens=args.gamma, **constant)
    # no token of the texts: the assistant would take generated tokens of this number for padding
    target.generation_config.pad_token_id = target.config.vocab_size - 1

    def timed(method: Any, rows: torch.Tensor) -> tuple[float, Call]:
        """Seconds of the processor that a call takes, and the call."""
        how: dict[str, Any] = {"decoding": Decoding(), "tokens": args.tokens, "seed": 0, "now": time.process_time}
        call = run_call(target, method, (rows, torch.ones_like(rows)), **how)
        return call.ttft_seconds + call.decode_seconds, call

    alone, batched, taus = [], [], []
    for turn in range(args.turns):
        stock, ours = 0.0, 0.0
        for prompt in tokens:
            seconds, expected = timed(HfMethod({"assistant_model": draft.assistant}), prompt[None])
            stock += seconds
            seconds, found = timed(draft, prompt[None])
            ours += seconds
            taus.append(found.tau)
            if not torch.equal(expected.text, found.text):
                raise SystemExit("the texts differ: pass another prompt, in which no two tokens are nearly as likely")
        together, _ = timed(draft, tokens)
        alone.append(ours / stock)
        batched.append(stock / together)
        print(
            f"turn {turn}: transformers {stock:.2f} s, one by one {ours:.2f} s, as a batch {together:.2f} s", flush=True
        )
    print(f"time per token, one row: {statistics.median(alone):.2f} of transformers'")
    print(f"tokens/s, batch of {PROMPTS}: {statistics.median(batched):.2f} times transformers' one by one")
    print(f"tau {statistics.mean(taus):.2f}")


if __name__ == "__main__":
    main()
