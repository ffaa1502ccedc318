"""Two steps of eight ragged rows, whole and sharded: accelerate launch --config_file FSDP_CONFIG divided.py FOLDER"""

import json
import os
import sys
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType

from hf_longspec import LongSpecDraftModel
from hf_longspec.training import DraftTrainer, DraftTrainingArguments
from tests.tiny_targets import tiny_target

ROWS_PER_STEP, STEPS = 8, 2
# Two processes train with whole parameters, and with parameters that are divided between them.
MODES = ("whole", "sharded")


def make_trainer(folder, rows, accumulation):
    """Rows of 9 to 40 tokens for uneven micro-batches; SGD, since Adam would turn rounding into steps."""
    target = tiny_target("llama", max_position_embeddings=512)
    torch.manual_seed(1)
    draft = LongSpecDraftModel.from_target(target, window=16)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(9, 41, (ROWS_PER_STEP * STEPS,), generator=generator).tolist()
    dataset = [{"input_ids": torch.randint(3, 128, (length,), generator=generator)} for length in lengths]
    sizes = {"num_train_epochs": 1, "per_device_train_batch_size": rows, "gradient_accumulation_steps": accumulation}
    how = {"learning_rate": 0.3, "optim": "sgd", "logging_steps": 1, "save_strategy": "no", "use_cpu": True}
    args = DraftTrainingArguments(str(folder), **sizes, **how, disable_tqdm=True)
    return DraftTrainer(draft, target, args, train_dataset=dataset, eval_dataset=dataset)


def history(trainer):
    """The logged values of each step, without times."""
    names = ["loss", "grad_norm", "num_input_tokens_seen", "acceptance_gap_1", "acceptance_gap_5"]
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [{name: step[name] for name in names if name in step} for step in steps]


def shard_on_cpu():
    """Make accelerate shard on a CPU, where it silently uses DDP instead. Torch's FSDP runs over gloo."""
    prepare = AcceleratorState.__init__

    def init(self, *args, **kwargs):
        if PartialState._shared_state.get("distributed_type") == DistributedType.MULTI_CPU:
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        prepare(self, *args, **kwargs)

    AcceleratorState.__init__ = init


def train(folder, mode):
    """Train in this process and the others of its group; the first one writes what it logged."""
    os.environ["ACCELERATE_USE_FSDP"] = "true" if mode == "sharded" else "false"
    output = Path(folder) / mode
    run = make_trainer(output, 2, 2)
    run.train()
    parts = [type(part).__name__ for part in run.draft.parameters()]
    metrics = run.evaluate()
    run.save_model()
    if run.accelerator.is_main_process:
        facts = {"steps": history(run), "metrics": metrics, "parts": parts}
        (output / "history.json").write_text(json.dumps(facts))


def train_in_a_fork(rank, port, folder, mode):
    """One of two processes, with the variables that accelerate launch sets."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
    train(folder, mode)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    assert os.environ["ACCELERATE_USE_FSDP"] == "true"  # set by accelerate launch from the configuration
    for mode in MODES:
        if mode == "sharded":
            shard_on_cpu()
        train(sys.argv[1], mode)
    # without this, threads that outlive the process group sometimes abort the process
    torch.distributed.destroy_process_group()
