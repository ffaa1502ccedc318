"""How long a training run takes, by a step that is measured before it, and how many steps fit into a given time."""

import json
import math
import time
from itertools import islice
from pathlib import Path

import torch

from ..training import DraftTrainer

# The first step is slower than others and not counted. The optimizer and saving take some of the time.
MEASURED_STEPS, SHARE_OF_STEPS = 2, 0.95


def seconds_of_step(trainer: DraftTrainer) -> float:
    """Measure forward and backward of a step on the first rows, the slowest of all processes; nothing is changed."""
    args, method = trainer.args, trainer.method
    rows = list(islice(iter(trainer.train_dataset), args.per_device_train_batch_size))
    longest, seconds = method.longest_position, []
    with torch.random.fork_rng():
        batch = method.prepare(trainer.data_collator(rows), 0, len(rows), range(len(rows)))
        inputs = trainer._prepare_inputs(batch)
        for _ in range(1 + MEASURED_STEPS):
            began = time.perf_counter()
            with trainer.compute_loss_context_manager():
                loss = trainer.compute_loss(trainer.model, inputs)
            loss.backward()
            if args.device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
    trainer.model.zero_grad()
    trainer.counts.zero_()
    method.longest_position = longest
    own = torch.tensor([sum(seconds[1:]) / MEASURED_STEPS], device=args.device)
    return float(trainer.accelerator.gather(own).max()) * args.gradient_accumulation_steps


def planned_steps(trainer: DraftTrainer) -> int:
    """Return the steps of the run by `max_steps` or the number of epochs."""
    args = trainer.args
    if args.max_steps > 0:
        return args.max_steps
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps * trainer.accelerator.num_processes
    return math.ceil(args.num_train_epochs * len(trainer.train_dataset) / rows)


def limit(trainer: DraftTrainer, seconds: float, minutes: float, checkpoint: str | None) -> None:
    """Give the run as many steps of `seconds` as `minutes` have room for, and not more than it had.

    The learning rate thus ends where its schedule ends. A run that is resumed keeps the number of its first start.
    """
    steps = max(1, min(planned_steps(trainer), int(SHARE_OF_STEPS * minutes * 60 / seconds)))
    if checkpoint is not None:
        steps = json.loads((Path(checkpoint) / "trainer_state.json").read_text(encoding="utf-8"))["max_steps"]
    trainer.args.max_steps = steps
    if trainer.args.warmup_steps >= 1:  # below 1 it is a share
        trainer.args.warmup_steps = min(trainer.args.warmup_steps, steps // 10)


def describe(trainer: DraftTrainer, seconds: float) -> str:
    """Say in a line how long the run takes, and how much memory."""
    import psutil  # a requirement of accelerate

    steps, weights = planned_steps(trainer), [one for one in trainer.model.parameters() if one.requires_grad]
    on_gpu = trainer.args.device.type == "cuda"
    used = torch.cuda.max_memory_allocated() if on_gpu else psutil.Process().memory_info().rss
    used += sum(3 * one.numel() * one.element_size() for one in weights)  # gradients, and two states of Adam
    return (
        f"About {duration(steps * seconds)}: {steps:,} steps of {seconds:.2f} s, with {used / 2**30:.1f} GiB of memory."
    )


def duration(seconds: float) -> str:
    """Return a time in words.

    >>> duration(42), duration(540), duration(42420)
    ('1 min', '9 min', '11 h 47 min')
    """
    hours, minutes = divmod(max(1, round(seconds / 60)), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
