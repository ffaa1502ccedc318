"""TokenSwift in compiled steps: the text of steps that run as they are, and all steps really in graphs."""

from itertools import pairwise

import pytest
import torch

from hf_longspec import ContextualPenaltyLogitsProcessor
from hf_longspec.attention_backends.contexts import SparseContext, TreeContext
from hf_longspec.generation import compiled_steps as compiled
from hf_longspec.generation.target import TargetView
from tests.rounding import rounding
from tests.tiny_targets import random_tokenswift_draft, tiny_prompts

pytestmark = pytest.mark.usefixtures("every_step_speculates")

LENGTHS = (33, 5, 19)
# Each takes many seconds to compile; `make soak` runs them.
SOAK = pytest.mark.soak
NEVER = 999  # no token of the tiny targets
MODES = {
    # random heads: wide, so that some of what they say is accepted
    "verify_hidden": {"self_draft": "verify_hidden", "tree_branching": [1, 40, 1]},
    "dynamic": {"self_draft": "partial_kv"},
    "full": {"self_draft": "partial_kv", "partial_kv_policy": "full"},
    "sequential": {"sequential": True, "tree_branching": [1, 20, 2]},
}
# The compiled parts: the heads, the verification, the forward over the partial cache.
STEPS = {
    "verify_hidden": {"_levels", TreeContext},
    "dynamic": {"_levels", TreeContext, SparseContext},
    "full": {"_levels", TreeContext, SparseContext},
    "sequential": {"_levels", TreeContext},
}
# The heads alone, where processors that look at the whole text rank what they say.
RANKED = {"_logits"}


def draft_for(model, mode, **settings):
    small = {"partial_kv_budget": 27, "partial_kv_recent": 9, "tree_branching": [2, 3, 2]}
    draft = random_tokenswift_draft(model, **(small | MODES[mode] | settings))
    draft.generation_config.gate = False  # which steps speculate shall not depend on the clock
    return draft


def text(model, draft, mode, rows=3, new=24, **options):
    """The generated sequences, from the seed that all calls share."""
    draft.generation_config.compile = mode
    input_ids, attention_mask = tiny_prompts(model.config.vocab_size, LENGTHS[:rows])
    torch.manual_seed(0)
    inputs = {"attention_mask": attention_mask, "max_new_tokens": new, "eos_token_id": NEVER}
    return model.generate(input_ids, assistant_model=draft, **inputs, **options)


def compiled_steps(*modules):
    """Names of compiled functions; in place of the model's step the contexts that it was compiled for."""
    made = [key for module in modules for key in compiled._compiled.get(module, {})]
    steps = [shape for function, shape in made if function is compiled._forwards]
    kinds = {part for shape in steps for part in shape if isinstance(part, type)}
    return kinds | {function.__name__ for function, _ in made if function is not compiled._forwards}


@pytest.fixture
def seen(monkeypatch):
    """Hidden states of every verification of `seen["draft"]`, by its setting `compile`."""
    records, verify = {"off": [], "compile": []}, TargetView.verify

    def recording(self, *args):
        step = verify(self, *args)
        records[records["draft"].generation_config.compile].append(step.hidden)
        return step

    monkeypatch.setattr(TargetView, "verify", recording)
    return records


def assert_same_hidden_states(seen):
    # steps that nobody asks for hidden states, such as the check of a target, have none
    off, compiled_ones = ([hidden for hidden in seen[mode] if hidden is not None] for mode in ("off", "compile"))
    assert len(compiled_ones) == len(off) >= 5
    for got, truth in zip(compiled_ones, off, strict=True):
        torch.testing.assert_close(got, truth, **rounding(truth, layers=1))
    assert all(before.data_ptr() != after.data_ptr() for before, after in pairwise(compiled_ones))


@pytest.mark.parametrize(
    ("mode", "rows"),
    [
        ("verify_hidden", 3),
        pytest.param("verify_hidden", 1, marks=SOAK),
        *(pytest.param(mode, rows, marks=SOAK) for mode in ("dynamic", "full", "sequential") for rows in (1, 3)),
    ],
)
def test_the_text_is_that_of_the_steps_as_they_are(target, mode, rows, graphs, run_as_they_are, seen):
    """And so are the hidden states that the heads read."""
    model = target("llama", num_hidden_layers=1)
    seen["draft"] = draft = draft_for(model, mode)
    expected = text(model, draft, "off", rows)
    assert graphs.frame_count == 0
    assert torch.equal(text(model, draft, "compile", rows), expected)
    assert draft.last_speculation.num_accepted_draft_tokens > 0
    if mode == "verify_hidden":
        assert_same_hidden_states(seen)
    options = {"do_sample": True, "top_p": 0.95, "temperature": 0.9}
    sampled = text(model, draft, "off", rows, **options)
    assert torch.equal(text(model, draft, "compile", rows, **options), sampled)
    assert compiled_steps(model, draft) == STEPS[mode]
    assert not run_as_they_are


@pytest.mark.parametrize("mode", ["verify_hidden", pytest.param("dynamic", marks=SOAK)])
def test_growing_lengths_build_no_further_graph(target, mode, graphs, run_as_they_are):
    """20 iterations; every one sets and removes a hook, and a second call has another drafter."""
    model = target("llama", num_hidden_layers=1)
    draft = draft_for(model, mode)
    options = {"do_sample": True, "logits_processor": [ContextualPenaltyLogitsProcessor(1.3, window=5)]}
    text(model, draft, "compile", rows=2, new=20, **options)
    built = graphs.frame_count
    with torch._dynamo.config.patch(error_on_recompile=True):
        found = text(model, draft, "compile", rows=2, new=50, **options)
    assert draft.last_speculation.num_forwards >= 20
    assert torch.equal(text(model, draft, "off", rows=2, new=50, **options), found)
    # rows, or what the partial cache holds of them, that are equally long for the first time in the second call
    assert graphs.frame_count <= built + 2
    assert not run_as_they_are


@pytest.mark.parametrize("mode", ["verify_hidden", pytest.param("dynamic", marks=SOAK)])
def test_processors_and_joined_ngrams(target, mode, graphs, run_as_they_are):
    """Ones that look at a position alone and at the whole text, over trees with n-grams."""
    model = target("llama", num_hidden_layers=1)
    draft = draft_for(model, mode, ngram_candidates=2, ngram_num_tokens=3)
    options = {"repetition_penalty": 1.3, "do_sample": True, "min_p": 0.05}
    expected = text(model, draft, "off", **options)
    assert torch.equal(text(model, draft, "compile", **options), expected)
    assert draft.last_speculation.num_accepted_draft_tokens > 0
    assert compiled_steps(model, draft) == STEPS[mode] - {"_levels"} | RANKED
    assert not run_as_they_are
