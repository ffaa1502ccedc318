"""The setting `gate`, and the warning that a user gets."""

import time
from types import SimpleNamespace

import pytest
import torch
from torch import distributed

from hf_longspec.generation.checks import check_flags
from hf_longspec.generation.drafter import Drafter
from hf_longspec.generation.gate import PLAIN, SpeculationGate, gate_of, message_of
from hf_longspec.generation.parallel import Ranks
from hf_longspec.generation.stats import GateDecision


class Chain(Drafter):
    num_nodes, max_depth = 5, 4


BINDING = SimpleNamespace(target=SimpleNamespace(clock=time.perf_counter))


class TestSetting:
    @pytest.mark.parametrize("value", ["auto", 1, None])
    def test_values_that_are_no_bool_are_refused(self, value):
        with pytest.raises(ValueError, match=r"gate=.*: expected True or False\. True switches speculation off"):
            check_flags({"gate": value, "check_target": True}.get)
        with pytest.raises(ValueError, match=r"check_target=.*: expected True or False"):
            check_flags({"gate": True, "check_target": value}.get)

    def test_a_drafter_of_the_root_alone_has_no_gate(self):
        chain = Chain(BINDING)
        gate = gate_of(True, chain, None)
        assert type(gate) is SpeculationGate and gate.tuner.arms[0].most_tokens == 5
        assert gate_of(False, chain, None) is gate_of(True, Drafter(BINDING), None) is None
        assert gate.shadow is None
        chain.can_shadow = True
        assert gate_of(True, chain, None).shadow is not None


def test_processes_without_a_sharded_target_decide_alone(monkeypatch):
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_rank", lambda group: 0)
    monkeypatch.setattr(distributed, "get_world_size", lambda group=None: 2)
    pair = Ranks("pair", torch.device("cpu"))
    assert gate_of(True, Chain(BINDING), None).ranks is None
    assert gate_of(True, Chain(BINDING), pair).ranks is pair
    # two groups of two ranks
    monkeypatch.setattr(distributed, "get_world_size", lambda group=None: 4 if group is None else 2)
    assert gate_of(True, Chain(BINDING), pair) is None


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_first_rank_follows_shadow_drafts(rank):
    asked = []
    gate = SpeculationGate(Chain(BINDING).trees, shadow=SimpleNamespace(follow=asked.append, is_due=lambda now: False))
    gate.ranks, gate._verdict = SimpleNamespace(rank=rank), PLAIN
    gate.follow([[7]], None)
    assert asked == ([[[7]]] if rank == 0 else [])


def test_a_bound_that_was_never_tried_is_called_that():
    bound = message_of(GateDecision("plain", 1024, 50.0, 50.2, 0.0))
    assert "at most 50.2 tokens/s if every draft were accepted, 50 without" in bound
