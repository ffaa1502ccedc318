"""Two threads generate at once on one model, and a draft begins or ends within a stock forward."""

import contextlib
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hf_longspec.generation.target import TargetView
from tests.pairwise import pairwise
from tests.robustness.drafts import make_draft
from tests.rounding import rounding
from tests.tiny_targets import tiny_prompts, tiny_target

NEVER = 1
ROUNDS = 2
PAIRS = [("specattn", "longspec"), ("tokenswift", "partial"), ("tokenswift", "plain")]


@pytest.fixture
def switching():
    """Let threads change places as often as the interpreter can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def in_threads(*works):
    """Run functions at once, each in a thread of its own; an exception of any is raised."""
    barrier = threading.Barrier(len(works))
    with ThreadPoolExecutor(len(works)) as pool:
        for run in [pool.submit(lambda work=work: (barrier.wait(), work())) for work in works]:
            run.result()


class Worker:
    """One thread's prompts, draft and expected text."""

    def __init__(self, model, kind, lengths, new):
        input_ids, attention_mask = tiny_prompts(model.config.vocab_size, lengths, seed=len(lengths))
        self.inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "max_new_tokens": new}
        self.inputs |= {"do_sample": False, "eos_token_id": NEVER, "pad_token_id": NEVER}
        self.model, self.draft = model, make_draft(kind, model)
        self.text = tiny_target("gemma3").generate(**self.inputs).tolist()

    def __call__(self):
        for _ in range(ROUNDS):
            assert self.model.generate(**self.inputs, assistant_model=self.draft).tolist() == self.text
            assert self.draft.last_speculation.num_spec_steps > 0


@pytest.mark.parametrize(("pair", "implementation"), zip(PAIRS, ("hf_longspec", "sdpa", "eager"), strict=True), ids=str)
def test_two_drafts(pair, implementation, switching):
    """The implementation of a target that was loaded by default is switched, for one call at a time."""
    model = tiny_target("gemma3", attn_implementation=implementation)
    workers = Worker(model, pair[0], (33, 3, 13), 12), Worker(model, pair[1], (21, 8), 15)
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    in_threads(*workers)
    assert model.config._attn_implementation == implementation
    assert [len(module._forward_pre_hooks) for module in model.modules()] == hooks


@pytest.mark.parametrize(
    ("implementation", "event", "lengths"), pairwise(("sdpa", "eager"), ("begins", "ends"), ((21,), (21, 8))), ids=str
)
def test_a_draft_begins_or_ends_within_a_stock_forward(implementation, event, lengths):
    """Between the masks and the first layer: what was made under one implementation is read by the other."""
    model = tiny_target("gemma3", attn_implementation=implementation)
    input_ids, mask = tiny_prompts(model.config.vocab_size, lengths)
    with torch.no_grad():
        with TargetView(model).attention():
            pass  # the trial of the first call has forwards of its own
        expected = model(input_ids, attention_mask=mask).logits
        calls, switched = [], contextlib.ExitStack()

        def switch(*_):
            calls.append(switched.close() if event == "ends" else enter())

        def enter():
            switched.enter_context(TargetView(model).attention())

        with model.model.layers[0].register_forward_pre_hook(switch), switched:
            if event == "ends":
                enter()
            logits = model(input_ids, attention_mask=mask).logits
    assert len(calls) == 1
    torch.testing.assert_close(logits[mask.bool()], expected[mask.bool()], **rounding(expected, layers=3))
