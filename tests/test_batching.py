"""Rows that join and leave a batch: each text is that of `generate` alone, and what befalls a row befalls no other."""

import gc
import os
import random
import threading
import time
from concurrent.futures import CancelledError
from itertools import count as numbers

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from hf_longspec import (
    Batcher,
    Drafter,
    LongSpecDraftModel,
    NgramDraftModel,
    PlainDraftModel,
    PrefixCache,
    TokenSwiftDraftModel,
)
from hf_longspec.batching import slots
from hf_longspec.generation import target as of_target
from hf_longspec.generation.cache import CACHE_NAME, SpeculativeCache
from hf_longspec.generation.sequences import SpeculationStats
from hf_longspec.generation.target import TargetView
from hf_longspec.modeling.register_draft import DRAFTS
from tests.gates import FlippingGate
from tests.modeling.calls import NEVER
from tests.modeling.test_contract import NGRAMS, PARTIAL, draft_of
from tests.pairwise import few, pairwise, soaked
from tests.robustness.enumeration import build
from tests.tiny_targets import tiny_target
from tests.watching import before as called_before

VOCAB = 12
GREEDY = {"do_sample": False}
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 8}
OTHERS = {"do_sample": True, "temperature": 1.2, "repetition_penalty": 1.1, "top_p": 0.9}
# Settings of the requests of a test, in turn. Rows of the same settings are processed together, others row by row.
MIXES = {"greedy": [GREEDY], "sampled": [SAMPLED], "mixed": [GREEDY, SAMPLED, OTHERS]}
HOW_LONG = {"eos_token_id": NEVER, "pad_token_id": 0}
LENGTHS, NEW = (21, 3, 13, 1, 30), (12, 17, 5, 9, 1)
KINDS = [
    (None, {}),
    ("longspec_ngram", {}),
    ("longspec", {}),
    ("specattn", {}),
    ("longspec_eagle3", NGRAMS),
    ("tokenswift", PARTIAL | {"partial_kv_budget": 19}),
    ("specattn", {"acceptance": "rejection"}),
]


@pytest.fixture(autouse=True)
def without_a_gate(every_step_speculates):
    """Steps are compared."""


@pytest.fixture(scope="module")
def llama():
    return tiny_target("llama", vocab_size=VOCAB)


@pytest.fixture(scope="module")
def plain(llama):
    return PlainDraftModel.from_target(llama)


def prompt(length, seed=0):
    return torch.randint(4, VOCAB, (1, length), generator=torch.Generator().manual_seed(seed + length))


def alone(model, draft, ids, seed=0, **settings):
    """The text of `generate` for one prompt."""
    torch.manual_seed(seed)
    return model.generate(ids, assistant_model=draft, **{"pad_token_id": 0} | settings)


def requests(mix):
    return [
        (prompt(length), {"max_new_tokens": new, "eos_token_id": NEVER, "pad_token_id": 0, **mix[row % len(mix)]})
        for row, (length, new) in enumerate(zip(LENGTHS, NEW, strict=True))
    ]


def check_requests(model, draft, mix, rows):
    """Texts and steps of all requests are those of `generate` for each alone."""
    beside = draft or PlainDraftModel.from_target(model)
    made = []
    with pytest.MonkeyPatch.context() as patch:
        called_before(patch, Batcher, "_begun", made.append)
        with Batcher(model, draft, rows=rows, max_length=50, chunk_size=8) as batcher:
            futures = [batcher.submit(ids, seed=row, **how) for row, (ids, how) in enumerate(requests(mix))]
    assert len(made) == 1  # nothing made it anew
    for row, (ids, how) in enumerate(requests(mix)):
        torch.manual_seed(row)
        assert torch.equal(futures[row].result(), model.generate(ids, assistant_model=beside, **how)), row
        found, expected = futures[row].speculation, beside.last_speculation
        assert found.emitted_per_step == expected.emitted_per_step, row
        assert found.num_accepted_ngram_tokens == expected.num_accepted_ngram_tokens
    return beside


# Every draft of the package in soak tests, some of it in all.
CASES = few(pairwise(KINDS, ("llama", "gemma3"), ("greedy", "mixed", "sampled"), (1, 3)), 9)
OTHERS_OF = [(kind, {}) for kind in DRAFTS]
OTHERS_OF += [("longspec_assistant", NGRAMS | {"tree_widths": [4]}), ("longspec_eagle3", {"num_hidden_layers": 2})]
OTHERS_OF += [("tokenswift", PARTIAL | NGRAMS)]
CASES += soaked((kind, name, "mixed", 2) for kind in OTHERS_OF for name in ("gemma3", "llama"))


@pytest.mark.parametrize(("kind", "name", "mix", "rows"), CASES, ids=str)
def test_texts_and_steps_are_those_of_generate_alone(kind, name, mix, rows):
    model = tiny_target(name, vocab_size=VOCAB)
    check_requests(model, None if kind[0] is None else draft_of(kind[0], model, **kind[1]), MIXES[mix], rows)


# Gated delta rule, Mamba-2, Mamba-2 beside keys, Mamba-1: one in every run.
HYBRIDS = [("qwen3_5_text", "longspec_ngram"), ("qwen3_5_text", "longspec_assistant")]
HYBRIDS += [
    pytest.param(name, kind, marks=pytest.mark.soak)
    for name in ("qwen3_5_text", "granitemoehybrid", "falcon_h1", "jamba")
    for kind in ("specattn", "longspec_assistant")
    if (name, kind) not in HYBRIDS
]


@pytest.mark.parametrize(("name", "kind"), HYBRIDS)
def test_targets_with_recurrent_states(name, kind):
    model = build(name, 0)
    check_requests(model, draft_of(kind, model), MIXES["mixed"], 2)


SYSTEM, QUESTION, PLENTY = 29, 5, 10**8


AGENTS = [("llama", "longspec_ngram"), *soaked([("gemma3", "longspec_eagle3")]), HYBRIDS[0], *HYBRIDS[2:-2]]


@pytest.mark.parametrize(("name", "kind"), AGENTS)
def test_agents_that_alternate_read_new_tokens_alone(name, kind, monkeypatch):
    """Three of them in two rows, with prompts of their own, over three turns; then another question to each.

    States are continued at the ends of texts and chunks.
    """
    model = tiny_target(name, vocab_size=VOCAB) if name in ("llama", "gemma3") else build(name, 0)
    draft, prefixes, read = draft_of(kind, model), PrefixCache(model, PLENTY), []
    called_before(monkeypatch, TargetView, "prefill", lambda view, tokens, *args: read.append(tokens.shape[1]))
    examined, each = [], 1 + (kind == "longspec_assistant")  # the assistant is examined, too
    called_before(monkeypatch, of_target, "known_of", lambda *_: examined.append(threading.current_thread().name))
    starts = [prompt(SYSTEM, 100 * agent + 1) for agent in range(3)]
    texts, how = starts, GREEDY | {"max_new_tokens": 7, "eos_token_id": NEVER}
    end_of_chunk = SYSTEM // 8 * 8 if TargetView(model).has_states else SYSTEM
    with Batcher(model, draft, rows=2, max_length=80, chunk_size=8, prefixes=prefixes) as batcher:
        for turn in range(4):
            # texts of the last turn begin as those of the first one, and go on otherwise
            questions = [prompt(QUESTION, 10 * turn + agent) for agent in range(3)]
            if turn == 3:
                texts, questions = starts, [torch.full_like(question, 3) for question in questions]
            prompts = [torch.cat(pair, 1) for pair in zip(texts, questions, strict=True)]
            read.clear()
            futures = [batcher.submit(text, **how) for text in prompts]
            texts = [future.result() for future in futures]
            # once in the turn of each request, and before each of at most three moves to loops of more or fewer rows
            assert not turn or 3 * each <= examined.count("hf_longspec.Batcher") <= 6 * each
            examined.clear()
            reused = {0: 0, 3: end_of_chunk}.get(turn, prompts[0].shape[1] - QUESTION - 1)
            assert [future.reused for future in futures] == [reused] * 3
            assert sum(read) <= 3 * (prompts[0].shape[1] - reused)
            for text, out in zip(prompts, texts, strict=True):
                # without a mask, plain generate takes the generated 0 for padding
                assert torch.equal(out, alone(model, None, text, attention_mask=torch.ones_like(text), **how))
    assert len(prefixes) == 6


def test_requests_that_do_not_end_well_store_nothing(llama):
    """Cancelled in a slot, or failed; texts that end with their first token are stored."""
    ids, how = prompt(SYSTEM), GREEDY | {"eos_token_id": NEVER}
    prefixes, longer = PrefixCache(llama, PLENTY), torch.cat([ids, prompt(QUESTION)], 1)
    with Batcher(llama, rows=2, max_length=400, chunk_size=8, prefixes=prefixes) as batcher:
        stream = Tokens()
        running = batcher.submit(ids, streamer=stream, max_new_tokens=300, **how)
        failing = batcher.submit(longer, logits_processor=LogitsProcessorList([Raises(40)]), max_new_tokens=20, **how)
        with pytest.raises(RuntimeError, match="no more"):
            failing.result()
        assert running.cancel() and len(stream.tokens) >= SYSTEM
        again = batcher.submit(longer, max_new_tokens=1, **how)
        assert again.result().shape == (1, SYSTEM + QUESTION + 1) and again.reused == 0 and len(prefixes) == 1
        last = batcher.submit(longer, max_new_tokens=9, **how)
        assert torch.equal(last.result(), alone(llama, None, longer, max_new_tokens=9, **how))
        assert last.reused == SYSTEM + QUESTION - 1
    other = tiny_target("gemma3", vocab_size=VOCAB)
    with pytest.raises(ValueError, match="prefixes: a PrefixCache of another model"):
        Batcher(other, prefixes=prefixes)


class Tokens(BaseStreamer):
    """Keeps what it gets; may raise at a token."""

    def __init__(self, fails_at=None):
        self.tokens, self.has_ended, self.fails_at, self.times = [], False, fails_at, []

    def put(self, value):
        self.tokens += value.flatten().tolist()
        self.times.append(time.perf_counter())
        if self.fails_at is not None and len(self.tokens) > self.fails_at:
            raise RuntimeError("the client has left")

    def end(self):
        self.has_ended = True


def test_streams_stop_strings_and_criteria_are_those_of_each_request(llama, plain, tokenizer):
    model = tiny_target("llama", vocab_size=len(tokenizer))
    how = {"max_new_tokens": 24, "eos_token_id": NEVER}
    ids = tokenizer("one two", return_tensors="pt")["input_ids"]
    text = tokenizer.decode(alone(model, None, ids, **how)[0, ids.shape[1] + 6 : ids.shape[1] + 8])
    stopped = how | {"stop_strings": [text], "tokenizer": tokenizer}
    streams = [Tokens(), Tokens()]
    with Batcher(model, rows=2, max_length=60) as batcher:
        futures = [
            batcher.submit(ids, streamer=stream, **of) for stream, of in zip(streams, (how, stopped), strict=True)
        ]
        results = [future.result() for future in futures]
    draft = PlainDraftModel.from_target(model)
    for result, stream, of in zip(results, streams, (how, stopped), strict=True):
        assert torch.equal(result, alone(model, draft, ids, **of))
        assert stream.tokens == result[0].tolist() and stream.has_ended
    assert results[1].shape[1] < results[0].shape[1]


class Raises(LogitsProcessor):
    """Raises after some tokens."""

    stateless = True

    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] >= self.length:
            raise RuntimeError("no more")
        return scores


class Nan(Raises):
    """Gives NaN after some tokens."""

    def __call__(self, input_ids, scores):
        return scores * torch.nan if input_ids.shape[1] >= self.length else scores


class Refuses(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        if input_ids.shape[1] >= 9:
            raise RuntimeError("no more")
        return torch.zeros(len(input_ids), dtype=torch.bool)


FAILURES = {
    "a processor that raises": ({"logits_processor": LogitsProcessorList([Raises(9)])}, "no more"),
    "scores that are nan": (SAMPLED | {"logits_processor": LogitsProcessorList([Nan(9)])}, "cannot be sampled"),
    "a criterion that raises": ({"stopping_criteria": [Refuses()]}, "no more"),
    "a streamer that raises": ({"streamer": Tokens(fails_at=8)}, "the client has left"),
}


def test_a_request_that_fails_ends_alone(llama):
    draft = draft_of("longspec", llama)
    how = {"max_new_tokens": 20, "eos_token_id": NEVER, "pad_token_id": 0}
    with Batcher(llama, draft, rows=2, max_length=40) as batcher:
        for name, (settings, message) in FAILURES.items():
            good = batcher.submit(prompt(11), **how)
            bad = batcher.submit(prompt(6), **how | settings)
            with pytest.raises(RuntimeError, match=message):
                bad.result()
            assert torch.equal(good.result(), alone(llama, draft, prompt(11), **how)), name
        assert not batcher._running


class Gate(BaseStreamer):
    """Lets the first token of a request wait until it is opened."""

    def __init__(self):
        self.opened, self.reached, self.count, self.has_ended = threading.Event(), threading.Event(), 0, False

    def put(self, value):
        self.count += 1
        if self.count == 3:  # the prompt, the first token, one of a step
            self.reached.set()
            assert self.opened.wait(30)

    def end(self):
        self.has_ended = True


def test_a_cancelled_request_frees_its_slot_before_the_next_step(llama, monkeypatch):
    gate, how = Gate(), {"max_new_tokens": 200, "eos_token_id": NEVER}
    with Batcher(llama, rows=1, max_length=300) as batcher:
        steps = []
        called_before(monkeypatch, slots.SlotSession, "iterate", lambda session: steps.append(session.slots[0]))
        running = batcher.submit(prompt(5), streamer=gate, **how)
        waiting = batcher.submit(prompt(6), **how)
        after = batcher.submit(prompt(7), max_new_tokens=3, eos_token_id=NEVER)
        assert gate.reached.wait(30)
        assert waiting.cancel() and running.cancel()
        before = len(steps)
        gate.opened.set()
        assert after.result().shape[1] == 10
        assert gate.has_ended
        assert len(set(map(id, steps[before + 1 :]))) == 1  # of the last request alone
        for future in (running, waiting):
            with pytest.raises(CancelledError):
                future.result()


def test_requests_are_fair_by_arrival_and_prompts_are_read_in_chunks_between_steps(llama, monkeypatch):
    events = []

    def see(self, *args, run=slots.RowSession.read):
        for item in run(self, *args):
            events.append("chunk")
            yield item

    monkeypatch.setattr(slots.RowSession, "read", see)
    gate, how = Gate(), {"max_new_tokens": 40, "eos_token_id": NEVER}
    streams = [Tokens() for _ in range(3)]
    with Batcher(llama, rows=2, max_length=128, chunk_size=8) as batcher:
        called_before(monkeypatch, slots.SlotSession, "iterate", lambda _: events.append("step"))
        first = batcher.submit(prompt(3), streamer=gate, **how)
        assert gate.reached.wait(30)
        futures = [batcher.submit(prompt(50 - row), streamer=stream, **how) for row, stream in enumerate(streams)]
        del events[:]
        gate.opened.set()
        for future in (first, *futures):
            future.result()
    # while a row runs, a step comes after each chunk, but for the rest of a prompt, before which another is read
    running = "".join(event[0] for event in events[: events.index("chunk") + 2 * 7])
    assert running.count("c") >= 7 and "ccc" not in running and running.count("cc") <= 1
    begins = [stream.times[1] for stream in streams]
    assert begins == sorted(begins)


@pytest.mark.parametrize(
    ("kind", "sampled"), [(LongSpecDraftModel, False), (LongSpecDraftModel, True), (TokenSwiftDraftModel, True)]
)
def test_a_draft_with_some_of_the_tokens(llama, kind, sampled):
    """What it ranks are tokens of the target, whose noise and processors may differ between rows."""
    draft = kind.from_target(llama, draft_vocab_size=VOCAB // 2)
    draft.set_vocabulary(list(range(VOCAB // 2)), llama)
    how = {"max_new_tokens": 20, "eos_token_id": NEVER, "do_sample": sampled}
    ids = [prompt(length) for length in (25, 9)]
    expected = [alone(llama, draft, text, seed=row, **how) for row, text in enumerate(ids)]
    with Batcher(llama, draft, rows=2, max_length=64) as batcher:
        futures = [batcher.submit(text, seed=row, **how) for row, text in enumerate(ids)]
        assert all(torch.equal(future.result(), text) for future, text in zip(futures, expected, strict=True))


def test_short_prompts_take_their_slots_together(llama, monkeypatch):
    events = []
    take = Batcher._take_slot

    def see(self):
        before = len(self._running)
        take(self)
        events.extend(["slot"] * (len(self._running) - before))

    monkeypatch.setattr(Batcher, "_take_slot", see)
    gate, how = Gate(), {"max_new_tokens": 20, "eos_token_id": NEVER}
    with Batcher(llama, rows=4, max_length=64, chunk_size=16) as batcher:
        called_before(monkeypatch, slots.SlotSession, "iterate", lambda _: events.append("step"))
        first = batcher.submit(prompt(3), streamer=gate, **how)
        assert gate.reached.wait(30)
        futures = [batcher.submit(prompt(length), **how) for length in (4, 5, 6)]
        del events[:]
        gate.opened.set()
        for future in (first, *futures):
            future.result()
    assert "slot slot slot step" in " ".join(events)


def test_map_yields_in_order_and_reads_few_prompts_ahead(llama):
    taken = []

    def prompts():
        for length in (9, 2, 5, 7, 3, 4, 8, 6):
            taken.append(length)
            yield prompt(length)

    with Batcher(llama, rows=2, max_length=32) as batcher:
        results = batcher.map(prompts(), max_new_tokens=3, eos_token_id=NEVER)
        first = next(results)
        assert first.shape[1] == 12 and len(taken) == 4
        assert [out.shape[1] - 3 for out in results] == [2, 5, 7, 3, 4, 8, 6]
        results = batcher.map(prompts(), max_new_tokens=20, eos_token_id=NEVER)
        next(results)
        results.close()  # cancels what is ahead


def test_functions_run_alone_in_their_turn(llama):
    with Batcher(llama, rows=2, max_length=64) as batcher:
        before = batcher.submit(prompt(4), max_new_tokens=30, eos_token_id=NEVER)
        lone = batcher.run_alone(lambda: (before.done(), alone(llama, None, prompt(5), max_new_tokens=4)))
        after = batcher.submit(prompt(4), max_new_tokens=2)
        was_done, text = lone.result()
        assert was_done and torch.equal(text, alone(llama, None, prompt(5), max_new_tokens=4))
        assert after.result().shape[1] <= 6
        with pytest.raises(ZeroDivisionError):
            batcher.run_alone(lambda: 1 / 0).result()


REFUSED = {
    "no prompt": ({}, torch.zeros(1, 0), "expected one prompt"),
    "two prompts": ({}, torch.zeros(2, 3), "Submit prompts one by one"),
    "padding": ({"attention_mask": [[0, 1]]}, torch.ones(1, 2), "attention_mask has zeros"),
    "length": ({"max_new_tokens": 50}, torch.ones(1, 3), "max_length=40"),
    "beams": ({"num_beams": 2}, torch.ones(1, 3), "num_beams"),
    "sequences": ({"num_return_sequences": 2, "do_sample": True}, torch.ones(1, 3), "num_return_sequences=2"),
    "outputs": ({"return_dict_in_generate": True}, torch.ones(1, 3), "return_dict_in_generate=True"),
    "draft": ({"assistant_model": "ngram"}, torch.ones(1, 3), "assistant_model: the draft is that of the Batcher"),
}


def test_what_has_no_row_is_refused_by_name(llama):
    with Batcher(llama, rows=1, max_length=40) as batcher:
        for settings, ids, message in REFUSED.values():
            with pytest.raises(ValueError, match=message):
                batcher.submit(ids.long(), **{"max_new_tokens": 4} | settings)
        cache = SpeculativeCache(llama.config, 1, 40)
        with pytest.raises(ValueError, match="not supported in a Batcher"):
            batcher.submit(prompt(3), max_new_tokens=4, **{CACHE_NAME: cache}).result()
    with pytest.raises(ValueError, match="closed"):
        batcher.submit(prompt(3))
    for wrong in ({"rows": 0}, {"max_length": True}, {"chunk_size": 1}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}="):
            Batcher(llama, **wrong)


class Stateful(LogitsProcessor):
    """Forces a token in every fifth call."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return scores.index_fill(1, torch.tensor([7]), 1e4) if self.calls % 5 == 0 else scores


def test_processors_with_state_see_their_own_row(llama):
    how = {"max_new_tokens": 17, "do_sample": False, "eos_token_id": NEVER}
    with Batcher(llama, NgramDraftModel.from_target(llama), rows=2, max_length=60) as batcher:
        processors = [Stateful() for _ in range(3)]
        requests = [
            batcher.submit(prompt(3 + row), logits_processor=LogitsProcessorList([one]), **how)
            for row, one in enumerate(processors)
        ]
        for row, request in enumerate(requests):
            ids = prompt(3 + row)
            other = LogitsProcessorList([Stateful()])
            expected = llama.generate(ids, attention_mask=torch.ones_like(ids), logits_processor=other, **how)
            assert torch.equal(request.result(), expected) and (expected[0, 3 + row + 4 :: 5] == 7).all()
    assert [one.calls for one in processors] == [17] * 3


def test_drafters_that_do_not_say_their_state_are_refused(llama, monkeypatch):
    draft = draft_of("longspec", llama)
    monkeypatch.setattr(
        "hf_longspec.modeling.longspec.generation_longspec.LongSpecDrafter.row_states", Drafter.row_states
    )
    with pytest.raises(ValueError, match="LongSpecDrafter keeps state"):
        Batcher(llama, draft, rows=2, max_length=40)


def test_an_error_in_the_block_cancels_and_the_end_of_the_block_waits(llama):
    with Batcher(llama, rows=1, max_length=300) as batcher:
        waited = [batcher.submit(prompt(3), max_new_tokens=9, eos_token_id=NEVER) for _ in range(3)]
    assert all(future.done() and future.result().shape[1] == 12 for future in waited)
    futures = []

    def fail():
        with Batcher(llama, rows=1, max_length=300) as batcher:
            futures.extend(batcher.submit(prompt(3), max_new_tokens=250, eos_token_id=NEVER) for _ in range(3))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert futures[-1].cancelled()


def test_a_gate_that_pauses_the_draft_changes_no_text(monkeypatch):
    monkeypatch.setattr("hf_longspec.generation.special_cases.gate.gate_of", lambda drafter, *_: FlippingGate(drafter))
    model = tiny_target("llama", vocab_size=VOCAB)
    with Batcher(model, draft_of("longspec_eagle3", model), rows=2, max_length=50, chunk_size=8) as batcher:
        futures = [batcher.submit(ids, seed=row, **how) for row, (ids, how) in enumerate(requests(MIXES["mixed"]))]
    beside = PlainDraftModel.from_target(model)
    for row, (ids, how) in enumerate(requests(MIXES["mixed"])):
        assert torch.equal(futures[row].result(), alone(model, beside, ids, row, **how))


@pytest.mark.soak
def test_random_clients_cancels_and_failures_leave_no_memory(llama):
    """Objects after the first 200 requests are those after all, for SOAK_SECONDS."""
    draws, draft = random.Random(0), draft_of("longspec", llama)
    counts, expected = [], {}
    end = time.monotonic() + float(os.environ.get("SOAK_SECONDS", "60"))
    with Batcher(llama, draft, rows=4, max_length=64, chunk_size=8) as batcher:
        for number in numbers():
            if time.monotonic() > end and len(counts) > 5:
                break
            settings = draws.choice(
                [GREEDY, SAMPLED, OTHERS, *(of for of, _ in FAILURES.values() if "streamer" not in of)]
            )
            settings = {"max_new_tokens": draws.randint(1, 30), "eos_token_id": NEVER, "pad_token_id": 0} | settings
            request = batcher.submit(prompt(draws.randint(1, 30)), seed=1, **settings)
            if draws.random() < 0.2:
                threading.Timer(draws.random() / 10, request.cancel).start()
            expected[number] = request
            if number % 100 == 99:
                for one in expected.values():
                    one.exception() if not one.cancelled() else None
                expected.clear()
                del request, one
                batcher.run_alone(gc.collect).result()  # when all slots are free
                counts.append(sum(isinstance(x, torch.Tensor | SpeculationStats) for x in gc.get_objects()))
    assert max(counts[2:]) <= counts[1] + 50, counts


@pytest.mark.parametrize(
    "kind", [("longspec_ngram", {}), ("specattn", {}), ("tokenswift", PARTIAL), ("longspec_assistant", {})], ids=str
)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_step_computes_as_many_rows_as_there_are_requests(kind, name, monkeypatch):
    """Requests that run move to a loop of more rows when others come, and of fewer ones when these have ended."""
    monkeypatch.setattr("hf_longspec.generation.special_cases.gate.gate_of", lambda drafter, *_: FlippingGate(drafter))
    model = tiny_target(name, vocab_size=VOCAB)
    draft, sizes = draft_of(kind[0], model, **kind[1]), []
    called_before(monkeypatch, slots.SlotSession, "iterate", lambda session: sizes.append(len(session.slots)))
    moved = []

    def see(loop, row, *_):
        """The draft knows the text of a request that moves."""
        if kind[0] == "longspec_ngram":
            request = loop.slots[row]
            text = request.sequences.tokens[0, : request.sequences.lengths[0]].tolist()
            moved.append(loop.gated.indexes[row].text.tolist() == text)

    called_before(monkeypatch, slots.SlotSession, "hand_over", see)
    long, short = HOW_LONG | {"max_new_tokens": 150}, HOW_LONG | {"max_new_tokens": 8}
    gate = Gate()
    with Batcher(model, draft, rows=6, max_length=200) as batcher:
        first = batcher.submit(prompt(5), streamer=gate, seed=5, **long | SAMPLED)
        assert gate.reached.wait(60)
        at_first = set(sizes)
        others = [batcher.submit(prompt(6 + row), seed=6 + row, **short) for row in range(5)]
        gate.opened.set()
        beside = PlainDraftModel.from_target(model)
        for length, request in enumerate([first, *others], 5):
            how = long | SAMPLED if request is first else short
            assert torch.equal(request.result(60), alone(model, beside, prompt(length), length, **how)), length
    assert at_first <= {1} and max(sizes) == 6 and sizes[-1] == 1  # with all six, and with the last one
    assert set(sizes) <= {1, 2, 4, 6} and all(moved) and (moved or kind[0] != "longspec_ngram")
