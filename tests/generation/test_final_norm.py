"""The input of the final norm, on every architecture: norm and head turn it into the target's own logits."""

import threading

import pytest
import torch

from hf_longspec.generation import target_modules as final_norm
from hf_longspec.generation.target_modules import LayerInputs, TargetEnds, final_norm_of, with_final_norm_input
from hf_longspec.testing import TINY_TARGETS, tiny_prompts, tiny_target

# The same operations on the same numbers, in float32.
TOLERANCE = 1e-5


@pytest.mark.parametrize("architecture", TINY_TARGETS)
def test_norm_and_head_of_what_was_caught_are_the_logits(architecture):
    model = tiny_target(architecture)
    tokens, _ = tiny_prompts(model.config.vocab_size, [7, 7])
    with torch.no_grad(), LayerInputs(model, True) as caught:
        logits = model(tokens).logits
        again = TargetEnds(model).head(final_norm_of(model)(caught.hidden))
    assert caught.hidden.shape == (2, 7, model.config.hidden_size)
    torch.testing.assert_close(again, logits, atol=TOLERANCE, rtol=TOLERANCE)
    assert not final_norm_of(model)._forward_pre_hooks


def test_a_forward_of_another_thread_is_not_caught():
    model = tiny_target("llama")
    mine, other = (tiny_prompts(model.config.vocab_size, [length])[0] for length in (5, 9))
    with torch.no_grad(), LayerInputs(model, True) as caught:
        model(mine)
        thread = threading.Thread(target=lambda: model(other))
        thread.start()
        thread.join()
    assert caught.hidden.shape[1] == 5


@pytest.mark.parametrize("compiles", [False, True])
def test_what_is_caught_can_leave_a_graph(compiles, graphs):
    """The graph is made while one context is open, and serves when that is closed and another one open."""
    model = tiny_target("gemma3", num_hidden_layers=1, layer_types=["sliding_attention"])

    def step(tokens):
        return with_final_norm_input(model, lambda: model(tokens, use_cache=False).logits)

    run = torch.compile(step, fullgraph=True, backend=graphs) if compiles else step
    for seed in range(3):
        tokens = torch.randint(3, 128, (2, 7), generator=torch.Generator().manual_seed(seed))
        with torch.no_grad(), LayerInputs(model, True) as caught:
            expected = model(tokens, use_cache=False).logits
        with torch.no_grad(), LayerInputs(model, True):
            logits, hidden = run(tokens)
        torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=TOLERANCE)
        torch.testing.assert_close(hidden, caught.hidden, atol=TOLERANCE, rtol=TOLERANCE)
    assert graphs.frame_count == compiles
    assert not final_norm_of(model)._forward_pre_hooks
    assert not final_norm._traced.caught and not final_norm._traced.wanted


def test_a_graph_that_has_not_asked_catches_nothing(graphs):
    """Another thread may be compiling a forward while the hook is there."""
    model = tiny_target("llama", num_hidden_layers=1)
    with torch.no_grad(), LayerInputs(model, True) as caught:
        torch.compile(model, fullgraph=True, backend=graphs)(torch.ones(1, 4, dtype=torch.long), use_cache=False)
    assert graphs.frame_count == 1
    assert not caught._caught
    assert not final_norm._traced.caught


def test_the_hook_goes_when_the_forward_fails():
    model = tiny_target("llama")
    with pytest.raises(IndexError), LayerInputs(model, True):
        model(torch.tensor([[10**6]]))
    assert not final_norm_of(model)._forward_pre_hooks


def test_a_model_without_a_known_final_norm_is_refused_by_name():
    model = tiny_target("llama")
    model.model.closing = model.model.norm
    del model.model.norm
    with pytest.raises(ValueError, match="LlamaForCausalLM has no final norm"):
        final_norm_of(model)
