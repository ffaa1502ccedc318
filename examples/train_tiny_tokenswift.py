"""Train TokenSwift heads for the tiny target on a CPU within a time budget.

    python examples/train_tiny_tokenswift.py --streams runs/tiny-target --output runs/tiny-tokenswift --minutes 40
    python examples/train_tiny_tokenswift.py --streams runs/tiny-target-texts --output runs/own-heads \
        --draft runs/tiny-tokenswift/final --length 512 --batch 4 --learning-rate 0.01 --minutes 30

`--streams` is a folder of tokens written by `train_tiny_target.py` or `write_target_texts.py`. A stream that is much
shorter than the longest is repeated until it has half its length, which is the weighting of the target's training. The
learning rate follows the elapsed minutes instead of the steps, so it ends at zero on any machine. Run the same command
again to continue an interrupted run.
"""

import argparse
import math
import time
from pathlib import Path
from typing import Any

import torch
from token_streams import add_streams, cut_rows, folder_name, load_streams, streams_command
from torch.optim.lr_scheduler import LRScheduler
from transformers import AutoModelForCausalLM, TrainerCallback

from hf_longspec import TokenSwiftDraftModel
from hf_longspec.bench.machine import git_commit
from hf_longspec.training import DraftTrainer, DraftTrainingArguments

ROOT = Path(__file__).resolve().parents[1]
WARMUP_STEPS = 20


class TimedCosine(LRScheduler):
    """Cosine schedule from the learning rate to zero over seconds of training; checkpoints hold the elapsed time.

    Args:
        optimizer (`torch.optim.Optimizer`): Optimizer with the initial learning rate.
        seconds (`float`): Training time until the learning rate is zero.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, seconds: float):
        self.seconds = seconds
        self.spent = 0.0
        self.seen = time.monotonic()
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        """Return the learning rates for the elapsed time."""
        now = time.monotonic()
        self.spent += now - self.seen
        self.seen = now
        share = 0.5 + 0.5 * math.cos(math.pi * min(1.0, self.spent / self.seconds))
        return [base * share * min(1.0, (self.last_epoch + 1) / WARMUP_STEPS) for base in self.base_lrs]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the elapsed seconds; the total comes from the new command."""
        super().load_state_dict(state_dict | {"seconds": self.seconds, "seen": time.monotonic()})


class TimedTrainer(DraftTrainer):
    """Trainer with a learning rate and an end given in minutes."""

    def __init__(self, *args: Any, minutes: float, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.minutes = minutes
        self.add_callback(StopInTime())

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> LRScheduler:
        """Create a schedule over minutes instead of steps."""
        if self.lr_scheduler is None:
            self.lr_scheduler = TimedCosine(optimizer or self.optimizer, 60 * self.minutes)
        return self.lr_scheduler


class StopInTime(TrainerCallback):
    """Save and end the run when its time is used up."""

    def on_step_end(self, args: Any, state: Any, control: Any, lr_scheduler: TimedCosine, **kwargs: Any) -> None:
        if lr_scheduler.spent >= lr_scheduler.seconds:
            control.should_training_stop = control.should_save = control.should_log = True


def main() -> None:
    args = parse_arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32)
    kind = {"chained": not args.independent, "sequential": args.sequential}
    draft = TokenSwiftDraftModel.from_target(target, num_heads=args.heads, **kind)
    if args.draft:
        draft = TokenSwiftDraftModel.from_pretrained(args.draft, dtype=torch.float32)
    # the local path has no meaning on other machines
    draft.config.target_name_or_path = Path(args.target).name
    training = DraftTrainingArguments(
        str(args.output),
        loss=args.loss,
        num_train_epochs=1000,
        per_device_train_batch_size=args.batch,
        learning_rate=args.learning_rate,
        weight_decay=0.1,
        max_grad_norm=1.0,
        logging_steps=25,
        save_steps=50,
        save_total_limit=1,
        use_cpu=True,
        seed=args.seed,
        report_to="none",
        disable_tqdm=True,  # the bar would count all epochs
    )
    rows = cut_rows(load_streams(*args.streams), args.length)
    trainer = TimedTrainer(draft, target, training, train_dataset=rows, minutes=args.minutes)
    trainer.train(resume_from_checkpoint=any(args.output.glob("checkpoint-*")) or None)
    trainer.save_state()
    (args.output / "command.txt").write_text(command(args), encoding="utf-8")
    (args.output / "commit.txt").write_text(git_commit(ROOT) or "", encoding="utf-8")
    draft.to(torch.bfloat16).save_pretrained(args.output / "final")


def command(args: argparse.Namespace) -> str:
    """Return the command of this run, without the folders of this machine."""
    draft = f" --draft {folder_name(args.draft)}" if args.draft else f" --heads {args.heads}"
    numbers = f"--minutes {args.minutes:g} --length {args.length} --batch {args.batch}"
    rest = f"--learning-rate {args.learning_rate:g} --loss {args.loss} --seed {args.seed}"
    kind = (" --independent" if args.independent else "") + (" --sequential" if args.sequential else "")
    return (
        f"python examples/train_tiny_tokenswift.py {streams_command(args.streams)} "
        f"--output {folder_name(args.output)} \\\n"
        f"    {numbers}{draft} \\\n    {rest}{kind}\n"
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=str(ROOT / "hub_cards" / "tiny-target"), help="folder or Hub id")
    add_streams(parser)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=40, help="time for training (default: %(default)s)")
    parser.add_argument("--length", type=int, default=1024, help="tokens per row (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=2, help="rows per step (default: %(default)s)")
    parser.add_argument("--heads", type=int, default=3, help="number of new heads (default: %(default)s)")
    parser.add_argument("--independent", action="store_true", help="heads that do not continue each other (Medusa)")
    parser.add_argument("--sequential", action="store_true", help="heads that see the tokens before theirs (Hydra)")
    parser.add_argument("--learning-rate", type=float, default=2e-2)
    parser.add_argument("--draft", type=Path, help="folder of heads to continue (default: new ones)")
    parser.add_argument("--loss", choices=["kl", "ce"], default="kl")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="CPU threads (default: all)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
