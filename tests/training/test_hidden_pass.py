"""The final norm's input on whole rows, in pieces and at once, against the target's own forward."""

import pytest
import torch

from hf_longspec.generation.final_norm import FinalNormInput
from hf_longspec.testing import EOS_TOKEN_ID, TINY_TARGETS, tiny_prompts, tiny_target
from hf_longspec.training.hidden_pass import HiddenPass

# Residual streams of size 1 to 30 in float32, from attention that sums in another order.
TOLERANCE = 2e-4


@pytest.mark.parametrize("name", TINY_TARGETS)
@pytest.mark.parametrize("chunk_size", [None, 10])
def test_it_is_what_the_target_gives_its_norm(name, chunk_size):
    target = tiny_target(name)
    tokens, _ = tiny_prompts(target.config.vocab_size, [37] * 2)
    tokens[:, 20] = EOS_TOKEN_ID  # two documents, the second of which sees the first
    with torch.no_grad(), FinalNormInput(target) as caught:
        target(tokens)
    found = HiddenPass(target, chunk_size)(tokens)
    torch.testing.assert_close(found, caught.hidden, rtol=TOLERANCE, atol=TOLERANCE)
    assert not found.requires_grad


def test_padding_on_the_right_changes_nothing_before_it():
    target = tiny_target("llama")
    tokens, _ = tiny_prompts(target.config.vocab_size, [37])
    for chunk_size in (None, 10):
        run = HiddenPass(target, chunk_size)
        torch.testing.assert_close(run(tokens)[:, :20], run(tokens[:, :20]), rtol=TOLERANCE, atol=TOLERANCE)
