"""The Triton backend as torch and transformers see it: operators, compilation, refusals, whole models.

A backend that writes scores while it verifies makes SpecAttn's texts and selections in one pass over the keys, also in
captured steps. test_scores.py compares the scores.
"""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from hf_longspec import SpecAttnDraftModel
from hf_longspec.attention_backends import registry
from hf_longspec.attention_backends.lengths import SeqLens
from hf_longspec.attention_backends.registry import AttentionCall
from hf_longspec.attention_backends.scores import ScoreCapture
from hf_longspec.attention_backends.triton import backend, launch
from hf_longspec.attention_backends.triton.backend import TRITON_BACKEND, hybrid_attention, why_not
from hf_longspec.attention_backends.triton.launch import hybrid_op, scored_op, tree_op
from hf_longspec.generation import call as call_module
from hf_longspec.generation.compiled import compiled_steps
from hf_longspec.generation.target import TargetView
from hf_longspec.modeling.ngram.modeling_ngram import NgramDraftModel
from hf_longspec.modeling.specattn.generation_specattn import SpecAttnDrafter
from tests.attention_backends.oracle import SCALING, tree_case
from tests.attention_backends.triton.machine import on
from tests.generation.test_on_simulated_cuda import simulated
from tests.tiny_targets import tiny_prompts, tiny_target

CPU = torch.device("cpu")


def arguments(device, lengths=(40, 70), dtype=torch.float32):
    context, query, key, value = tree_case(lengths, 5, dtype=dtype)
    context = context.to(device)
    return context, *on(device, query, key.nan_to_num(), value.nan_to_num())


@pytest.mark.parametrize("with_tree", [True, False])
def test_operators(kernel_device, small_tiles, monkeypatch, with_tree):
    """Two runs are compared: what is not written, the scores after a prefix, has to be the same."""
    monkeypatch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)
    context, query, key, value = arguments(kernel_device)
    sinks = torch.linspace(-2, 3, 6, device=kernel_device)
    last = torch.tensor([4, 2], device=kernel_device)
    place = (context.lengths.on(kernel_device), context.positions, context.mask if with_tree else None, sinks)
    torch.library.opcheck(hybrid_op.operator, (query, key, value, *place, 0.3, 50, 3.0))
    scored = (query, key, value, *place, last, 0.3, 50, 3.0, with_tree, with_tree)
    torch.library.opcheck(scored_op.operator, scored)
    if with_tree:
        half = [x.half() for x in (query, context.staged(key), context.staged(value))]
        torch.library.opcheck(tree_op.operator, (*half, context.mask, 0.3, None))


def test_compiles_whole(kernel_device, small_tiles):
    """One graph for every length: lengths are data."""
    graphs = []

    def attend(query, key, value, lengths, mask, positions):
        lengths, options = SeqLens(None, lengths), {"scaling": SCALING, "sliding_window": 60}
        # the operator alone: nothing that a C++ compiler would take 20 s for
        return hybrid_attention(query, key, value, lengths, mask, positions, **options)

    def counting(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("inductor")(graph, inputs)

    compiled = torch.compile(attend, fullgraph=True, backend=counting)
    for lengths in ((40, 70), (3, 66)):
        context, query, key, value = arguments(kernel_device, lengths)
        key, value = (torch.nn.functional.pad(x, (0, 0, 0, 90 - x.shape[2])) for x in (key, value))
        inputs = (query, key, value, context.lengths.on(kernel_device), context.mask, context.positions)
        for part, expected in zip(compiled(*inputs), attend(*inputs), strict=True):
            torch.testing.assert_close(part, expected, rtol=0, atol=1e-6)
    assert len(graphs) == 1


def test_gradients_are_refused_not_wrong(kernel_device, small_tiles):
    context, query, key, value = arguments(kernel_device)
    query.requires_grad_()
    out, _ = TRITON_BACKEND.prefix_attention(query, key, value, context.lengths, scaling=0.3)
    with pytest.raises(RuntimeError, match="autograd"):
        out.sum().backward()


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (AttentionCall(CPU, torch.float64, 64, 64), r"dtype is torch\.float64, expected one of torch\.float16"),
        (AttentionCall(CPU, torch.float16, 64, 320), "value_dim 320, expected at most 256"),
        (AttentionCall(torch.device("mps"), torch.float16, 64, 64), "device is mps, expected cuda"),
    ],
)
def test_refusals(call, reason):
    with pytest.raises(ValueError, match=f"hf_longspec_triton: .*{reason}"):
        registry.select(call, "hf_longspec_triton")


def test_refusals_of_the_machine(monkeypatch):
    call = AttentionCall(CPU, torch.float16, 64, 64)
    gpu = AttentionCall(torch.device("cuda"), torch.float16, 64, 64)
    monkeypatch.setattr(launch, "INTERPRETED", False)
    assert "TRITON_INTERPRET=1" in why_not(call)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert why_not(gpu) == "compute capability is 7.5, expected at least 8.0"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert why_not(gpu) is None
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert "ROCm" in why_not(gpu)
    monkeypatch.setattr(launch, "INSTALLED", False)
    assert why_not(gpu) == why_not(call) == "triton is not installed: pip install triton"


def text_of(target, lengths, **options):
    input_ids, mask = on(target.device, *tiny_prompts(target.config.vocab_size, lengths))
    options |= {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    return target.generate(input_ids, attention_mask=mask, **options)


def test_a_model_generates(kernel_device, small_tiles, monkeypatch):
    """Greedy text on the kernels, drafts included, is that of the stock `generate`."""
    target = tiny_target("llama", num_hidden_layers=1).to(kernel_device)
    expected = text_of(target, (37, 13))
    target.set_attn_implementation("hf_longspec_triton")
    masks = []
    monkeypatch.setattr(backend, "hybrid_op", lambda *args: masks.append(args[5]) or hybrid_op(*args))
    assert torch.equal(text_of(target, (37, 13), assistant_model=NgramDraftModel.from_target(target)), expected)
    # prompt, and two verifications at the very least
    assert len(masks) >= 3 * target.config.num_hidden_layers and any(mask is not None for mask in masks)


class Watched:
    """SpecAttn on an implementation: layers whose scores came with the attention (`written`) and from a second pass
    (`computed`), and the slots that every phase selected.

    The slots are found by the keys in the buffers after a phase. A function that fills them may be part of a graph: it
    runs several times before it is captured, and not at all when it is replayed.
    """

    def __init__(self, target, lengths=(29, 3), implementation="hf_longspec_triton", **settings):
        target.set_attn_implementation(implementation)
        settings |= {"num_assistant_tokens": 3, "sparse_min_tokens": 8, "sparse_ratio": 0.3}
        draft = SpecAttnDraftModel.from_target(target, **settings)
        self.written, self.computed, self.selected, observe = [], [], [], SpecAttnDrafter.observe

        def watching(drafter, verification):
            observe(drafter, verification)
            self.selected.append(self._slots(drafter.sparse, verification.prefix_lengths.host))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SpecAttnDrafter, "observe", watching)
            for name, layers in (("keep_scores", self.written), ("collect", self.computed)):
                patch.setattr(ScoreCapture, name, self._noting(getattr(ScoreCapture, name), layers))
            self.text = text_of(target, lengths, assistant_model=draft)
        self.passes = draft.last_speculation.num_forwards + 1  # of the prompt's end and of every verification

    @staticmethod
    def _slots(sparse, lengths):
        """By layer and row the heads and slots of the selected entries: those whose keys are in the buffer."""
        found = {}
        for layer in sparse.sparse_layers:
            stored, copied = (on("cpu", cache.layers[layer].keys)[0] for cache in (sparse.cache, sparse))
            for row, (length, count) in enumerate(zip(lengths, sparse.counts, strict=True)):
                same = (copied[row, :, :count, None] == stored[row, :, None, :length]).all(-1)
                assert same.any(-1).all()
                found[layer, row] = same.any(1).nonzero().tolist()
        return found

    @staticmethod
    def _noting(method, layers):
        def noted(capture, layer_idx, *args, **options):
            if layer_idx not in capture.skipped_layers:
                layers.append(layer_idx)
            return method(capture, layer_idx, *args, **options)

        return noted


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("gpt_oss", {}),
        pytest.param("gemma2", {"score": "logits", "granularity": "kv_head"}, marks=pytest.mark.soak),
        pytest.param("llama", {"score": "weights", "granularity": "kv_head"}, marks=pytest.mark.soak),
        pytest.param("llama", {"score": "logits", "granularity": "layer"}, marks=pytest.mark.soak),
        pytest.param("deepseek_v3", {}, marks=pytest.mark.soak),
    ],
)
def test_scores_come_with_the_attention(kernel_device, small_tiles, name, settings):
    """One pass over the keys, and the entries of two. Softcap, sinks, keys made for the call; no scores of windows."""
    target = tiny_target(name, attn_implementation="eager").to(kernel_device)
    expected = text_of(target, (29, 3))
    scored = set(range(target.config.num_hidden_layers)) - TargetView(target).sliding_layers
    here, there = Watched(target, **settings), Watched(target, implementation="hf_longspec_torch", **settings)
    assert torch.equal(here.text, expected) and here.passes == there.passes
    assert set(here.written) == scored and len(here.written) == len(scored) * here.passes
    assert there.computed == here.written and not here.computed and not there.written
    assert here.selected == there.selected and here.selected


@torch.no_grad()
def test_selections_of_captured_steps(kernel_device):
    """A graph computes, ranks and copies what steps without graphs do, as the simulated device shows without a GPU."""
    if kernel_device.type == "cuda":
        pytest.skip("on a GPU the test above captures the steps of this backend")
    target = tiny_target("llama", attn_implementation="eager")
    with simulated() as cuda:
        cuda.place(target)
        plain = Watched(target, compile="off")
        captured = Watched(target, compile="graph")
        assert cuda.replays and torch.equal(cuda.fetch(captured.text), cuda.fetch(plain.text))
    assert captured.written == plain.written and captured.selected == plain.selected and len(plain.selected) > 2


@pytest.mark.parametrize("lengths", [(29, 3), pytest.param((29,), marks=pytest.mark.soak)], ids=["ragged", "one"])
def test_compiled_steps(kernel_device, small_tiles, lengths, monkeypatch):
    """Traced whole, the scores included; drafting and verifying are one graph each."""
    target = tiny_target("llama", num_hidden_layers=1).to(kernel_device)
    loose = Watched(target, lengths)
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("eager")
    monkeypatch.setattr(compiled_steps, "BACKEND", graphs)
    runner = compiled_steps.CompiledRunner()
    monkeypatch.setattr(call_module, "_runner", lambda *_: runner)
    fixed = Watched(target, lengths)
    torch._dynamo.reset()
    assert torch.equal(fixed.text, loose.text) and fixed.passes == loose.passes and graphs.frame_count >= 2
    assert fixed.written == loose.written and not fixed.computed and fixed.selected == loose.selected
