"""Ranks of one sharded target take the same steps, in two gloo processes with different clocks."""

import random
from datetime import timedelta

import pytest
import torch
from torch import distributed, multiprocessing

from hf_longspec.generation import gate as gating
from hf_longspec.generation.drafter import Drafter, TreeShape
from hf_longspec.generation.gate import SharedGate, SpeculationGate, gate_of
from hf_longspec.generation.parallel import Ranks

STEPS = 120


class Chain(Drafter):
    num_nodes, max_depth = 5, 4


def choices(gate):
    """Return the decisions of a gate with the costs of its process's clock."""
    found = []
    for _ in range(STEPS):
        found.append((gate.speculates(), gate.tree))
        gate.record(2, 1, 100)
    return found


def noisy_gate(seed):
    """Return a gate with a clock of random steps, so that other seeds give other decisions."""
    numbers = random.Random(seed)
    now = 0.0

    def clock():
        nonlocal now
        now += numbers.expovariate(1.0)
        return now

    return SpeculationGate([TreeShape(str(depth), depth + 1, depth) for depth in (4, 2)], clock=clock)


def work(rank, path, answers):
    distributed.init_process_group(
        "gloo", init_method=f"file://{path}/meeting", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    gating.SpeculationGate = lambda *_: noisy_gate(rank)
    gate = gate_of(True, Chain(None), Ranks(None, torch.device("cpu")))
    answers.put((rank, type(gate).__name__, choices(gate)))
    distributed.barrier()
    distributed.destroy_process_group()


@pytest.mark.skipif(not distributed.is_available(), reason="torch without distributed")
def test_all_ranks_follow_the_decisions_of_rank_0(tmp_path):
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    ranks = [context.Process(target=work, args=(rank, str(tmp_path), answers)) for rank in range(2)]
    for process in ranks:
        process.start()
    found = sorted(answers.get() for _ in ranks)
    for process in ranks:
        process.join(60)
    assert [kind for _, kind, _ in found] == ["SharedGate", "SharedGate"]
    assert found[0][2] == found[1][2] == choices(noisy_gate(0))
    assert choices(noisy_gate(1)) != found[1][2]  # decisions of rank 1 alone


def test_processes_without_a_sharded_target_decide_alone(monkeypatch):
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_rank", lambda group: 0)
    monkeypatch.setattr(distributed, "get_world_size", lambda group=None: 2)
    pair = Ranks("pair", torch.device("cpu"))
    assert type(gate_of(True, Chain(None), None)) is SpeculationGate
    assert type(gate_of(True, Chain(None), pair)) is SharedGate
    # two groups of two ranks
    monkeypatch.setattr(distributed, "get_world_size", lambda group=None: 4 if group is None else 2)
    assert gate_of(True, Chain(None), pair) is None
