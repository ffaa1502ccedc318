"""The ranks of test_tensor_parallel.py, forks of the process of the tests."""

import json
import os
import random
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.generation.stopping_criteria import StoppingCriteria

from hf_longspec.generation.drafter import Drafter
from hf_longspec.generation.special_cases import gate
from hf_longspec.generation.special_cases.gate import SpeculationGate
from hf_longspec.generation.special_cases.parallel import Ranks
from tests.robustness.drafts import make_draft
from tests.tiny_targets import generate

RANKS, LENGTHS, NEW = 2, (33, 3, 13), 8
# Drafts that read nothing of the target, its scores, and its keys and values: chosen ones, and those of a layer.
KINDS = ("ngram", "specattn", "partial", "longspec")


class StopsOnTheFirstRank(StoppingCriteria):
    """As a clock may: one rank says stop, and the other does not."""

    def __call__(self, input_ids, scores, **kwargs):
        return torch.tensor([dist.get_rank() == 0 and input_ids.shape[1] >= max(LENGTHS) + 5])


class Chain(Drafter):
    num_nodes, max_depth = 5, 4


def choices(gate):
    """Return the decisions of a gate with the costs of its process's clock."""
    found = []
    for _ in range(120):
        found.append(gate.speculates())
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

    return SpeculationGate(5, clock=clock)


def shared_choices(rank):
    """Return the decisions of the gate that both ranks share, whose clock is another one in every rank."""
    gate.SpeculationGate = lambda *_: noisy_gate(rank)
    try:
        binding = SimpleNamespace(target=SimpleNamespace(clock=time.perf_counter))
        return choices(gate.gate_of(Chain(binding), Ranks(None, torch.device("cpu"))))
    finally:
        gate.SpeculationGate = SpeculationGate


def main(rank, target, results):
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    dist.init_process_group("gloo", init_method=f"file://{results}/rendezvous", rank=rank, world_size=RANKS)
    model = AutoModelForCausalLM.from_pretrained(target, tp_plan="auto", dtype=torch.float32).eval()

    def run(draft, seed=0, **options):
        return generate(model, draft, LENGTHS, seed, max_new_tokens=NEW, **options).tolist()

    seen = {"size": model._tp_size, "greedy": {"none": run(None)}, "sampled": {}, "histograms": {}}
    for kind in KINDS:
        draft = make_draft(kind, model)
        seen["greedy"][kind] = run(draft)
        seen["histograms"][kind] = draft.last_speculation.acceptance_histogram
        # every rank has a random state of its own, as processes do
        seen["sampled"][kind] = run(draft, rank, do_sample=True, temperature=1.3, top_k=0)
    seen["stopped"] = run(make_draft("plain", model), stopping_criteria=[StopsOnTheFirstRank()])
    draft = make_draft("plain", model)
    draft.generation_config.compile = "compile"
    try:
        run(draft)
    except ValueError as error:
        seen["refused"] = str(error)
    seen["gate"] = shared_choices(rank)
    Path(results, f"{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()
