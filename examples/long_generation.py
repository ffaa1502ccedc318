"""Generate a very long text in one call and write it to a file as it is generated.

    python examples/long_generation.py --tokens 100000 --output story.txt
    python examples/long_generation.py --target Qwen/Qwen3-0.6B --draft specattn --dtype bfloat16 --output story.txt

Ctrl-C ends the text; the file holds the tokens so far. Without `--target`, the tiny target of the repository runs with
its trained draft. The target was trained for 16,384 tokens, so do not expect sense from the text after that.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from distinct_ngrams import ORDERS, distinct
from tqdm import tqdm
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer

import hf_longspec
from hf_longspec import ContextualPenaltyLogitsProcessor, FileStreamer

ROOT = Path(__file__).resolve().parents[1]
TINY_TARGET, TINY_DRAFT = (str(ROOT / "hub_cards" / name) for name in ("tiny-target", "tiny-longspec"))
MARK = 10_000  # tokens between two lines about the speed
DRAFTS = {"plain": hf_longspec.PlainDraftModel, "specattn": hf_longspec.SpecAttnDraftModel}


class MarkedStreamer(BaseStreamer):
    """Write tokens to a file, update a progress bar, and print the speed every MARK tokens.

    Args:
        writer ([`FileStreamer`]): Receives every token first.
        draft (`DraftModel`): Draft of the running call; its statistics are printed.
        total (`int`): Tokens to generate.
    """

    def __init__(self, writer: FileStreamer, draft: Any, total: int):
        self.writer, self.draft = writer, draft
        # disable=None: no bar where the error stream is not a terminal
        self.bar = tqdm(total=total, unit="token", disable=None, file=sys.stderr)
        self.tokens = -1  # the first call has the prompt
        self.started = self.marked = 0.0

    def put(self, value: torch.Tensor) -> None:
        """Receive the prompt, then every token; called by `generate`."""
        self.writer.put(value)
        self.tokens += 1
        if self.tokens == 0:
            return
        self.bar.update()
        if self.tokens == 1:  # the prefill is not counted
            self.started = self.marked = time.perf_counter()
        elif self.tokens % MARK == 0:
            self._print_speed()

    def _print_speed(self) -> None:
        now = time.perf_counter()
        last, whole = MARK / (now - self.marked), (self.tokens - 1) / (now - self.started)
        tau = self.draft.last_speculation.mean_acceptance_length
        tqdm.write(
            f"{self.tokens:,} tokens: {last:.1f} tokens/s in the last {MARK:,}, {whole:.1f} in all, tau {tau:.2f}"
        )
        self.marked = now

    def end(self) -> None:
        """Close the file and the bar; called by `generate` after the last token."""
        self.writer.end()
        self.bar.close()


def main() -> int:
    args = parse_arguments()
    torch.manual_seed(args.seed)
    if args.threads:
        torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=getattr(torch, args.dtype)).eval()
    if args.endless:
        target.generation_config.eos_token_id = None
    draft = load_draft(args, target)
    prompt = args.prompt if args.file is None else args.file.read_text(encoding="utf-8")
    inputs = tokenizer(prompt, return_tensors="pt")
    warn_of_length(target, inputs["input_ids"].shape[1] + args.tokens)
    with args.output.open("w", encoding="utf-8") as file:
        streamer = MarkedStreamer(FileStreamer(tokenizer, file), draft, args.tokens)
        try:
            out = target.generate(
                **inputs, assistant_model=draft, max_new_tokens=args.tokens, streamer=streamer, **settings(args)
            )
        except KeyboardInterrupt:
            if draft.last_speculation is None or draft.last_speculation.partial_sequences is None:
                print("Interrupted before the first token.", file=sys.stderr)
                return 130
            out = draft.last_speculation.partial_sequences
    conclude(out[0, inputs["input_ids"].shape[1] :].tolist(), draft.last_speculation, args.output)
    return 130 if draft.last_speculation.interrupted else 0


def load_draft(args: argparse.Namespace, target: Any) -> Any:
    """Load the draft of `--draft`; by default the tiny target's own, or SpecAttn for any other target."""
    name = args.draft or (TINY_DRAFT if args.target == TINY_TARGET else "specattn")
    if name in DRAFTS:
        return DRAFTS[name].from_target(target)
    return AutoModel.from_pretrained(name, dtype=target.dtype)


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `generate` that choose tokens."""
    options: dict[str, Any] = {"do_sample": False}
    if not args.greedy:
        options = {"do_sample": True, "temperature": args.temperature, "min_p": args.min_p, "top_k": 0, "top_p": 1.0}
    if args.penalty != 1.0:
        options["logits_processor"] = [ContextualPenaltyLogitsProcessor(args.penalty, args.window)]
    return options


def warn_of_length(target: Any, length: int) -> None:
    """Print a warning if the text will be longer than the positions of the target."""
    positions = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if positions and length > positions:
        print(f"{length:,} tokens are more than the {positions:,} positions that the target was made for.")


def conclude(tokens: list[int], stats: Any, output: Path) -> None:
    """Print length, statistics and diversity of the text."""
    ended = "interrupted" if stats.interrupted else "complete"
    print(f"{len(tokens):,} tokens in {output} ({ended}).\n{stats}")
    for n in ORDERS:
        if len(tokens) >= n:
            values = distinct(tokens, n)
            print(f"distinct-{n}: {values['windowed']:.3f} by windows, {values['corpus']:.3f} over the whole text")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=TINY_TARGET, help="folder or Hub id (default: the tiny target)")
    parser.add_argument("--draft", help="plain, specattn, or folder or Hub id of a draft")
    parser.add_argument("--tokens", type=int, default=100_000, help="default: %(default)s")
    parser.add_argument("--output", type=Path, required=True, help="file for the text")
    parser.add_argument("--prompt", default="It was a dark and stormy night", help="default: %(default)r")
    parser.add_argument("--file", type=Path, help="file with the prompt, instead of --prompt")
    parser.add_argument("--greedy", action="store_true", help="take the likeliest token instead of sampling")
    parser.add_argument("--temperature", type=float, default=1.0, help="default: %(default)s")
    parser.add_argument("--min-p", type=float, default=0.1, help="default: %(default)s")
    parser.add_argument("--penalty", type=float, default=1.2, help="contextual penalty, 1 for none (%(default)s)")
    parser.add_argument("--window", type=int, default=1024, help="tokens that the penalty looks back (%(default)s)")
    parser.add_argument("--endless", action="store_true", help="continue after an end-of-text token")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="CPU threads (default: all)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
