"""Drafters on a simulated CUDA device, captured and in part eager: their text, transfers, launches and graphs."""

import logging
from contextlib import contextmanager
from statistics import mean
from types import MethodType
from typing import NamedTuple

import pytest
import torch

from hf_longspec.attention_backends import registry
from hf_longspec.attention_backends.triton.commit import can_move
from hf_longspec.generation.decoding import Session
from hf_longspec.modeling.register_draft import DRAFTS
from tests.generation.tiny_models import vision_language_model
from tests.simulated_cuda import SimulatedCuda
from tests.tiny_targets import randomize, tiny_prompts, tiny_target

pytest.importorskip("triton", reason="captured steps need Triton's kernels")
from tests.attention_backends.triton.machine import language_listed_once
from tests.pairwise import few
from tests.simulated_kernels import KERNELS

pytestmark = pytest.mark.usefixtures("every_step_speculates")

# Name: draft, settings.
DRAFTERS = {
    "plain": ("longspec_plain", {}),
    "n-grams": ("longspec_ngram", {"num_assistant_tokens": 4}),
    "specattn": ("specattn", {"num_assistant_tokens": 3, "sparse_ratio": 0.5, "sparse_min_tokens": 6}),
    "longspec": ("longspec", {"window": 8, "tree_widths": [6, 4]}),
    "longspec, n-grams": ("longspec", {"window": 8, "tree_widths": [2, 2], "ngram_candidates": 2}),
    "eagle3": ("longspec_eagle3", {"window": 8, "tree_widths": [12, 9], "draft_vocab_size": 17}),
    "gemma 4 assistant": ("longspec_gemma4_assistant", {"tree_widths": [9, 6]}),
    "tokenswift": ("tokenswift", {"num_heads": 2, "tree_branching": [1, 3, 2], "draft_vocab_size": 9}),
    "partial_kv": ("tokenswift", {"num_heads": 2, "tree_branching": [1, 2, 2], "self_draft": "partial_kv"}),
    "draft model": ("longspec_assistant", {"num_assistant_tokens": 3}),
    "draft model, tree": ("longspec_assistant", {"tree_widths": [4, 3]}),
    "draft model, rejection": (
        "longspec_assistant",
        {"num_assistant_tokens": 2, "window": 24, "acceptance": "rejection"},
    ),
    "draft model, PARD": ("longspec_assistant", {"num_assistant_tokens": 3, "pard_token": 23}),
}
# Most copies from pinned memory and most launches outside of graphs in a steady iteration with captured steps;
# launches are averaged, as noise is drawn in blocks.
MOST_COPIES, MOST_LAUNCHES = 1, 20
NEW = 14
FIRST = 3  # iterations in which graphs are captured
BATCHES = ((21,), (23, 9, 40))
# Every draft with captured steps, sampled and greedy in turn; without them, drafts whose steps differ then.
CASES = [
    *((name, "graph", place % 2 == 0, BATCHES[place // 2 % 2]) for place, name in enumerate(DRAFTERS)),
    ("specattn", "graph", False, BATCHES[0]),
    ("n-grams", "off", True, BATCHES[1]),
    ("specattn", "off", False, BATCHES[0]),
    ("longspec", "off", False, BATCHES[1]),
    ("partial_kv", "off", False, BATCHES[1]),
]


@contextmanager
def simulated(index=0):
    """The device, with Triton's kernels as the preferred ones, as where Triton compiles."""
    with language_listed_once(), pytest.MonkeyPatch.context() as patch, SimulatedCuda(index, kernels=KERNELS) as device:
        patch.setitem(registry._priorities, "hf_longspec_triton", 20)
        registry.select.cache_clear()
        assert can_move(torch.device("cuda", index))  # its first call tries it out
        try:
            yield device
        finally:
            registry.select.cache_clear()


def make_draft(name, model):
    """The draft of one of the [`DRAFTERS`] with random weights, which is a model of its own where one drafts."""
    kind, settings = DRAFTERS[name]
    models = [tiny_target("qwen3", 5, vocab_size=24)] if kind == "longspec_assistant" else []
    draft = DRAFTS[kind].model.from_target(model, *models, **settings)
    randomize(draft)
    return draft


def generate(model, draft, input_ids, mask, sampled, **options):
    torch.manual_seed(0)
    options = {"do_sample": sampled, "max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0} | options
    return model.generate(input_ids, attention_mask=mask, assistant_model=draft, **options)


class Iteration(NamedTuple):
    """Transfers and launches of one iteration, the graphs captured up to its end, and the rows that had ended."""

    reads: int
    writes: int
    copies: int
    launches: int  # outside of graphs
    replayed: int  # launches by graphs
    graphs: int
    done: tuple[bool, ...]


def watch(cuda, monkeypatch):
    """Return a list that gets an [`Iteration`] after each one."""
    found, iterate = [], Session.iterate

    def counts():
        transfers = map(cuda.count, ("read", "write", "pinned"))
        return (*transfers, cuda.launches.total(), cuda.replayed.total())

    def counted(session):
        before = counts()
        iterate(session)
        new = (after - earlier for after, earlier in zip(counts(), before, strict=True))
        found.append(Iteration(*new, len(cuda.graphs), tuple(session.sequences.done)))

    monkeypatch.setattr(Session, "iterate", counted)
    return found


@torch.no_grad()
@pytest.mark.parametrize(("name", "steps", "sampled", "lengths"), few(CASES, 6), ids=str)
def test_drafters(name, steps, sampled, lengths, monkeypatch):
    """The same text as on the CPU. Iterations read once and never write; steady ones capture nothing."""
    model = tiny_target("llama", vocab_size=24)
    draft, prompts = make_draft(name, model), tiny_prompts(24, lengths)
    other = make_draft(name, model)  # so that the first call on the device is the first of its draft
    expected = generate(model, other, *prompts, sampled)

    draft.generation_config.compile = steps
    with simulated() as cuda:
        cuda.place(model), cuda.place(draft)
        iterations = watch(cuda, monkeypatch)
        for call in range(2 if steps == "graph" else 1):
            assert torch.equal(cuda.fetch(generate(model, draft, *cuda.place(prompts), sampled)), expected)
            histograms = [one.last_speculation.acceptance_histogram for one in (draft, other)]
            assert histograms[0] == histograms[1]
            steady = iterations[FIRST:]
            assert len(steady) >= 2 and {(iteration.reads, iteration.writes) for iteration in steady} == {(1, 0)}
            if steps == "graph":
                # the second call captures nothing, as buffers and graphs are kept with the draft
                assert len({iteration.graphs for iteration in iterations[0 if call else FIRST - 1 :]}) == 1
                # there is one copy more when a row ends, and when it has ended
                same = [
                    new
                    for *old, new in zip(*(iterations[FIRST + k :] for k in (-2, -1, 0)), strict=False)
                    if all(new.done == one.done for one in old)
                ]
                assert max(iteration.copies for iteration in same) <= MOST_COPIES
                assert mean(iteration.launches for iteration in same) <= MOST_LAUNCHES
            iterations.clear()
        assert bool(cuda.replays) == (steps == "graph")


@torch.no_grad()
@pytest.mark.parametrize("name", ["specattn", pytest.param("longspec, n-grams", marks=pytest.mark.soak)])
def test_positions_after_images(name):
    """M-RoPE: no graph of a drafter serves rows whose positions are not their places, and none is spoilt by them."""
    model = vision_language_model("qwen2_vl")
    input_ids, mask = tiny_prompts(24, (9, 23))
    counted = (mask.cumsum(1) - 1).clamp_min(0)
    calls = [{}, {"position_ids": (counted + torch.tensor([[5], [11]])).repeat(4, 1, 1)}, {}]
    draft, other = make_draft(name, model), make_draft(name, model)
    expected = [(generate(model, other, input_ids, mask, False, **call), other.last_speculation) for call in calls]
    draft.generation_config.compile = "graph"
    with simulated() as cuda:
        cuda.place(model), cuda.place(draft)
        for call, (text, stats) in zip(calls, expected, strict=True):
            placed = {name: cuda.place(value) for name, value in call.items()}
            out = generate(model, draft, cuda.place(input_ids), cuda.place(mask), False, **placed)
            assert torch.equal(cuda.fetch(out), text)
            assert draft.last_speculation.acceptance_histogram == stats.acceptance_histogram
        assert cuda.replays


@torch.no_grad()
def test_scores_without_a_distribution_travel_with_the_read(monkeypatch):
    """A token of the text, after which all scores are nan: the graph that accepts tells it, in the same single read."""
    model = tiny_target("llama", vocab_size=128)
    draft, prompts = make_draft("longspec", model), tiny_prompts(128, (9, 5))
    draft.generation_config.compile = "graph"
    with simulated() as cuda:
        placed = cuda.place(prompts)
        cuda.place(model), cuda.place(draft)
        text = cuda.fetch(generate(model, draft, *placed, True))
        late = text[0, 9 + 8 :].tolist()
        token = next(
            token for token in late if token not in text[:, : 9 + 8].tolist()[0] + prompts[0].flatten().tolist()
        )
        iterations = watch(cuda, monkeypatch)
        model.get_input_embeddings().weight[token] = torch.nan
        graphs = len(cuda.graphs)
        with pytest.raises(RuntimeError, match="probability tensor contains either"):
            generate(model, draft, *placed, True)
        assert len(iterations) > 1 and cuda.replays and len(cuda.graphs) == graphs
        assert {(iteration.reads, iteration.writes) for iteration in iterations} == {(1, 0)}


# Launches of a captured step per layer, seven products and the stand-in for attention among them.
PER_LAYER = {
    ("graph", torch.float32): 38,
    ("graph", torch.bfloat16): 42,
    ("auto", torch.float32): 13,
    ("fused", torch.bfloat16): 13,
}


@torch.no_grad()
@pytest.mark.parametrize(("steps", "dtype"), few(PER_LAYER, 2), ids=str)
def test_launches_of_a_layer(steps, dtype, monkeypatch):
    launches = []
    for layers in (1, 2):
        model = tiny_target("llama", vocab_size=24, num_hidden_layers=layers, dtype=dtype)
        draft = DRAFTS["longspec_plain"].model.from_target(model, compile=steps)
        with simulated() as cuda, monkeypatch.context() as patch:
            cuda.place(model)
            iterations = watch(cuda, patch)
            generate(model, draft, *cuda.place(tiny_prompts(24, (21, 9))), False, max_new_tokens=FIRST + 2)
            launches.append(iterations[FIRST].replayed)
    assert launches[1] - launches[0] == PER_LAYER[steps, dtype]


@torch.no_grad()
@pytest.mark.parametrize(("name", "kind"), [("qwen3", "n-grams"), ("gpt_oss", "plain")])
def test_text_of_fused_layers(name, kind):
    """By default, of several nodes and of two rows whose nodes go to different slots. The model is as before."""
    model, prompts = tiny_target(name, vocab_size=24, num_hidden_layers=1), tiny_prompts(24, (9, 16))
    if name == "gpt_oss":
        model.set_experts_implementation("batched_mm")
    expected = generate(model, None, *prompts, False, max_new_tokens=5)
    draft = make_draft(kind, model)
    with simulated() as cuda:
        cuda.place(model)
        assert torch.equal(cuda.fetch(generate(model, draft, *cuda.place(prompts), False, max_new_tokens=5)), expected)
        assert {"_gated_kernel", "_norm_kernel", "_rotate_kernel"} <= cuda.replayed.keys()
    assert not any("forward" in vars(module) for module in model.modules())


def fuse(model):
    """Replace forwards of a loaded model in place, as Liger does. Another activation than the target's shows it."""

    def fused(mlp, x):
        return mlp.down_proj(torch.nn.functional.gelu(mlp.gate_proj(x)) * mlp.up_proj(x))

    fused.stateless = True
    for layer in model.model.layers:
        layer.mlp.forward = MethodType(fused, layer.mlp)


@torch.no_grad()
def test_modules_with_fused_kernels_are_captured(monkeypatch):
    """The text is that of stock `generate` with the same modules, also where graphs of the others were captured."""
    model, fused = (tiny_target("llama", vocab_size=24) for _ in range(2))
    prompts = tiny_prompts(24, (21,))
    fuse(fused)
    stock = [generate(one, None, *prompts, False) for one in (model, fused)]
    assert not torch.equal(*stock)
    draft = make_draft("longspec", model)
    draft.generation_config.compile = "graph"
    with simulated() as cuda:
        cuda.place(model), cuda.place(draft)
        iterations = watch(cuda, monkeypatch)
        assert torch.equal(cuda.fetch(generate(model, draft, *cuda.place(prompts), False)), stock[0])
        fuse(model)
        iterations.clear()
        for _ in range(2):
            assert torch.equal(cuda.fetch(generate(model, draft, *cuda.place(prompts), False)), stock[1])
        assert len({iteration.graphs for iteration in iterations[FIRST:]}) == 1 and cuda.replays


@torch.no_grad()
def test_a_step_that_cannot_be_captured_runs_as_it_is(monkeypatch, caplog):
    """The torch backend reads lengths on the host. The text stays the same, and one warning is logged."""
    model = tiny_target("llama", vocab_size=24)
    draft = DRAFTS["longspec_plain"].model.from_target(model)
    prompts = tiny_prompts(24, (13, 9))
    expected = generate(model, draft, *prompts, False, max_new_tokens=5)
    draft.generation_config.compile = "graph"
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with SimulatedCuda() as cuda:
        cuda.place(model)
        for _ in range(2):
            text = generate(model, draft, *cuda.place(prompts), False, max_new_tokens=5)
            assert torch.equal(cuda.fetch(text), expected)
        assert not cuda.graphs and not cuda.replays
    warnings = [record for record in caplog.records if "could not be captured as a CUDA graph" in record.message]
    assert len(warnings) == 1 and "while a graph is captured: read" in warnings[0].message


@torch.no_grad()
def test_a_model_on_another_device_than_the_current_one():
    model = tiny_target("llama", vocab_size=24)
    draft = DRAFTS["longspec_plain"].model.from_target(model)
    prompts = tiny_prompts(24, (21,))
    expected = generate(model, draft, *prompts, False)
    draft.generation_config.compile = "graph"
    with simulated(index=1) as cuda:
        cuda.place(model)
        assert torch.equal(cuda.fetch(generate(model, draft, *cuda.place(prompts), False)), expected)
        assert cuda.replays
