"""Drafters inside transformers' own assisted decoding: they keep the candidate generator contract."""

import pytest
import torch
from transformers.generation.candidate_generator import CandidateGenerator

from hf_longspec import PlainDraftModel, SpecAttnDraftModel
from hf_longspec.generation.cache import SpeculativeCache
from hf_longspec.generation.drafter import Binding
from hf_longspec.generation.target import TargetView
from hf_longspec.testing import TINY_TARGETS, tiny_prompts, tiny_target

NEW_TOKENS = 21


def bind(draft, model, max_length):
    """The drafter of `draft` with a cache of its own and no token rule: what a foreign loop can give it."""
    target = TargetView(model)
    cache = SpeculativeCache(model.config, 1, max_length, tree_slots=draft.num_tree_nodes(target))
    return draft.drafter(Binding(target, cache, None, max_length))


class Spy(CandidateGenerator):
    """Forwards a candidate generator and notes how many candidates came and how many matched."""

    def __init__(self, generator):
        self.generator = generator
        self.offered, self.matched = [], []

    def get_candidates(self, input_ids, *args, **kwargs):
        candidates, logits = self.generator.get_candidates(input_ids)
        assert torch.equal(candidates[:, : input_ids.shape[1]], input_ids)
        self.offered.append(candidates.shape[1] - input_ids.shape[1])
        return candidates, logits

    def update_candidate_strategy(self, input_ids, scores, num_matches):
        self.matched.append(int(num_matches))
        self.generator.update_candidate_strategy(input_ids, scores, num_matches)


@pytest.mark.parametrize("name", TINY_TARGETS)
def test_specattn_in_stock_assisted_decoding(name, monkeypatch):
    """The stock loop with our drafter emits what plain `generate` emits, and accepts drafts on the way."""
    model = tiny_target(name)
    input_ids, _ = tiny_prompts(128, [41])
    kwargs = {"input_ids": input_ids, "max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
    expected = model.generate(**kwargs)
    draft = SpecAttnDraftModel.from_target(model, num_assistant_tokens=3, sparse_min_tokens=48)
    spy = Spy(bind(draft, model, max_length=input_ids.shape[1] + NEW_TOKENS))
    monkeypatch.setattr(model, "_get_candidate_generator", lambda **kwargs: spy)
    # any assisted mode leads to the stock loop, which then asks for its candidate generator
    found = model.generate(**kwargs, prompt_lookup_num_tokens=3)
    assert torch.equal(found, expected)
    assert max(spy.offered) == 3
    assert sum(spy.matched) > 0


def test_candidates_stop_at_the_length_limit():
    model = tiny_target("llama")
    input_ids, _ = tiny_prompts(128, [19])
    drafter = bind(SpecAttnDraftModel.from_target(model, num_assistant_tokens=4), model, max_length=22)
    candidates, logits = drafter.get_candidates(input_ids)
    assert logits is None
    assert candidates.shape == (1, 21)  # position 22 is the bonus token's


def test_a_drafter_without_candidates_offers_none():
    model = tiny_target("llama")
    input_ids, _ = tiny_prompts(128, [7])
    candidates, _ = bind(PlainDraftModel.from_target(model), model, max_length=30).get_candidates(input_ids)
    assert torch.equal(candidates, input_ids)


def test_following_a_longer_sequence_runs_only_what_is_missing():
    """The second call sees 5 more tokens; the cache then holds all but the last, and the model ran on no more."""
    model = tiny_target("qwen3")
    input_ids, _ = tiny_prompts(128, [30])
    drafter = bind(SpecAttnDraftModel.from_target(model, num_assistant_tokens=2), model, max_length=40)
    drafter.get_candidates(input_ids[:, :25])
    seen = []
    handle = model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    drafter.get_candidates(input_ids)
    handle.remove()
    assert drafter.binding.cache.host_lengths == (29,)
    assert sum(seen) == 5 + 2  # the missing tokens, then two drafting steps
