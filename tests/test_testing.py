"""The tiny targets are what their names say: they build, depend on their context, and batch exactly."""

import pytest
import torch

from tests.tiny_targets import (
    BOS_TOKEN_ID,
    EOS_TOKEN_ID,
    LOGIT_STD,
    PAD_TOKEN_ID,
    TINY_TARGETS,
    WINDOW,
    tiny_prompts,
    tiny_target,
)

NUM_NEW_TOKENS = 14
LENGTHS = (9, 40, 23)  # below and above the window


@pytest.mark.parametrize("name", TINY_TARGETS)
def test_every_target_is_small_varied_and_does_not_feel_padding(name):
    model = tiny_target(name)
    config = model.config
    assert config.model_type.removesuffix("_text") == name
    assert 2 <= config.num_hidden_layers <= 4
    assert name == "deepseek_v3" or config.num_attention_heads // config.num_key_value_heads >= 2
    special = (config.pad_token_id, config.bos_token_id, config.eos_token_id)
    assert special == (PAD_TOKEN_ID, BOS_TOKEN_ID, EOS_TOKEN_ID)
    if getattr(config, "sliding_window", None) is not None:
        assert config.sliding_window == WINDOW < max(LENGTHS)
    with torch.no_grad():
        logits = model(tiny_prompts(config.vocab_size, [64], seed=1)[0]).logits[0]
    assert 0.5 * LOGIT_STD < logits.std() < 1.5 * LOGIT_STD
    assert logits.argmax(-1).unique().numel() >= 16
    input_ids, mask = tiny_prompts(config.vocab_size, LENGTHS)
    options = {"max_new_tokens": NUM_NEW_TOKENS, "min_new_tokens": NUM_NEW_TOKENS, "do_sample": False}
    batch = model.generate(input_ids=input_ids, attention_mask=mask, **options)[:, max(LENGTHS) :]
    for row, length in enumerate(LENGTHS):
        alone = {"input_ids": input_ids[row : row + 1, -length:], "attention_mask": mask[row : row + 1, -length:]}
        single = model.generate(**alone, **options)[0, length:].tolist()
        assert batch[row].tolist() == single and len(set(single)) >= 5


@pytest.mark.parametrize(("vocab_size", "lengths"), [(50, []), (50, [3, 0]), (3, [4])])
def test_impossible_prompts_and_targets_are_refused(vocab_size, lengths):
    with pytest.raises(ValueError, match="expected"):
        tiny_prompts(vocab_size, lengths)
    with pytest.raises(ValueError, match=r"'gpt2'.* llama"):
        tiny_target("gpt2")
