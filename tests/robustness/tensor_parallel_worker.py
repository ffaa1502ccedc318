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

from hf_longspec.generation.special_cases.costs import Costs
from hf_longspec.generation.special_cases.gate import gate_of
from hf_longspec.generation.special_cases.parallel import Ranks
from tests.generation.made_up_machine import Levels
from tests.robustness.drafts import make_draft
from tests.tiny_targets import generate

RANKS, LENGTHS, NEW = 2, (33, 3, 13), 8
# Drafts that read nothing of the target, its scores, and its keys and values: chosen ones, and those of a layer.
KINDS = ("ngram", "specattn", "partial", "longspec")


class StopsOnTheFirstRank(StoppingCriteria):
    """As a clock may: one rank says stop, and the other does not."""

    def __call__(self, input_ids, scores, **kwargs):
        return torch.tensor([dist.get_rank() == 0 and input_ids.shape[1] >= max(LENGTHS) + 5])


def choices(gate, seed):
    """Return the decisions of a gate whose steps take random times, other ones in each rank."""
    found, numbers = [], random.Random(seed)
    gate.reach(100)
    for _ in range(120):
        is_open = gate.speculates()
        found.append((is_open, *gate.widths))
        tree = SimpleNamespace(num_nodes=1 + len(gate.widths) * is_open)
        verified = SimpleNamespace(tokens=[[0, 0]], nodes=[[0, 1][: tree.num_nodes]], tree=tree)
        gate.record(verified, numbers.expovariate(1.0), numbers.expovariate(1.0), is_open)
    return found


def gate_with(ranks):
    return gate_of(Levels((1,) * 4), lambda power, earlier: Costs(), ranks)


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
    seen["gate"] = choices(gate_with(Ranks(None, torch.device("cpu"))), seed=rank)
    part = Path(results, f"{rank}.part")
    part.write_text(json.dumps(seen))
    part.replace(Path(results, f"{rank}.json"))
    while not all(Path(results, f"{other}.json").exists() for other in range(RANKS)):
        time.sleep(0.02)
    os._exit(0)  # a thread of gloo may outlive its groups, which aborts a process that ends by itself
