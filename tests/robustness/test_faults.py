"""An exception in any phase of a call: model, draft and the user's cache are as before, and the next call is right."""

import copy
from functools import partial
from itertools import cycle, product

import pytest
import torch

from hf_longspec import SpeculativeCache
from hf_longspec.attention_backends.lengths import SeqLens
from hf_longspec.generation.cache import CACHE_NAME
from hf_longspec.generation.sampling import TokenRule
from hf_longspec.generation.target import TargetView
from tests.robustness.comparison import state_of
from tests.robustness.drafts import make_draft
from tests.tiny_targets import tiny_prompts, tiny_target
from tests.user_objects import Bomb, Recorder
from tests.watching import after, before

NEVER, NEW, PROMPT, TURN = 1, 8, 33, 11
KINDS = ("ngram", "specattn", "longspec", "tokenswift", "partial")


class Boom(Exception):
    """The exception of a user's object."""


def around(owner, name, bomb, patch):
    """Let the bomb go off when a method has done its work, so that what it changed is changed."""
    after(patch, owner, name, lambda *_, **__: bomb())


def method_of(owner, name):
    return lambda draft, bomb, patch: around(owner, name, bomb, patch)


def drafter_method(name):
    return lambda draft, bomb, patch: after(
        patch, draft, "make_drafter", lambda drafter, _: around(drafter, name, bomb, patch)
    )


def streamer(draft, bomb, patch, method):
    recorder = Recorder()
    around(recorder, method, bomb, patch)
    return {"streamer": recorder}


def in_the_second_layer(draft, bomb, patch):
    """Raise in a forward over the prompt in chunks, whose tokens are in the cache of the first layer."""
    layer = draft.of_model.model.layers[1]
    size = 6  # other forwards, of which there are some as the class has changed, have fewer tokens

    def goes_off(module, hidden_states, *_, **__):
        if module is layer and hidden_states.shape[1] == size:
            bomb()

    before(patch, type(layer), "forward", goes_off)
    return {"prefill_chunk_size": size}


def in_half_a_commit(draft, bomb, patch):
    """With the lengths of the rows set, and not those of the layers."""

    def half(cache, lengths):
        cache.rows.lengths = SeqLens.of(lengths)
        bomb()

    before(patch, SpeculativeCache, "set_lengths", half)


# Phase: how to arm it, and at which call the bomb goes off
PHASES = {
    "prefill": (method_of(TargetView, "prefill"), 1),
    "second chunk of the prompt": (in_the_second_layer, 2),
    "seed": (method_of(TargetView, "verify"), 1),
    "start": (drafter_method("start"), 1),
    "draft": (drafter_method("propose"), 2),
    "verify": (method_of(TargetView, "verify"), 3),
    "accept": (method_of(TokenRule, "accept"), 3),
    "commit": (method_of(SpeculativeCache, "commit"), 3),
    "half a commit": (in_half_a_commit, 5),
    "observe": (drafter_method("observe"), 2),
    "processor": (lambda draft, bomb, patch: {"logits_processor": [bomb.processor()]}, 4),
    "criterion": (lambda draft, bomb, patch: {"stopping_criteria": [bomb.criterion()]}, 4),
    "stream": (partial(streamer, method="put"), 4),
    "end of the stream": (partial(streamer, method="end"), 1),
}


@pytest.fixture(scope="module")
def run():
    """A target, a text of which a user's cache holds the beginning, and its continuation."""
    model = tiny_target("gemma3")
    input_ids = tiny_prompts(model.config.vocab_size, (PROMPT,))[0]
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": NEVER, "pad_token_id": NEVER}

    def generate(draft=None, **more):
        return model.generate(input_ids, **(options | more), assistant_model=draft)

    generate.model, generate.input_ids = model, input_ids
    generate.text = generate().tolist()
    generate.attributes = sorted(vars(model))
    generate.before = state_of(model)  # once: what a test leaves behind must not be the next one's measure
    return generate


def held(cache):
    return [(layer.keys[:, :, :TURN].clone(), layer.values[:, :, :TURN].clone()) for layer in cache.layers]


@pytest.fixture
def cache(run):
    """A user's cache with the first tokens of the text."""
    cache = SpeculativeCache(run.model.config, 1, 64, tree_slots=256)
    turn = {"max_new_tokens": 1, "do_sample": False, "eos_token_id": NEVER}
    run.model.generate(run.input_ids[:, :TURN], **{CACHE_NAME: cache}, **turn)
    assert cache.get_seq_length() == TURN
    return cache


# Every phase with the drafts in turn, and the phases of the drafter with every draft. Ctrl-C: test_interruption.py.
CASES = {
    *((kind, phase) for phase, kind in zip(PHASES, cycle(KINDS))),
    *product(KINDS, ("draft", "observe")),
    *product(("longspec", "partial"), ("start",)),
}


@pytest.mark.parametrize(("kind", "phase"), sorted(CASES))
def test_a_fault(run, cache, kind, phase):
    draft = make_draft(kind, run.model)
    draft.__dict__["of_model"] = run.model
    weights, settings = copy.deepcopy(draft.state_dict()), copy.deepcopy(draft.generation_config.to_dict())
    entries, training = held(cache), draft.training
    arm, calls = PHASES[phase]
    bomb = Bomb(calls, Boom)
    with pytest.MonkeyPatch.context() as patch:
        options = arm(draft, bomb, patch) or {}
        with pytest.raises(Boom):
            run(draft, **{CACHE_NAME: cache}, **options)
    assert state_of(run.model) == run.before and sorted(vars(run.model)) == run.attributes
    assert draft.generation_config.to_dict() == settings and draft.training == training
    assert all(torch.equal(weight, weights[name]) for name, weight in draft.state_dict().items())
    for (keys, values), layer in zip(entries, cache.layers, strict=True):
        assert torch.equal(layer.keys[:, :, :TURN], keys) and torch.equal(layer.values[:, :, :TURN], values)
    assert not cache.rows.staged and cache.get_seq_length() == TURN
    assert run(draft, **{CACHE_NAME: cache}).tolist() == run.text
    assert run(draft).tolist() == run.text


@pytest.mark.parametrize("kind", ["ngram", "longspec"])
def test_a_model_in_training_mode_stays_there(run, kind):
    run.model.train()
    try:
        before, draft = state_of(run.model), make_draft(kind, run.model).train()
        assert run(draft).tolist() == run.text
        assert state_of(run.model) == before and draft.training
    finally:
        run.model.eval()
