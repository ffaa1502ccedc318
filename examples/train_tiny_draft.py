"""Train a draft of the tiny target on a CPU in a given time: LongSpec, EAGLE-3, TokenSwift's heads, or a small model.

    python examples/train_tiny_draft.py --streams runs/tiny-target --output runs/tiny-longspec
    python examples/train_tiny_draft.py --streams runs/tiny-target --output runs/no-noise --variant no-noise
    python examples/train_tiny_draft.py --kind eagle3 --streams runs/tiny-target --streams runs/tiny-target-texts \
        --output runs/own-texts --draft runs/tiny-eagle3/final --minutes 5

The third command continues the training of a draft, also on texts that the target wrote itself. `--streams` is a folder
of tokens written by `train_tiny_target.py` or `write_target_texts.py`. A stream that is much shorter than the longest
is repeated until it has half its length. All kinds learn the target's distribution. The learning rate follows the
minutes instead of the steps, so that all kinds get the same time and end at a rate of zero on any machine. Run the same
command again to continue an interrupted run.
"""

import argparse
import math
import time
from pathlib import Path
from typing import Any

import torch
from token_streams import add_streams, cut_rows, folder_name, load_streams, streams_command
from torch.optim.lr_scheduler import LRScheduler
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
)

from hf_longspec import AssistantDraftModel, DraftModel, Eagle3DraftModel, LongSpecDraftModel, TokenSwiftDraftModel
from hf_longspec.bench.machine import git_commit, native_bfloat16
from hf_longspec.training import DraftTrainer, DraftTrainingArguments

ROOT = Path(__file__).resolve().parents[1]
WARMUP_STEPS = 20
LEARNING_RATES = {"longspec": 2e-3, "eagle3": 2e-3, "assistant": 2e-3, "tokenswift": 2e-2}
# Overrides of the draft and of the training arguments for each variant of a kind.
VARIANTS: dict[str, dict[str, tuple[dict, dict]]] = {
    "longspec": {
        "no-offsets": ({}, {"max_offset": 0}),
        "no-noise": ({"noise_range": [1, 1]}, {}),
        "no-cross-attention": ({"cross_attention": False}, {}),
    },
    "tokenswift": {"independent": ({"chained": False}, {}), "sequential": ({"sequential": True}, {})},
}


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


class Timed:
    """A trainer whose learning rate and end are given in `minutes`, which is set after construction."""

    minutes: float

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> LRScheduler:
        """Create a schedule over minutes instead of steps."""
        if self.lr_scheduler is None:
            self.lr_scheduler = TimedCosine(optimizer or self.optimizer, 60 * self.minutes)
        return self.lr_scheduler


class TimedDraftTrainer(Timed, DraftTrainer):
    """Train a draft for some minutes."""


class DistillationTrainer(Timed, Trainer):
    """Train a small language model for some minutes, with the KL divergence from a target of the same vocabulary."""

    def __init__(self, model: PreTrainedModel, target: PreTrainedModel, *args: Any, **kwargs: Any):
        super().__init__(model, *args, **kwargs)
        self.target = target.eval()

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Return the mean over all tokens of the batch."""
        with torch.no_grad():
            wanted = self.target(inputs["input_ids"]).logits.log_softmax(-1)
        own = model(inputs["input_ids"]).logits.log_softmax(-1)
        return torch.nn.functional.kl_div(
            own.flatten(0, 1), wanted.flatten(0, 1), reduction="batchmean", log_target=True
        )


class StopInTime(TrainerCallback):
    """Save and end the run when its time is used up."""

    def on_step_end(self, args: Any, state: Any, control: Any, lr_scheduler: TimedCosine, **kwargs: Any) -> None:
        if lr_scheduler.spent >= lr_scheduler.seconds:
            control.should_training_stop = control.should_save = control.should_log = True


def main() -> None:
    args = parse_arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    overrides, settings = VARIANTS[args.kind][args.variant] if args.variant else ({}, {})
    torch.manual_seed(args.seed)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32)
    if args.draft:
        draft = AutoModel.from_pretrained(args.draft, dtype=torch.float32)
    else:
        draft = new_draft(args.kind, target, overrides)
    # the local path has no meaning on other machines
    draft.config.target_name_or_path = Path(args.target).name
    training = DraftTrainingArguments(
        str(args.output),
        loss="kl",
        num_train_epochs=1000,
        per_device_train_batch_size=args.batch,
        learning_rate=args.learning_rate or LEARNING_RATES[args.kind],
        weight_decay=0.1,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        logging_steps=25,
        save_steps=100,
        save_total_limit=1,
        use_cpu=True,
        bf16=bool(native_bfloat16()),  # elsewhere autocast is 6 to 15 times slower than float32
        include_num_input_tokens_seen="all",
        seed=args.seed,
        report_to="none",
        disable_tqdm=True,  # the bar would count all epochs
        **settings,
    )
    data: dict[str, Any] = {"train_dataset": cut_rows(load_streams(*args.streams), args.length)}
    data["callbacks"] = [StopInTime()]
    small = isinstance(draft, AssistantDraftModel)
    trainer: Any = DistillationTrainer if small else TimedDraftTrainer
    trainer = trainer(draft.assistant if small else draft, target, training, **data)
    trainer.minutes = args.minutes
    trainer.train(resume_from_checkpoint=any(args.output.glob("checkpoint-*")) or None)
    trainer.save_state()
    (args.output / "command.txt").write_text(command(args), encoding="utf-8")
    (args.output / "commit.txt").write_text(git_commit(ROOT) or "", encoding="utf-8")
    if small:
        draft.assistant.to(torch.bfloat16)
    draft.to(torch.bfloat16).save_pretrained(args.output / "final")


def new_draft(kind: str, target: PreTrainedModel, overrides: dict[str, Any]) -> DraftModel:
    """Return an untrained draft with about 1M parameters beside the target's embedding."""
    if kind == "longspec":
        return LongSpecDraftModel.from_target(target, **overrides)
    if kind == "eagle3":
        return Eagle3DraftModel.from_target(target, tree_widths=[4, 4, 4, 3])
    if kind == "tokenswift":
        return TokenSwiftDraftModel.from_target(target, num_heads=3, **overrides)
    own = target.config.to_dict() | {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32}
    small = LlamaForCausalLM(LlamaConfig(**(own | heads | {"tie_word_embeddings": True})))
    return AssistantDraftModel.from_model(small, target)


def command(args: argparse.Namespace) -> str:
    """Return the command of this run, without the folders of this machine."""
    parts = [f"--{name} {value:g}" for name in ("minutes", "length", "batch", "threads") if (value := vars(args)[name])]
    parts += [f"--learning-rate {args.learning_rate:g}"] if args.learning_rate else []
    parts += [f"--variant {args.variant}"] if args.variant else []
    parts += [f"--draft {folder_name(args.draft)}"] if args.draft else []
    return (
        f"python examples/train_tiny_draft.py --kind {args.kind} {streams_command(args.streams)} \\\n"
        f"    --output {folder_name(args.output)} {' '.join(parts)} --seed {args.seed}\n"
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=sorted(LEARNING_RATES), default="longspec")
    parser.add_argument("--variant", help="no-offsets, no-noise, no-cross-attention; independent, sequential (heads)")
    parser.add_argument("--target", default=str(ROOT / "hub_cards" / "tiny-target"), help="folder or Hub id")
    add_streams(parser)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=10, help="time for training (default: %(default)s)")
    parser.add_argument("--length", type=int, default=1024, help="tokens per row (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=2, help="rows per step (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, help="default: by kind")
    parser.add_argument("--draft", type=Path, help="folder of a draft to continue (default: a new one)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="CPU threads (default: all)")
    args = parser.parse_args()
    known = sorted(VARIANTS.get(args.kind, {}))
    if args.variant and args.variant not in known:
        parser.error(f"--variant {args.variant} with --kind {args.kind}: expected one of {', '.join(known) or 'none'}")
    return args


if __name__ == "__main__":
    main()
