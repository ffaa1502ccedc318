"""Drafts in compiled steps: the text and drafts of steps that run as they are, all in graphs, which later calls use."""

import pytest
import torch

from hf_longspec.attention_backends.contexts import SparseContext, TreeContext
from hf_longspec.generation.compiled import compiled_steps as compiled
from hf_longspec.generation.compiled.fixed_steps import ForwardsOnCache
from hf_longspec.modeling.register_draft import DRAFTS
from tests.modeling.calls import generate
from tests.pairwise import few
from tests.tiny_targets import randomize, tiny_target

LENGTHS = (33, 5, 19)
PARTIAL = {"self_draft": "partial_kv", "partial_kv_budget": 27, "partial_kv_recent": 9, "tree_branching": [2, 3, 2]}
REDUCED_HEADS = {"tree_branching": [1, 40, 1], "ngram_candidates": 2, "draft_vocab_size": 90}
DFLASH = {"num_tree_nodes": 12, "block_size": 4, "markov_rank": 16, "window": 9}
# The draft, and its compiled parts: its own functions, once of a whole tree and once where processors rank each level,
# and the forwards by their contexts. Random heads are wide, so that some of what they say is accepted.
STEPS = {
    "eagle3": ("longspec_eagle3", {"tree_widths": [7, 5], "draft_vocab_size": 11}, {"Tree", "Level"}),
    "dflash": ("longspec_dflash", DFLASH, {"Tree", "Level"}),
    "gemma4_assistant": ("longspec_gemma4_assistant", {"tree_widths": [7, 5]}, {"Tree", "Level"}),
    "verify_hidden": ("tokenswift", REDUCED_HEADS, {"Levels", "HeadLogits"}),
    "dynamic": ("tokenswift", PARTIAL, {"Levels", "HeadLogits", SparseContext}),
    "full": ("tokenswift", PARTIAL | {"partial_kv_policy": "full"}, {"Levels", "HeadLogits", SparseContext}),
    "sequential": ("tokenswift", {"sequential": True, "tree_branching": [1, 20, 2]}, {"Levels", "HeadLogits"}),
    "assistant": ("longspec_assistant", {"tree_widths": [4, 3]}, set()),
    "PARD": ("longspec_assistant", {"num_assistant_tokens": 3, "pard_token": 11}, set()),
}
SHORT = ("eagle3", "verify_hidden")  # each of the others takes many seconds to compile
CALLS = ({}, {"do_sample": True, "repetition_penalty": 1.3, "min_p": 0.05})


def steps_of(*modules):
    """Names of compiled functions, and in place of the model's step the contexts that it was compiled for."""
    made = [key for module in modules for key in compiled._compiled.get(module, {})]
    contexts = {key[0] for kind, (_, key, *_), *_ in made if kind is ForwardsOnCache}
    return contexts | {kind.__name__ for kind, *_ in made if kind is not ForwardsOnCache}


@pytest.mark.parametrize(
    "name", few([name if name in SHORT else pytest.param(name, marks=pytest.mark.soak) for name in STEPS], 1)
)
def test_compiled_steps(target, name, graphs, run_as_they_are):
    kind, settings, steps = STEPS[name]
    few = name in ("eagle3", "dflash", "gemma4_assistant")
    model = target("llama", vocab_size=12 if few else 128, num_hidden_layers=1)
    models = [tiny_target("qwen3", 5, vocab_size=128)] if kind == "longspec_assistant" else []
    draft = DRAFTS[kind].model.from_target(model, *models, **settings)
    randomize(draft)
    found = {}
    for mode in ("off", "compile"):
        draft.generation_config.compile = mode
        for number, options in enumerate(CALLS):
            torch.manual_seed(0)
            text = generate(model, draft, LENGTHS, max_new_tokens=14, **options)
            found[mode, number] = text.tolist(), draft.last_speculation.acceptance_histogram
            assert found[mode, number] == found["off", number]
            assert draft.last_speculation.num_accepted_draft_tokens > 0
        assert (graphs.frame_count > 0) == (mode == "compile")
    assert steps_of(model, draft) == steps | {TreeContext}
    built = graphs.frame_count
    with torch._dynamo.config.patch(error_on_recompile=True):
        generate(model, draft, LENGTHS, max_new_tokens=30, **CALLS[-1])
    # rows, or what a partial cache holds of them, that are equally long for the first time
    assert graphs.frame_count <= built + 2
    assert not run_as_they_are
