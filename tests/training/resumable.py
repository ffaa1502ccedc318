"""A short run. `python resumable.py FOLDER` starts it and kills its own process after the fifth step."""

import os
import signal
import sys

import torch
from transformers import TrainerCallback

from hf_longspec import LongSpecDraftModel
from hf_longspec.testing import tiny_target
from hf_longspec.training import DraftTrainer, DraftTrainingArguments, TokenWindows

SAVED, KILLED, STEPS = 3, 5, 8


class Watch(TrainerCallback):
    """Records the steps, and kills the process after one of them."""

    def __init__(self, kill_at=None):
        self.kill_at = kill_at
        self.steps = []

    def on_step_end(self, args, state, control, **kwargs):
        self.steps.append(state.global_step)
        if state.global_step == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


def make_trainer(folder, watch):
    """Seven rows, two per step: the checkpoint is in the middle of an epoch with an odd number of batches."""
    target = tiny_target("llama", max_position_embeddings=512)
    torch.manual_seed(1)
    draft = LongSpecDraftModel.from_target(target, window=16)
    tokens = torch.randint(3, 128, (7 * 33,), generator=torch.Generator().manual_seed(0))
    args = DraftTrainingArguments(
        str(folder),
        seed=12,
        max_steps=STEPS,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        save_steps=SAVED,
        logging_steps=1,
        learning_rate=1e-2,
        warmup_steps=2,
        use_cpu=True,
        disable_tqdm=True,
    )
    return DraftTrainer(draft, target, args, train_dataset=TokenWindows(tokens, 33), callbacks=[watch])


if __name__ == "__main__":
    torch.set_num_threads(1)
    make_trainer(sys.argv[1], Watch(KILLED)).train()
