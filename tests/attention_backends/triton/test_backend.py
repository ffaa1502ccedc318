"""The Triton backend as torch and transformers see it: operators, compilation, refusals, whole models."""

import pytest
import torch

from hf_longspec import SpecAttnDraftModel
from hf_longspec.attention_backends import registry
from hf_longspec.attention_backends.lengths import SeqLens
from hf_longspec.attention_backends.registry import AttentionCall
from hf_longspec.attention_backends.scores import ScoreCapture
from hf_longspec.attention_backends.triton import launch
from hf_longspec.attention_backends.triton.backend import TRITON_BACKEND, hybrid_attention, why_not
from hf_longspec.attention_backends.triton.launch import hybrid_op, scored_op, tree_op
from hf_longspec.generation.target import TargetView
from tests.attention_backends.oracle import SCALING, tree_case
from tests.attention_backends.triton.machine import on
from tests.tiny_targets import tiny_prompts, tiny_target
from tests.watching import before

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


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("gpt_oss", {}),
        pytest.param("gemma2", {"score": "logits", "granularity": "kv_head"}, marks=pytest.mark.soak),
        pytest.param("llama", {"score": "weights", "granularity": "kv_head"}, marks=pytest.mark.soak),
        pytest.param("deepseek_v3", {}, marks=pytest.mark.soak),
    ],
)
def test_scores_come_with_the_attention(kernel_device, small_tiles, name, settings, monkeypatch):
    """The text of stock `generate` on the kernels, and SpecAttn's selections in one pass over the keys.

    Softcap, sinks, keys made for the call; no scores of windows.
    """
    target = tiny_target(name, attn_implementation="eager").to(kernel_device)
    expected = text_of(target, (29, 3))
    scored = set(range(target.config.num_hidden_layers)) - TargetView(target).sliding_layers
    settings |= {"num_assistant_tokens": 3, "sparse_min_tokens": 8, "sparse_ratio": 0.3}
    draft = SpecAttnDraftModel.from_target(target, **settings)
    found = {}
    before(monkeypatch, ScoreCapture, "keep_scores", lambda _, layer, *__: noted["keep_scores"].append(layer))
    before(monkeypatch, ScoreCapture, "collect", lambda _, layer, *__, **___: noted["collect"].append(layer))
    for implementation in ("hf_longspec_torch", "hf_longspec_triton"):
        target.set_attn_implementation(implementation)
        noted = {"keep_scores": [], "collect": []}
        assert torch.equal(text_of(target, (29, 3), assistant_model=draft), expected)
        found[implementation] = noted, draft.last_speculation.acceptance_histogram
    (second_pass, histogram), (one_pass, same) = found.values()
    assert same == histogram and scored <= set(second_pass["collect"])
    assert set(one_pass["keep_scores"]) == scored and not scored & set(one_pass["collect"])
