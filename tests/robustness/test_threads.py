"""Two threads generate at once on one model that was loaded with `attn_implementation="hf_longspec"`."""

import os
import sys
import threading

import pytest

from hf_longspec.testing import tiny_prompts, tiny_target
from tests.robustness.drafts import KINDS, make_draft

NEVER = 1
ROUNDS = int(os.environ.get("HF_LONGSPEC_ROUNDS", 4))
PAIRS = [("specattn", "longspec"), ("tokenswift", "partial"), ("ngram", "specattn"), ("tokenswift", "plain")]


@pytest.fixture
def switching():
    """Let threads change places as often as the interpreter can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def in_threads(*works):
    """Run functions at once; the first exception of any is raised."""
    errors, barrier = [], threading.Barrier(len(works))

    def guarded(work):
        try:
            barrier.wait()
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


class Worker:
    """One thread's prompts, draft and expected text."""

    def __init__(self, model, kind, lengths, new):
        input_ids, attention_mask = tiny_prompts(model.config.vocab_size, lengths, seed=len(lengths))
        self.inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "max_new_tokens": new}
        self.inputs |= {"do_sample": False, "eos_token_id": NEVER, "pad_token_id": NEVER}
        self.model, self.draft = model, make_draft(kind, model)
        self.text = tiny_target("gemma3").generate(**self.inputs).tolist()
        self.overlaps = 0

    def __call__(self):
        for _ in range(ROUNDS):
            assert self.model.generate(**self.inputs, assistant_model=self.draft).tolist() == self.text
            assert self.draft.last_speculation.num_spec_steps > 0


def check_pair(pair):
    model = tiny_target("gemma3", attn_implementation="hf_longspec")
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    workers = Worker(model, pair[0], (33, 3, 13), 12), Worker(model, pair[1], (21, 8), 15)
    in_threads(*workers)
    assert model.config._attn_implementation == "hf_longspec"
    assert [len(module._forward_pre_hooks) for module in model.modules()] == hooks


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_two_drafts(pair, switching):
    check_pair(pair)


@pytest.mark.soak
@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("second", KINDS)
def test_every_pair(first, second, switching, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROUNDS", 40)
    check_pair((first, second))
