"""What the final norm is given, on every architecture: norm and head make the target's own logits of it."""

import threading

import pytest
import torch

from hf_longspec.generation.final_norm import FinalNormInput, final_norm_of
from hf_longspec.generation.target_ends import TargetEnds
from hf_longspec.testing import TINY_TARGETS, tiny_prompts, tiny_target

# The same operations on the same numbers, in float32.
TOLERANCE = 1e-5


@pytest.mark.parametrize("architecture", TINY_TARGETS)
def test_norm_and_head_of_what_was_caught_are_the_logits(architecture):
    model = tiny_target(architecture)
    tokens, _ = tiny_prompts(model.config.vocab_size, [7, 7])
    with torch.no_grad(), FinalNormInput(model) as caught:
        logits = model(tokens).logits
        again = TargetEnds(model).head(final_norm_of(model)(caught.hidden))
    assert caught.hidden.shape == (2, 7, model.config.hidden_size)
    torch.testing.assert_close(again, logits, atol=TOLERANCE, rtol=TOLERANCE)
    assert not final_norm_of(model)._forward_pre_hooks


def test_a_forward_of_another_thread_is_not_caught():
    model = tiny_target("llama")
    mine, other = (tiny_prompts(model.config.vocab_size, [length])[0] for length in (5, 9))
    with torch.no_grad(), FinalNormInput(model) as caught:
        model(mine)
        thread = threading.Thread(target=lambda: model(other))
        thread.start()
        thread.join()
    assert caught.hidden.shape[1] == 5


def test_the_hook_goes_when_the_forward_fails():
    model = tiny_target("llama")
    with pytest.raises(IndexError), FinalNormInput(model):
        model(torch.tensor([[10**6]]))
    assert not final_norm_of(model)._forward_pre_hooks


def test_a_model_without_a_known_final_norm_is_refused_by_name():
    model = tiny_target("llama")
    model.model.closing = model.model.norm
    del model.model.norm
    with pytest.raises(ValueError, match="LlamaForCausalLM has no final norm"):
        final_norm_of(model)
