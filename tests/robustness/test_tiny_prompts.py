"""Prompts of one to five tokens, many at a time."""

import pytest
import torch

from tests.robustness.comparison import check_text
from tests.robustness.drafts import make_draft
from tests.tiny_targets import tiny_prompts, tiny_target

ROWS = 100


def check_batches(kind, batches):
    """Rows end at different places, and short rows are padded."""
    model = tiny_target("qwen3", vocab_size=32)  # the tree of TokenSwift has nodes with 30 children
    draft = make_draft(kind, model)
    options = {"max_new_tokens": 7, "eos_token_id": [4, 9], "pad_token_id": 0, "do_sample": False}
    for seed in batches:
        lengths = torch.randint(1, 6, (ROWS,), generator=torch.Generator().manual_seed(seed)).tolist()
        input_ids, mask = tiny_prompts(24, lengths, seed)
        call = {"input_ids": input_ids, "attention_mask": mask} | options
        expected = model.generate(**call, return_dict_in_generate=True, output_scores=True)
        check_text(expected, model.generate(**call, assistant_model=draft), input_ids.shape[1])


@pytest.mark.parametrize("kind", ["ngram", "eagle3"])
def test_a_hundred_prompts(kind):
    check_batches(kind, [10_000])


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["ngram", "specattn", "longspec", "tokenswift", "eagle3", "dflash", "assistant"])
def test_ten_thousand_prompts(kind):
    check_batches(kind, range(10_000 // ROWS))
