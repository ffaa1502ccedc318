"""Let a target continue texts, and write token streams for the training of its draft.

A draft has to guess its target's tokens, and these differ from the tokens of books, most of all under greedy decoding.
Rows of `--length` tokens begin with `--prompt` tokens of a stream and continue with the target's own tokens. They are
greedy in one file and sampled at temperature 1 in the other.

    python recipes/write_target_texts.py --streams runs/tiny-target --output runs/tiny-target-texts
    python recipes/train_tiny_draft.py --streams runs/tiny-target --streams runs/tiny-target-texts \
        --output runs/tiny-longspec
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from token_streams import folder_name, load_streams
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel

ROOT = Path(__file__).resolve().parents[1]
MODES = {"greedy": {"do_sample": False}, "sampled": {"do_sample": True, "temperature": 1.0, "top_k": 0}}


def main() -> None:
    args = parse_arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    streams = load_streams(args.streams)
    model = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None  # rows of one length
    model.generation_config.pad_token_id = 0
    torch.manual_seed(args.seed)
    chooser = np.random.default_rng(args.seed)
    args.output.mkdir(parents=True, exist_ok=True)
    for mode in args.modes:
        rows = []
        for _ in tqdm(range(0, args.rows, args.batch), desc=mode, unit="batch"):
            prompts = torch.stack([a_prompt(streams, args.prompt, chooser) for _ in range(args.batch)])
            rows.append(write(model, prompts, args.length, MODES[mode]))
        written = torch.cat(rows)[: args.rows]
        np.save(args.output / f"{mode}.npy", written.flatten().numpy().astype(streams[0].dtype))
    (args.output / "command.txt").write_text(command(args), encoding="utf-8")


def a_prompt(streams: list[np.ndarray], length: int, chooser: np.random.Generator) -> torch.Tensor:
    """Return `length` tokens from a random place of a random stream."""
    stream = streams[chooser.integers(len(streams))]
    start = chooser.integers(len(stream) - length)
    return torch.from_numpy(stream[start : start + length].astype(np.int64))


def write(model: PreTrainedModel, prompts: torch.Tensor, length: int, options: dict) -> torch.Tensor:
    """Return rows of `length` tokens that begin with `prompts` `(B, P)`."""
    mask = torch.ones_like(prompts)
    return model.generate(prompts, attention_mask=mask, max_length=length, **options)


def command(args: argparse.Namespace) -> str:
    """Return the command of this run, without the folders of this machine."""
    numbers = f"--rows {args.rows} --length {args.length} --prompt {args.prompt} --batch {args.batch}"
    return (
        f"python recipes/write_target_texts.py --streams {folder_name(args.streams)} "
        f"--output {folder_name(args.output)} \\\n    {numbers} --modes {' '.join(args.modes)} --seed {args.seed}\n"
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=str(ROOT / "hub_cards" / "tiny-target"), help="folder or Hub id")
    parser.add_argument("--streams", type=Path, required=True, help="folder with the token streams of the prompts")
    parser.add_argument("--output", type=Path, required=True, help="folder for greedy.npy and sampled.npy")
    parser.add_argument("--rows", type=int, default=1024, help="rows per mode (default: %(default)s)")
    parser.add_argument("--length", type=int, default=512, help="tokens per row (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=64, help="prompt tokens per row (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="rows at a time (default: %(default)s)")
    parser.add_argument("--modes", nargs="+", choices=sorted(MODES), default=sorted(MODES), help="default: both")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="CPU threads (default: all)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
