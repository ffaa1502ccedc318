"""The gate of the second call and of those after it: what it begins with, what it loses, and what it keeps alive."""

import gc
import weakref
from functools import partial

import pytest
import torch

from hf_longspec.generation.special_cases import gate as module
from hf_longspec.generation.special_cases.gate import DRAFT, PLAIN, SpeculationGate
from tests.generation.made_up_machine import Machine, always, gates_on_a_clock, geometric
from tests.tiny_targets import RandomTreeDraftModel, generate, tiny_target
from tests.user_objects import Recorder
from tests.watching import after, before

CALLS, TOKENS, COST = 50, 100, 1.6


def run_call(machine):
    """Run one call, and return its seconds and tokens."""
    started, machine.emitted, machine.length, machine.resting = machine.now, 0, 1024, False
    machine.run(TOKENS)
    machine.gate.release()
    machine.gate.resume(lambda: float("inf"), lambda: machine.now)
    return machine.now - started, machine.emitted


@pytest.mark.parametrize(("rate", "best"), [(0.85, DRAFT), (0.02, PLAIN)])
def test_short_calls_lose_at_most_two_per_cent_from_the_third_on(rate, best):
    """Against the better of two ways: all plain, or all with the tokens that drafting steps emitted here."""
    drafted = []
    accepted = geometric(rate)
    machine = Machine(always(COST), lambda own: drafted.append(accepted(own)) or drafted[-1])
    calls = [run_call(machine) for _ in range(CALLS)]
    seconds, tokens = (sum(values) for values in zip(*calls[2:], strict=True))
    per_token = {DRAFT: COST * len(drafted) / sum(drafted), PLAIN: 1.0}
    assert min(per_token, key=per_token.get) == best
    assert seconds / tokens <= 1.02 * per_token[best]
    assert calls[0][0] > calls[-1][0]  # the first call pays for its measurements


@pytest.fixture
def gates(monkeypatch):
    """The gates of all calls, on a clock on which plain steps take a second and drafting ones ten."""
    return gates_on_a_clock(monkeypatch, lambda gate, step: 1.0 if gate.choice == PLAIN else 10.0, keep=True)


generate = partial(generate, lengths=(21,), max_new_tokens=40)


def useless(model):
    """A draft whose tokens are noise."""
    draft = RandomTreeDraftModel.from_target(model)
    draft.num_nodes, draft.luck = 5, 0.0
    return draft


def test_the_second_call_begins_with_the_better_choice(gates):
    model = tiny_target("llama")
    draft = useless(model)
    expected = generate(model)
    assert torch.equal(generate(model, draft), expected)
    first = draft.last_speculation
    assert first.num_spec_steps > 0 and first.gate_decisions[-1].choice == PLAIN
    assert torch.equal(generate(model, draft), expected)
    second = draft.last_speculation
    assert second.num_spec_steps == 0 and second.num_plain_steps == 39
    assert [decision.choice for decision in second.gate_decisions] == [PLAIN]
    assert gates[1][1] is gates[0][0]


def test_a_call_of_another_kind_has_a_gate_of_its_own(gates):
    model = tiny_target("llama")
    draft = useless(model)
    generate(model, draft)
    others = ({"lengths": (21, 9)}, {"do_sample": True}, {"max_new_tokens": 50})
    for options in others:
        generate(model, draft, **options)
    draft.num_nodes = 6
    generate(model, draft)
    generate(tiny_target("llama"), draft)
    assert [known for _, known in gates] == [None] * 6
    draft.num_nodes = 5
    generate(model, draft)
    assert gates[-1][1] is gates[0][0]


def test_a_kept_gate_keeps_neither_the_cache_nor_the_draft(monkeypatch):
    model = tiny_target("llama")
    draft = useless(model)
    caches = []
    before(monkeypatch, type(draft), "make_drafter", lambda _, binding: caches.append(weakref.ref(binding.cache)))
    generate(model, draft)
    draft.verifications.clear()
    gc.collect()
    assert len(caches) == 1 and caches[0]() is None
    (kept,) = module._kept[draft][model].values()
    assert type(kept) is SpeculationGate
    reference = weakref.ref(draft)
    del draft, kept
    gc.collect()
    assert reference() is None


def test_two_calls_at_a_time_do_not_share_a_gate(gates, monkeypatch):
    """The third call begins while the second one is running, which has the gate of the first."""
    model = tiny_target("llama", attn_implementation="hf_longspec")  # which is a part of the kind
    draft = useless(model)
    generate(model, draft)
    inner, streamer = [], Recorder()
    # the prompt comes first, before the call has a gate
    begin = lambda *_: len(streamer.puts) == 3 and inner.append(generate(model, draft))  # noqa: E731
    after(monkeypatch, streamer, "put", begin)
    outer = generate(model, draft, streamer=streamer)
    assert torch.equal(outer, inner[0])
    assert len({id(gate) for gate, _ in gates}) == 2 and [known for _, known in gates] == [None, gates[0][0], None]
