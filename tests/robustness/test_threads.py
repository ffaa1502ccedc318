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
from tests.tiny_targets import generate, tiny_prompts, tiny_target

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


@pytest.mark.parametrize(
    ("pair", "implementation"), [*zip(PAIRS, ("hf_longspec", "sdpa", "eager"), strict=True)], ids=str
)
def test_two_drafts(pair, implementation, switching):
    """The implementation of a target that was loaded by default is switched, for one call at a time."""
    model = tiny_target("gemma3", attn_implementation=implementation)
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]

    def worker(kind, lengths):
        draft, expected = make_draft(kind, model), generate(tiny_target("gemma3"), lengths=lengths).tolist()

        def work():
            for _ in range(ROUNDS):
                assert generate(model, draft, lengths).tolist() == expected
                assert draft.last_speculation.num_spec_steps > 0

        return work

    in_threads(worker(pair[0], (33, 3, 13)), worker(pair[1], (21, 8)))
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
