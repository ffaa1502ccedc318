"""Errors, forks, ends, and changes of target and draft while a Batcher lives."""

import weakref

import pytest
import torch
from transformers import LogitsProcessorList

from hf_longspec import Batcher, NgramDraftModel, PlainDraftModel, PrefixCache
from hf_longspec.batching.slots import RowSession, SlotSession
from hf_longspec.generation.sampling import TokenRule
from tests.modeling.calls import NEVER
from tests.modeling.test_contract import draft_of
from tests.test_batching import SAMPLED, VOCAB, Gate, Raises, Stateful, Tokens, alone, prompt
from tests.tiny_targets import tiny_target

HOW = {"max_new_tokens": 14, "eos_token_id": NEVER, "pad_token_id": 0}


@pytest.fixture(autouse=True)
def without_a_gate(every_step_speculates):
    """Steps are compared."""


@pytest.fixture
def llama():
    """A model of its own, as it is changed."""
    return tiny_target("llama", vocab_size=VOCAB)


def counts_calls(calls):
    def hook_that_counts(module, args):
        calls.append(1)

    return hook_that_counts


def test_a_hook_of_later_is_refused_by_name_while_others_go_on(llama):
    gate, calls, draft = Gate(), [], NgramDraftModel.from_target(llama)
    with Batcher(llama, draft, rows=2, max_length=40) as batcher:
        running = batcher.submit(prompt(5), streamer=gate, **HOW)
        assert gate.reached.wait(30)
        hook = llama.model.layers[0].register_forward_pre_hook(counts_calls(calls))
        hooked = batcher.submit(prompt(6), **HOW)
        gate.opened.set()
        with pytest.raises(ValueError, match="hook_that_counts"):
            hooked.result()
        found = running.result()
        hook.remove()
        after = batcher.submit(prompt(6), **HOW).result()
    assert torch.equal(found, alone(llama, draft, prompt(5), **HOW))
    assert torch.equal(after, alone(llama, draft, prompt(6), **HOW))


def test_a_window_that_changes_is_that_of_requests_that_begin_later():
    model = tiny_target("mistral", vocab_size=VOCAB)
    draft, ids = NgramDraftModel.from_target(model), prompt(30)
    with Batcher(model, draft, rows=2, max_length=60) as batcher:
        before = batcher.submit(ids, **HOW).result()
        assert torch.equal(before, alone(model, None, ids, **HOW))
        model.config.sliding_window = 4
        expected = alone(model, None, ids, **HOW)
        assert not torch.equal(before, expected)
        assert torch.equal(batcher.submit(ids, **HOW).result(), expected)


@pytest.mark.parametrize("kind", ["longspec", None])
def test_caches_have_the_dtype_of_the_target_as_it_is(llama, kind):
    draft = None if kind is None else draft_of(kind, llama)
    with Batcher(llama, draft, rows=2, max_length=40) as batcher:
        for dtype in (torch.float32, torch.float64, torch.float32):
            llama.to(dtype)
            # in turn, as a change of the target is one of its running requests
            texts = [batcher.submit(prompt(length), **HOW).result() for length in (5, 8)]
            for text, length in zip(texts, (5, 8), strict=True):
                assert torch.equal(text, alone(llama, None, prompt(length), **HOW))
            session = batcher._session
            held = (*session.cache.entries().values(), *session.lent.entries().values())
            assert {entry.dtype for entry in held} == {dtype}


def test_settings_of_the_draft_are_those_of_the_beginning(llama):
    draft, gate = draft_of("longspec", llama), Gate()
    expected = alone(llama, draft, prompt(8), **HOW)
    steps = draft.last_speculation.emitted_per_step
    with Batcher(llama, draft, rows=2, max_length=40) as batcher:
        running = batcher.submit(prompt(5), streamer=gate, **HOW)
        assert gate.reached.wait(30)
        draft.generation_config.tree_widths[0] += 3
        gate.opened.set()
        later = batcher.submit(prompt(8), **HOW)
        assert torch.equal(later.result(), expected) and later.speculation.emitted_per_step == steps
        assert torch.equal(running.result(), alone(llama, None, prompt(5), **HOW))


def test_texts_are_remembered_by_the_draft_itself(llama):
    draft = NgramDraftModel.from_target(llama, ngram_memory=64)
    with Batcher(llama, draft, rows=1, max_length=40) as batcher:
        text = batcher.submit(prompt(5), **HOW).result()[0, 5:].tolist()
    assert list(draft.memory.index.text)[: len(text)] == text


class Fault(Exception):
    """Raised by nothing else."""


BAD, GOOD, LATER = 6, 11, 8  # lengths of prompts


def is_bad(row):
    return row is not None and len(row.prompts.texts[0]) == BAD


# Places of errors that concern one request: a method, and whether a call of it is for the bad request.
OF_ONE = {
    "its session": (RowSession, "make_drafter", lambda row, binding: is_bad(row)),
    "its prompt": (RowSession, "read", lambda row, size: is_bad(row)),
    "its first token": (RowSession, "seed", lambda row, tails: is_bad(row)),
    "its noise": (
        TokenRule,
        "advance",
        lambda rule, counts: rule.sequences.prompt_length == BAD and rule.sequences.lengths[0] > BAD + 3,
    ),
    "its text": (PrefixCache, "put", lambda prefixes, text, *_: text.shape[1] == BAD + 14),
}
# Errors of a whole step, and of the loop.
OF_ALL = {
    # the next prompt has been read by then, and waits for a slot
    "a step": (
        SlotSession,
        "iterate",
        lambda loop: any(is_bad(row) and row.sequences.lengths[0] > 9 for row in loop.slots),
    ),
    "a slot that is freed": (
        SlotSession,
        "put",
        lambda loop, place, row, *_: row is None and is_bad(getattr(loop, "slots", [None] * 9)[place]),
    ),
    "the attention": (SlotSession, "attention", lambda loop: any(map(is_bad, loop.slots))),
}


def failing(monkeypatch, place, error, times=1):
    """Let a method raise an error in the first calls that concern the bad request."""
    owner, name, concerns = place
    method, raised = getattr(owner, name), []

    def call(*args, **kwargs):
        if concerns(*args, **kwargs) and len(raised) < times:
            raised.append(1)
            raise error
        return method(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)
    return raised


@pytest.mark.parametrize("error", [Fault("here"), SystemExit("here")], ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("place", OF_ONE)
def test_an_error_of_one_request_ends_it_alone(llama, monkeypatch, place, error):
    raised = failing(monkeypatch, OF_ONE[place], error)
    with Batcher(llama, rows=2, max_length=40, prefixes=PrefixCache(llama, 10**7)) as batcher:
        good, stream = batcher.submit(prompt(GOOD), **HOW), Tokens()
        bad = batcher.submit(prompt(BAD), streamer=stream, **HOW)
        assert bad.exception(60) is error and raised and stream.has_ended
        assert torch.equal(good.result(60), alone(llama, None, prompt(GOOD), **HOW))
        for length in (BAD, LATER, GOOD):  # in both slots
            assert torch.equal(
                batcher.submit(prompt(length), **HOW).result(60), alone(llama, None, prompt(length), **HOW)
            )


@pytest.mark.parametrize("place", OF_ALL)
def test_an_error_of_a_step_ends_those_that_run_and_the_next_ones_go_on(llama, monkeypatch, place):
    error, draft = Fault("here"), draft_of("longspec", llama)
    raised = failing(monkeypatch, OF_ALL[place], error)
    gate = Gate()
    with Batcher(llama, draft, rows=2, max_length=60, chunk_size=8) as batcher:
        cache = weakref.ref(batcher._session.cache)
        running = batcher.submit(prompt(GOOD), streamer=gate, **HOW | {"max_new_tokens": 40})
        assert gate.reached.wait(60)
        bad = batcher.submit(prompt(BAD), **HOW)
        waiting = [batcher.submit(prompt(length), **HOW) for length in (LATER, BAD)]
        gate.opened.set()
        assert running.exception(60) is error and raised
        if place != "a slot that is freed":  # its text was complete
            assert bad.exception(60) is error
        for request, length in zip(waiting, (LATER, BAD), strict=True):
            assert torch.equal(request.result(60), alone(llama, draft, prompt(length), **HOW))
        assert cache() is None  # though there is the error


def test_a_loop_that_cannot_be_made_anew_fails_the_request_that_needs_it(llama, monkeypatch):
    error = Fault("here")
    with Batcher(llama, rows=2, max_length=40) as batcher:
        failing(monkeypatch, OF_ALL["a step"], error)
        assert batcher.submit(prompt(BAD), **HOW).exception(60) is error
        failing(monkeypatch, (SlotSession, "__init__", lambda *_: True), error)
        assert batcher.submit(prompt(LATER), **HOW).exception(60) is error
        assert torch.equal(batcher.submit(prompt(LATER), **HOW).result(60), alone(llama, None, prompt(LATER), **HOW))


def test_a_greedy_row_with_a_processor_beside_rows_that_are_drawn(llama):
    draft = draft_of("specattn", llama, acceptance="rejection")
    how = HOW | {"do_sample": False}
    with Batcher(llama, draft, rows=2, max_length=60) as batcher:
        gate = Gate()
        sampled = batcher.submit(prompt(5), streamer=gate, seed=1, **HOW | SAMPLED | {"max_new_tokens": 40})
        assert gate.reached.wait(60)
        greedy = [
            batcher.submit(prompt(7), logits_processor=LogitsProcessorList([one]), **how)
            for one in (Stateful(), Raises(99))
        ]
        gate.opened.set()
        expected = alone(llama, None, prompt(7), logits_processor=LogitsProcessorList([Stateful()]), **how)
        assert torch.equal(greedy[0].result(), expected)
        assert torch.equal(greedy[1].result(), alone(llama, None, prompt(7), **how))
        assert sampled.result().shape[1] == 45


def test_a_fork_is_told_to_make_a_batcher_of_its_own(llama):
    with Batcher(llama, rows=1, max_length=40) as batcher:
        here, batcher._process = batcher._process, -1  # as in a fork, where the thread of the model is not
        with pytest.raises(RuntimeError, match="Make a Batcher after the fork"):
            batcher.submit(prompt(5), **HOW)
        batcher.close()
        batcher._process = here
        assert batcher.submit(prompt(5), **HOW).result().shape[1] == 19


class Closes(Tokens):
    """Closes a Batcher at a token."""

    def __init__(self, batcher, cancel):
        super().__init__()
        self.batcher, self.cancel = batcher, cancel

    def put(self, value):
        super().put(value)
        if len(self.tokens) == 8:
            self.batcher.close(self.cancel)


@pytest.mark.parametrize("cancel", [False, True])
def test_a_streamer_may_close_the_batcher(llama, cancel):
    with Batcher(llama, rows=1, max_length=40) as batcher:
        stream = Closes(batcher, cancel)
        running = batcher.submit(prompt(5), streamer=stream, **HOW)
        waiting = batcher.submit(prompt(6), **HOW)
        batcher._thread.join(60)
        assert not batcher._thread.is_alive() and stream.has_ended
        with pytest.raises(ValueError, match="closed"):
            batcher.submit(prompt(5), **HOW)
    assert running.cancelled() is waiting.cancelled() is cancel
    if not cancel:
        assert torch.equal(running.result(), alone(llama, None, prompt(5), **HOW))
        assert torch.equal(waiting.result(), alone(llama, None, prompt(6), **HOW))


def test_a_sampled_text_is_that_of_its_seed_after_a_prefix_that_was_read_before(llama):
    draft, ids, how = draft_of("specattn", llama), prompt(29), HOW | SAMPLED
    longer = torch.cat([ids, prompt(5)], 1)
    with Batcher(llama, draft, rows=2, max_length=60, prefixes=PrefixCache(llama, 10**8)) as batcher:
        batcher.submit(ids, seed=1, **how).result()
        again = batcher.submit(longer, seed=3, **how)
        assert torch.equal(again.result(), alone(llama, PlainDraftModel.from_target(llama), longer, 3, **how))
        assert again.reused >= 29
