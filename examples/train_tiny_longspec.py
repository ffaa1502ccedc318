"""Train the LongSpec draft of the tiny target on a CPU, or one of its ablations.

    python examples/train_tiny_longspec.py --streams runs/tiny-target --output runs/tiny-longspec
    python examples/train_tiny_longspec.py --streams runs/tiny-target --output runs/no-noise --without noise
    python examples/train_tiny_longspec.py --streams runs/tiny-target --output runs/long \
        --draft runs/tiny-longspec/final --length 8192 --batch 1 --steps 60 --learning-rate 2e-4 --warmup 5
    python examples/train_tiny_longspec.py --streams runs/tiny-target-texts --output runs/own-texts \
        --draft runs/tiny-longspec/final --steps 800 --learning-rate 1e-3

The third command continues the training of a draft on longer texts, the fourth on texts that the target wrote itself.
`--streams` is a folder of tokens written by `train_tiny_target.py` or `write_target_texts.py`. A stream that is much
shorter than the longest is repeated until it has half its length, which is the weighting of the target's training.
Run the same command again to continue an interrupted run.
"""

import argparse
from pathlib import Path

import torch
from token_streams import add_streams, cut_rows, folder_name, load_streams, streams_command
from transformers import AutoModelForCausalLM

from hf_longspec import LongSpecDraftModel
from hf_longspec.bench.machine import git_commit
from hf_longspec.training import DraftTrainer, DraftTrainingArguments

ROOT = Path(__file__).resolve().parents[1]
# Overrides of the draft and of the training arguments for each ablation.
ABLATIONS: dict[str, tuple[dict, dict]] = {
    "offsets": ({}, {"max_offset": 0}),
    "noise": ({"noise_range": [1, 1]}, {}),
    "cross-attention": ({"cross_attention": False}, {}),
}


def main() -> None:
    args = parse_arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    overrides, settings = ABLATIONS[args.without] if args.without else ({}, {})
    torch.manual_seed(args.seed)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32)
    draft = LongSpecDraftModel.from_target(target, **overrides)
    if args.draft:
        draft = LongSpecDraftModel.from_pretrained(args.draft, dtype=torch.float32)
    # the local path has no meaning on other machines
    draft.config.target_name_or_path = Path(args.target).name
    rows = cut_rows(load_streams(*args.streams), args.length)
    training = DraftTrainingArguments(
        str(args.output),
        loss="kl",
        max_steps=args.steps,
        per_device_train_batch_size=args.batch,
        learning_rate=args.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=args.warmup,
        weight_decay=0.1,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        logging_steps=min(args.log_every, args.steps),
        save_steps=100,
        save_total_limit=1,
        use_cpu=True,
        seed=args.seed,
        report_to="none",
        **settings,
    )
    trainer = DraftTrainer(draft, target, training, train_dataset=rows)
    trainer.train(resume_from_checkpoint=any(args.output.glob("checkpoint-*")) or None)
    trainer.save_state()
    (args.output / "command.txt").write_text(command(args), encoding="utf-8")
    (args.output / "commit.txt").write_text(git_commit(ROOT) or "", encoding="utf-8")
    draft.to(torch.bfloat16).save_pretrained(args.output / "final")


def command(args: argparse.Namespace) -> str:
    """Return the command of this run, without the folders of this machine."""
    without = f" --without {args.without}" if args.without else ""
    draft = f" --draft {folder_name(args.draft)}" if args.draft else ""
    numbers = f"--steps {args.steps} --length {args.length} --batch {args.batch} --learning-rate {args.learning_rate:g}"
    numbers += f" --warmup {args.warmup} --log-every {args.log_every}"
    return (
        f"python examples/train_tiny_longspec.py {streams_command(args.streams)} "
        f"--output {folder_name(args.output)} \\\n"
        f"    {numbers} --seed {args.seed}{draft}{without}\n"
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=str(ROOT / "hub_cards" / "tiny-target"), help="folder or Hub id")
    add_streams(parser)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--length", type=int, default=512, help="tokens per row (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=4, help="rows per step (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--without", choices=sorted(ABLATIONS), help="train an ablation")
    parser.add_argument("--warmup", type=int, default=50, help="steps of warm-up (default: %(default)s)")
    parser.add_argument("--log-every", type=int, default=25, help="steps between two log lines (default: %(default)s)")
    parser.add_argument("--draft", type=Path, help="folder of a draft to continue (default: a new one)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="CPU threads (default: all)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
