"""Draft models in compiled steps. Captured ones are tested on a simulated device with those of all drafters."""

import pytest
import torch

from hf_longspec.generation import compiled_steps
from hf_longspec.testing import tiny_prompts, tiny_target
from tests.generation.test_on_simulated_cuda import generate, make_draft

pytestmark = pytest.mark.usefixtures("every_step_speculates")


@pytest.mark.soak
@pytest.mark.parametrize("name", ["draft model, tree", "draft model, PARD"])
def test_compiled_steps_give_the_same_text(name, monkeypatch):
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
    monkeypatch.setattr(compiled_steps, "BACKEND", counter)
    torch._dynamo.reset()
    model = tiny_target("llama", vocab_size=24, num_hidden_layers=1)
    draft, prompts = make_draft(name, model), tiny_prompts(24, (23, 9, 40))
    expected = generate(model, draft, *prompts, False)
    draft.generation_config.compile = "compile"
    assert torch.equal(generate(model, draft, *prompts, False), expected)
    built = counter.frame_count
    assert built >= 2  # of both models
    with torch._dynamo.config.patch(error_on_recompile=True):
        generate(model, draft, *prompts, False)
    assert counter.frame_count <= built + 2  # rows of equal lengths, in places of their own
    torch._dynamo.reset()
