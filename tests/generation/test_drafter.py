"""Drafters as candidate generators of transformers' own loop; tests/modeling/test_contract.py compares its texts."""

import pytest
import torch

from hf_longspec import SpecAttnDraftModel
from hf_longspec.generation.special_cases.gate import gate_of
from tests.tiny_targets import tiny_prompts, tiny_target

NEW_TOKENS = 21


def test_following_a_longer_sequence_runs_only_what_is_missing_up_to_the_length_limit(widths):
    """The second call sees 5 more tokens; the cache then holds all but the last, and the model ran on no more."""
    model = tiny_target("qwen3")
    input_ids, _ = tiny_prompts(128, [30])
    drafter = SpecAttnDraftModel.from_target(model, num_assistant_tokens=2).candidate_generator(model, max_length=32)
    drafter.get_candidates(input_ids[:, :25])
    found = widths(model)
    candidates, logits = drafter.get_candidates(input_ids)
    assert drafter.binding.cache.lengths.host == (29,)
    assert sum(found) == 5 + 2  # the missing tokens, then two drafting steps
    assert logits is None and candidates.shape == (1, 31)  # position 32 is the bonus token's


def test_refusals():
    model = tiny_target("llama")
    draft = SpecAttnDraftModel.from_target(model)
    with pytest.raises(ValueError, match=r"num_hidden_layers=2.*num_hidden_layers=3"):
        draft.candidate_generator(tiny_target("llama", num_hidden_layers=3), max_length=20)
    generator = draft.candidate_generator(model, max_length=20)
    with pytest.raises(ValueError, match=r"shape \(2, 5\): a candidate generator proposes for one row of at most 20"):
        generator.get_candidates(torch.full((2, 5), 7))
    with pytest.raises(ValueError, match=r"shape \(1, 21\): .*Pass a larger max_length to candidate_generator"):
        generator.get_candidates(torch.full((1, 21), 7))


def test_rotary_frequencies_that_change_within_the_text_are_refused(monkeypatch):
    """Drafting beyond the change would change the target's frequencies; up to there the text is the stock one."""
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    model = tiny_target("llama", rope_parameters=dynamic, max_position_embeddings=70)
    draft = SpecAttnDraftModel.from_target(model, num_assistant_tokens=3, sparse_min_tokens=48)
    with pytest.raises(ValueError, match=r"max_length=66 .* change at position 69 .* 65 "):
        draft.candidate_generator(model, max_length=66)
    options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
    input_ids, _ = tiny_prompts(128, [65 - NEW_TOKENS])
    expected, forwards = model.generate(input_ids, **options), []
    drafter = draft.candidate_generator(model, max_length=65)
    monkeypatch.setattr(model, "_get_candidate_generator", lambda **kwargs: drafter)
    update = drafter.update_candidate_strategy
    drafter.update_candidate_strategy = lambda *args: forwards.append(args) or update(*args)
    # any assisted mode leads to the stock loop, which then asks for its candidate generator
    assert torch.equal(model.generate(input_ids, prompt_lookup_num_tokens=3, **options), expected)
    assert len(forwards) < NEW_TOKENS


@pytest.fixture
def gated(monkeypatch):
    monkeypatch.setattr("hf_longspec.generation.special_cases.gate.gate_of", gate_of)


def test_speculation_is_tried_when_the_text_has_grown(plain_run, gated):
    run = plain_run("llama", (21,), max_new_tokens=60, eos_token_id=None)
    draft = run.draft("specattn", sparse_min_tokens=40, sparse_ratio=0.1)
    assert isinstance(draft, SpecAttnDraftModel)
    assert run.again(draft).tolist() == run.sequences.tolist()
    stats = draft.last_speculation
    assert stats.num_spec_steps > 0
    assert list(stats.drafted_per_step[0][:18]) == [0] * 18
