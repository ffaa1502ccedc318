"""The Triton backend as torch and transformers see it: operators, compilation, refusals, a whole model."""

import pytest
import torch

from hf_longspec.attention_backends import registry
from hf_longspec.attention_backends.lengths import SeqLens
from hf_longspec.attention_backends.registry import AttentionCall
from hf_longspec.attention_backends.torch_backend import TORCH_BACKEND
from hf_longspec.attention_backends.triton import backend, config, launch
from hf_longspec.attention_backends.triton.backend import TRITON_BACKEND, hybrid_attention, why_not
from hf_longspec.attention_backends.triton.launch import hybrid_op, tree_op
from hf_longspec.modeling.ngram.modeling_ngram import NgramDraftModel
from hf_longspec.testing import tiny_prompts, tiny_target
from tests.attention_backends.oracle import SCALING, tree_case
from tests.attention_backends.triton.machine import on

CPU = torch.device("cpu")


def arguments(device, lengths=(40, 70), dtype=torch.float32):
    context, query, key, value = tree_case(lengths, 5, dtype=dtype)
    context = context.to(device)
    return context, *on(device, query, key.nan_to_num(), value.nan_to_num())


@pytest.mark.parametrize(("with_tree", "with_scores"), [(True, True), (False, False)])
def test_opcheck_hybrid(kernel_device, small_tiles, with_tree, with_scores):
    context, query, key, value = arguments(kernel_device)
    sinks = torch.linspace(-2, 3, 6, device=kernel_device)
    last = torch.tensor([4, 2], device=kernel_device) if with_scores else None
    place = (context.lengths.on(kernel_device), context.positions, context.mask if with_tree else None, sinks, last)
    torch.library.opcheck(hybrid_op, (query, key, value, *place, 0.3, 50, 3.0, with_tree))


def test_opcheck_tree(kernel_device, small_tiles):
    context, query, key, value = arguments(kernel_device, dtype=torch.float16)
    nodes = context.staged(key), context.staged(value)
    torch.library.opcheck(tree_op, (query, *nodes, context.mask, 0.3, None))


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
    assert why_not(gpu) == why_not(call) == "triton is not installed: pip install hf_longspec[triton]"


def test_who_is_chosen():
    """On a CPU the torch backend, also where kernels could be interpreted; the preference is for compiled kernels."""
    assert registry.select(AttentionCall(CPU, torch.float32, 64, 64)) is TORCH_BACKEND
    assert registry._priorities["hf_longspec_triton"] == (None if config.INTERPRETED else 20)


def test_a_second_copy_has_operators_of_its_own(kernel_device, kernel_copy):
    """A copy from the Hub beside the installed package: both keep working."""
    copy = kernel_copy("hub_copy", "launch").hybrid_op
    assert hybrid_op._qualname == "hf_longspec::triton_hybrid_attention"
    assert copy._qualname == "hf_longspec_hub_copy_launch::triton_hybrid_attention"
    _, query, key, value = arguments(kernel_device)
    inputs = (query, key, value, torch.tensor([9, 5], device=kernel_device), None, None, None, None, 0.3, None, None)
    for one, other in zip(hybrid_op(*inputs, False), copy(*inputs, False), strict=True):
        assert torch.equal(one, other)


def test_a_model_generates(kernel_device, small_tiles, monkeypatch):
    """Greedy text on the kernels, drafts included, is that of the stock `generate`."""
    target = tiny_target("llama", num_hidden_layers=1).to(kernel_device)
    names = ("input_ids", "attention_mask")
    inputs = dict(zip(names, on(kernel_device, *tiny_prompts(128, (37, 13))), strict=True))
    expected = target.generate(**inputs, max_new_tokens=4, do_sample=False)
    target.set_attn_implementation("hf_longspec_triton")
    calls = []
    monkeypatch.setattr(backend, "hybrid_op", lambda *args: calls.append(args[5]) or hybrid_op(*args))
    draft = NgramDraftModel.from_target(target)
    out = target.generate(**inputs, max_new_tokens=4, do_sample=False, assistant_model=draft)
    assert torch.equal(out, expected)
    assert len(calls) >= 3 * target.config.num_hidden_layers  # prompt, and two verifications at the very least
    assert any(mask is not None for mask in calls)
