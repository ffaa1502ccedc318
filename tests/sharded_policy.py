"""Two steps of GRPO under FSDP2: torchrun --nproc_per_node 2 -m tests.sharded_policy DRAFT FOLDER"""

import json
import os
import sys
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import hf_longspec
from hf_longspec import NgramDraftModel
from tests.test_bound import CARDS
from tests.test_rollouts import HOW, PROMPTS, target
from tests.training.divided import shard_on_cpu

# The variables of accelerate's configuration of FSDP.
SETTINGS = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    "FSDP_VERSION": "2",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
}


def main(draft_name, folder):
    """Train, and write the completions of this process."""
    os.environ |= SETTINGS
    shard_on_cpu()
    tokenizer = AutoTokenizer.from_pretrained(CARDS / "tiny-target", padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    torch.manual_seed(0)
    model, kept = target(), []
    settings = {"num_generations": 2, "max_completion_length": 24, "save_strategy": "no"}

    def reward(completions, **_):
        kept.extend(completions)
        return [float(len(set(text))) for text in completions]

    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=GRPOConfig(folder, **HOW, **settings),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=tokenizer,
    )
    if draft_name == "ngram":
        hf_longspec.bind(trainer, NgramDraftModel.from_target(model, gate=False))
    trainer.train()
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / f"{os.environ['RANK']}.json").write_text(json.dumps(kept))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
    torch.distributed.barrier()
    os._exit(0)  # as the teardown of gloo sometimes aborts a process
