"""The gate of the second call and of those after it: what it begins with, and what it keeps alive."""

import gc
import weakref
from functools import partial

import pytest
import torch

from hf_longspec import LongSpecDraftModel, SpecAttnDraftModel
from hf_longspec.generation.special_cases import gate as module
from hf_longspec.generation.special_cases.costs import Costs
from hf_longspec.generation.special_cases.gate import SpeculationGate, gate_of
from hf_longspec.generation.target import TargetView
from tests.tiny_targets import RandomTreeDraftModel, generate, tiny_target
from tests.user_objects import Recorder
from tests.watching import after, before

generate = partial(generate, lengths=(21,), max_new_tokens=40)


@pytest.fixture
def gates(monkeypatch):
    """Pairs of the gate of each call and the one that it continues. Drafting steps take ten times as long as others."""
    made, now = [], [0.0]

    def make(drafter, costs_of, ranks, sizes, last):
        made.append((gate_of(drafter, costs_of, ranks, sizes, last), last))
        propose = type(drafter).propose
        monkeypatch.setattr(
            drafter, "propose", lambda root: now.__setitem__(0, now[0] + 10.0) or propose(drafter, root)
        )
        return made[-1][0]

    def clock(view):
        now[0] += 1.0
        return now[0]

    monkeypatch.setattr(module, "gate_of", make)
    monkeypatch.setattr(TargetView, "clock", clock)
    return made


def useless(model):
    """A draft whose tokens are noise."""
    draft = RandomTreeDraftModel.from_target(model)
    draft.num_nodes, draft.luck = 5, 0.0
    return draft


@pytest.mark.parametrize(("tau", "first"), [(None, 0.6), (1.0, 0.0), (2.5, 0.6), (5.0, 0.8)])
def test_the_first_call_begins_with_the_tau_of_the_config(gates, tmp_path, tau, first):
    model = tiny_target("llama")
    draft = LongSpecDraftModel.from_target(model, mean_acceptance_length=tau)
    draft.save_pretrained(tmp_path)
    generate(model, LongSpecDraftModel.from_pretrained(tmp_path))
    assert gates[0][0].chances.first == pytest.approx(first)


def test_the_second_call_begins_with_what_is_known(gates):
    model = tiny_target("llama")
    draft = useless(model)
    expected = generate(model)
    assert torch.equal(generate(model, draft), expected)
    first = draft.last_speculation
    assert 0 < first.num_spec_steps <= 3 and first.speedup < 1
    assert torch.equal(generate(model, draft), expected)
    second = draft.last_speculation
    assert second.num_spec_steps <= 1 and second.num_plain_steps >= 38
    assert gates[1][0] is gates[1][1] is gates[0][0]


def test_drafts_of_a_method_share_the_costs_of_a_target(monkeypatch):
    """Others have their own, as methods read more or less of a verification."""
    model, known = tiny_target("llama"), []
    before(
        monkeypatch, Costs, "__init__", lambda _, earlier=None, **__: earlier and known.append(bool(earlier.samples()))
    )
    begins_with_costs = []
    for draft in (useless(model), useless(model), SpecAttnDraftModel.from_target(model)):
        known.clear()
        generate(model, draft)
        begins_with_costs.append(known[0])
    assert begins_with_costs == [False, True, False]


def test_a_call_of_another_kind_has_a_gate_of_its_own(gates):
    model = tiny_target("llama")
    draft = useless(model)
    generate(model, draft)
    for options in ({"lengths": (21, 9)}, {"do_sample": True}):
        generate(model, draft, **options)
    draft.num_nodes = 6
    generate(model, draft)
    generate(tiny_target("llama"), draft)
    assert [last for _, last in gates] == [None] * 5
    draft.num_nodes = 5
    generate(model, draft)
    assert gates[-1][1] is gates[0][0]


def test_a_kept_gate_keeps_neither_the_cache_nor_the_models(monkeypatch):
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
    references = weakref.ref(model), weakref.ref(draft)
    del model, kept
    gc.collect()
    assert references[0]() is None and not module._kept[draft]
    del draft
    gc.collect()
    assert references[1]() is None


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
    assert len({id(gate) for gate, _ in gates}) == 2 and [last for _, last in gates] == [None, gates[0][0], None]
