"""Which gate a call gets, and what a user is told."""

from types import SimpleNamespace

import pytest

from hf_longspec.generation.drafters.base import Drafter
from hf_longspec.generation.gating import OpenGate, SharedGate, check_gate, gate_of, warning_of
from hf_longspec.generation.speculation_gate import SpeculationGate
from hf_longspec.generation.stats import GateDecision
from hf_longspec.testing_drafts import ungated


class TestSetting:
    @pytest.mark.parametrize("value", ["auto", "on", 1, 0, None])
    def test_what_is_no_bool_is_refused(self, value):
        with pytest.raises(ValueError, match=r"gate=.*: expected True or False\. True switches speculation off"):
            check_gate(value)

    def test_what_has_nothing_to_gate_or_shall_not_be_gated_is_open(self):
        class Chain(Drafter):
            num_nodes, max_depth = 5, 4

        chain = Chain(None)
        assert type(gate_of(True, chain, None)) is SpeculationGate
        assert gate_of(True, chain, None)._trees.contenders[0].most_tokens == 5
        assert type(gate_of(False, chain, None)) is type(gate_of(True, Drafter(None), None)) is OpenGate
        assert gate_of(True, chain, None)._rehearsal is None
        chain.can_rehearse = True
        assert gate_of(True, chain, None)._rehearsal is not None
        assert type(ungated(True, chain, None)) is OpenGate


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_first_rank_rehearses(rank):
    asked = []

    class Asked(OpenGate):
        def rehearse(self, emitted, propose):
            asked.append((emitted, propose))

    SharedGate(Asked(), SimpleNamespace(rank=rank)).rehearse([[7]], None)
    assert asked == ([([[7]], None)] if rank == 0 else [])


def test_a_bound_that_was_never_tried_is_called_that():
    bound = warning_of(GateDecision("plain", 1024, 50.0, 50.2, 0.0))
    assert "cannot pay here and is not tried" in bound and "at most 50.2 tokens/s" in bound
