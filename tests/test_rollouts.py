"""Trainers of TRL, whose rollouts use a bound draft: two steps each, with the same completions as without.

Sampled completions are compared with those of the loop without a draft, for the same seed.
"""

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_longspec
from hf_longspec import NgramDraftModel, PlainDraftModel
from tests.test_bound import CARDS

trl = pytest.importorskip("trl")
pytestmark = pytest.mark.soak
PROMPTS = ["one two three, one two", "a b c, a b c, a", "four five, four five", "the sea, the sea, the"]
STEPS = 2


@pytest.fixture
def tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(CARDS / "tiny-target", padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


def rollouts(name, model, tokenizer, draft, folder):
    """The completions of two training steps, and the statistics of the calls."""
    seen, calls = [], []

    def reward(completions, **_):
        seen.extend(completions)
        calls.append(None if draft is None else draft.last_speculation)
        return [float(len(set(text))) for text in completions]

    how = {"output_dir": str(folder), "report_to": [], "use_cpu": True, "bf16": False, "max_steps": STEPS, "seed": 3}
    how |= {"per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 24, "learning_rate": 1e-3}
    config = getattr(trl, f"{name}Config")(**how)
    data = Dataset.from_dict({"prompt": PROMPTS})
    trainer = getattr(trl, f"{name}Trainer")(
        model=model, reward_funcs=reward, args=config, train_dataset=data, processing_class=tokenizer
    )
    with hf_longspec.bind(trainer, draft):
        trainer.train()
    return seen, calls


@pytest.mark.parametrize("name", ["GRPO", "RLOO"])
def test_rollouts_draft_and_are_the_same(name, tokenizer, tmp_path):
    texts = []
    for kind in (PlainDraftModel, NgramDraftModel):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(CARDS / "tiny-target", dtype=torch.float32)
        draft = kind.from_target(model)
        draft.generation_config.gate = False
        seen, calls = rollouts(name, model, tokenizer, draft, tmp_path / kind.__name__)
        texts.append(seen)
        assert len(calls) == STEPS and all(call.reason is None for call in calls), [call.reason for call in calls]
    assert sum(call.num_draft_tokens for call in calls) > 0
    assert texts[0] == texts[1] and len(texts[0]) == 4 * STEPS
