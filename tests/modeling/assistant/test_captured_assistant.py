"""Draft models and Token Recycling in steps of fixed shapes: on a simulated CUDA device, and compiled."""

import pytest
import torch

from hf_longspec import AssistantDraftModel, TokenRecyclingDraftModel
from hf_longspec.generation import compiled_steps
from hf_longspec.testing import tiny_prompts, tiny_target
from tests.generation.test_on_simulated_cuda import FIRST, generate, simulated, watch
from tests.simulated_cuda import why_not

pytestmark = pytest.mark.usefixtures("every_step_speculates")

DRAFTS = {
    "chain": {"num_assistant_tokens": 3},
    "tree": {"tree_widths": [4, 3]},
    "window": {"num_assistant_tokens": 2, "window": 8},
    "pard": {"num_assistant_tokens": 3, "pard_token": 23},
    "recycling": None,
}
LENGTHS = (23, 9, 40)


def make(kind, model):
    if DRAFTS[kind] is None:
        return TokenRecyclingDraftModel.from_target(model, num_nodes=8, max_depth=3)
    small = tiny_target("qwen3", 5, vocab_size=24, num_hidden_layers=2)
    return AssistantDraftModel.from_model(small, model, **DRAFTS[kind])


@torch.no_grad()
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.parametrize(("kind", "steps"), [*((kind, "graph") for kind in DRAFTS), ("tree", "off"), ("pard", "off")])
def test_on_a_device(kind, steps, monkeypatch):
    """The text of the CPU, twice. An iteration reads once; with captured steps, the second call captures nothing."""
    model = tiny_target("llama", vocab_size=24)
    draft, prompts, sampled = make(kind, model), tiny_prompts(24, LENGTHS), kind != "tree"
    expected = generate(model, draft, *prompts, sampled)
    draft.generation_config.compile = steps
    with simulated() as cuda:
        cuda.place(model), cuda.place(draft)
        iterations = watch(cuda, monkeypatch)
        for call in range(2):
            assert torch.equal(cuda.fetch(generate(model, draft, *cuda.place(prompts), sampled)), expected)
            assert {(one.reads, one.writes) for one in iterations[FIRST:]} == {(1, 0)}
            if steps == "graph" and call:
                assert len({one.graphs for one in iterations}) == 1
            iterations.clear()
        assert bool(cuda.replays) == (steps == "graph")


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["tree", "pard"])
def test_compiled_steps_give_the_same_text(kind, monkeypatch):
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
    monkeypatch.setattr(compiled_steps, "BACKEND", counter)
    torch._dynamo.reset()
    model = tiny_target("llama", vocab_size=24, num_hidden_layers=1)
    draft, prompts = make(kind, model), tiny_prompts(24, LENGTHS)
    expected = generate(model, draft, *prompts, False)
    draft.generation_config.compile = "compile"
    assert torch.equal(generate(model, draft, *prompts, False), expected)
    built = counter.frame_count
    assert built >= 2  # of both models
    with torch._dynamo.config.patch(error_on_recompile=True):
        generate(model, draft, *prompts, False)
    assert counter.frame_count <= built + 2  # rows of equal lengths, in places of their own
    torch._dynamo.reset()
