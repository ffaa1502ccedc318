"""Quest in steps of fixed shapes, on a simulated CUDA device: the text of the CPU, one read per iteration, graphs."""

import pytest
import torch

from hf_longspec import QuestDraftModel
from hf_longspec.testing import tiny_prompts, tiny_target
from tests.generation.test_on_simulated_cuda import FIRST, generate, simulated, watch
from tests.simulated_cuda import why_not

pytestmark = [
    pytest.mark.usefixtures("every_step_speculates"),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

SPARSE = {"num_assistant_tokens": 3, "sparse_ratio": 0.3, "sparse_min_tokens": 6, "num_dense_layers": 0}


@torch.no_grad()
@pytest.mark.parametrize(
    ("steps", "sampled", "lengths", "page_size"),
    [("graph", False, (41,), 3), ("graph", True, (23, 9, 40), 16), ("off", False, (23, 9, 40), 3)],
    ids=str,
)
def test_on_a_device(steps, sampled, lengths, page_size, monkeypatch):
    """The text of the CPU, twice. An iteration reads once; with captured steps, the second call captures nothing."""
    model = tiny_target("llama", vocab_size=24)
    draft, prompts = QuestDraftModel.from_target(model, page_size=page_size, **SPARSE), tiny_prompts(24, lengths)
    expected = generate(model, draft, *prompts, sampled)
    accepted = draft.last_speculation.acceptance_histogram
    draft.generation_config.compile = steps
    with simulated() as cuda:
        cuda.place(model), cuda.place(draft)
        iterations = watch(cuda, monkeypatch)
        for call in range(2):
            assert torch.equal(cuda.fetch(generate(model, draft, *cuda.place(prompts), sampled)), expected)
            assert draft.last_speculation.acceptance_histogram == accepted
            assert {(one.reads, one.writes) for one in iterations[FIRST:]} == {(1, 0)}
            if steps == "graph" and call:
                assert len({one.graphs for one in iterations}) == 1
            iterations.clear()
        assert bool(cuda.replays) == (steps == "graph")
