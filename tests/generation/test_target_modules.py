"""The modules and hidden states that a draft borrows, against the target's own states, queries, keys and logits."""

import importlib
import inspect
from contextlib import ExitStack

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from transformers import CONFIG_MAPPING, AttentionInterface, AttentionMaskInterface, GPT2Config, GPT2LMHeadModel

from hf_longspec import LongSpecDraftModel
from hf_longspec.generation import target_modules
from hf_longspec.generation.special_cases.forward_check import is_quantized
from hf_longspec.generation.target_modules import (
    LayerInputs,
    PartOfHead,
    TargetParts,
    final_norm_of,
    with_final_norm_input,
)
from tests.robustness.enumeration import build
from tests.robustness.test_threads import in_threads
from tests.tiny_targets import TINY_TARGETS, tiny_prompts, tiny_target, unpacked

ROTARY_TARGETS = [name for name in TINY_TARGETS if name != "deepseek_v3"]
LENGTH = 13
# the same float32 operations in the same order, but for a factor applied elsewhere
EQUAL = {"rtol": 1e-6, "atol": 1e-6}


def unrotated_as(rotation):
    """A function of the same kind that does not rotate: of queries and keys, or of one of them."""
    single = list(inspect.signature(rotation).parameters)[1] == "cos"
    return lambda first, second, *args, **kwargs: first if single else (first, second)


# Rows of data beyond the architectures of the other tests: what they are built like, and their own type.
RELATIVES = [
    ("granite", "granite_swa"),
    ("granite", "hyperclovax"),
    ("granite", "granitemoe"),
    ("granite", "granitemoeshared"),
    ("llama", "cohere"),
    ("cohere2", "exaone4"),
]

# Rotary embeddings of a part of the heads, of one tensor at a time, of some layers; attention under other names.
DECODERS = ("phi", "gpt_neox", "stablelm", "nemotron", "persimmon", "gemma4_text", "gemma3n_text", "jetmoe", "mllama")


@pytest.fixture
def made(target):
    def make(name):
        if name in DECODERS:
            return build(name)
        name, model_type = (name, None) if isinstance(name, str) else name
        if model_type is not None and model_type not in CONFIG_MAPPING:
            pytest.skip(f"this transformers has no {model_type}")
        return target(name) if model_type is None else target(name, model_type=model_type)

    return make


@pytest.mark.parametrize("name", [*TINY_TARGETS, *RELATIVES], ids=str)
def test_embedding_and_head(made, name):
    """Norm and head of what was caught before the norm give the logits."""
    model, first = made(name), []
    parts, ids = TargetParts(model, 0), tiny_prompts(128, (LENGTH,))[0]
    keep = lambda _, args, kwargs: first.append(args[0] if args else kwargs["hidden_states"])  # noqa: E731
    handle = parts.decoder.layers[0].register_forward_pre_hook(keep, with_kwargs=True)
    with torch.no_grad(), LayerInputs(model, True) as caught:
        logits = model(ids).logits
    handle.remove()
    with torch.no_grad():
        torch.testing.assert_close(parts.embed(ids), first[0], **EQUAL)
        torch.testing.assert_close(parts.head(final_norm_of(model)(caught.hidden)), logits, **EQUAL)
    assert not final_norm_of(model)._forward_pre_hooks


@pytest.mark.parametrize("name", ["llama", "gemma2", ("granite", "granitemoe"), ("llama", "cohere"), "phi"], ids=str)
def test_a_part_of_the_head(made, name):
    """Heads with factors, softcap or bias; rows are not copied from a head with a forward of its own."""
    model, ids = made(name), torch.tensor([1, 5, 6, 20])
    parts, hidden = TargetParts(model, 0), torch.randn(2, 3, model.config.hidden_size)
    with torch.no_grad():
        copied = PartOfHead(parts, ids)
        assert copied.weight.shape[0] == 4
        torch.testing.assert_close(copied(hidden), parts.head(hidden)[..., ids], **EQUAL)
        head = model.get_output_embeddings()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(head, "forward", lambda states: 2 * type(head).forward(head, states))
            whole = PartOfHead(parts, ids)
            assert whole.weight is None and torch.equal(whole(hidden), parts.head(hidden)[..., ids])


@pytest.mark.parametrize("name", [*ROTARY_TARGETS, *RELATIVES, *DECODERS], ids=str)
def test_queries_and_keys_are_rotated_as_in_every_layer(made, name, monkeypatch):
    """The backend's query and the cached key of each layer are what `rotate_query` makes of the unrotated ones."""
    model = made(name)
    ids = tiny_prompts(128, (LENGTH,))[0]
    positions = torch.arange(LENGTH)[None]
    rotated, unrotated = {}, {}

    def record(store):
        def attend(module, query, key, *args, **kwargs):
            store[module.layer_idx] = query.clone(), key.clone()
            return query.transpose(1, 2).contiguous(), None

        return attend

    for label, store in (("recorded", rotated), ("recorded_plain", unrotated)):
        AttentionInterface.register(label, record(store))
        AttentionMaskInterface.register(label, lambda **kwargs: None)
    before = model.config._attn_implementation
    module = importlib.import_module(type(TargetParts(model, 0).attention).__module__)
    try:
        with torch.no_grad():
            model.set_attn_implementation("recorded")
            model(ids, use_cache=False)
            model.set_attn_implementation("recorded_plain")
            monkeypatch.setattr(module, "apply_rotary_pos_emb", unrotated_as(module.apply_rotary_pos_emb))
            model(ids, use_cache=False)
            monkeypatch.undo()
    finally:
        model.set_attn_implementation(before)
    # the layers' stand-in attention passes queries on, so only the first layer has equal inputs in both passes
    parts = TargetParts(model, 0)
    rotary = parts.rotary(positions, unrotated[0][0])
    for with_rotation, without in zip(rotated[0], unrotated[0], strict=True):
        torch.testing.assert_close(parts.rotate_query(without, *rotary), with_rotation, **EQUAL)


def test_a_target_without_rotary_embedding_is_refused():
    model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32, bos_token_id=1, eos_token_id=2))
    with pytest.raises(ValueError, match=r"GPT2LMHeadModel.* rotary"):
        LongSpecDraftModel.from_target(model)


def test_a_forward_of_another_thread_is_not_caught():
    model = tiny_target("llama")
    mine, other = (tiny_prompts(model.config.vocab_size, [length])[0] for length in (5, 9))
    with torch.no_grad(), LayerInputs(model, True) as caught:
        model(mine)
        in_threads(lambda: model(other))
    assert caught.hidden.shape[1] == 5


def test_a_hook_may_be_removed_while_another_thread_calls_it():
    """Torch lists the hooks of a module first, and asks for each in turn whether it takes keywords."""
    model = tiny_target("llama")
    found, tokens, contexts, norm = [], tiny_prompts(128, (5,))[0], ExitStack(), final_norm_of(model)
    norm.register_forward_pre_hook(lambda *_: contexts.close())
    contexts.enter_context(LayerInputs(model, True))
    assert len(norm._forward_pre_hooks) == 2
    in_threads(lambda: found.append(model(tokens).logits))
    assert len(norm._forward_pre_hooks) == 1
    torch.testing.assert_close(found, [model(tokens).logits], **EQUAL)


@pytest.mark.parametrize("compiles", [False, True])
def test_what_is_caught_can_leave_a_graph(compiles, graphs):
    """The graph is made while one context is open, and serves when that is closed and another one open."""
    model = tiny_target("gemma3", num_hidden_layers=1, layer_types=["sliding_attention"])

    def step(tokens):
        return with_final_norm_input(model, lambda: model(tokens, use_cache=False).logits)

    run = torch.compile(step, fullgraph=True, backend=graphs) if compiles else step
    for seed in range(3):
        tokens = torch.randint(3, 128, (2, 7), generator=torch.Generator().manual_seed(seed))
        with torch.no_grad(), LayerInputs(model, True) as caught:
            expected = model(tokens, use_cache=False).logits
        with torch.no_grad(), LayerInputs(model, True):
            logits, hidden = run(tokens)
        torch.testing.assert_close(logits, expected, **EQUAL)
        torch.testing.assert_close(hidden, caught.hidden, **EQUAL)
    assert graphs.frame_count == compiles
    assert not final_norm_of(model)._forward_pre_hooks
    assert not target_modules._traced.caught and not target_modules._traced.wanted


class Bytes(nn.Linear):
    """Weights as bitsandbytes keeps them."""

    def __init__(self):
        super().__init__(8, 8)
        self.weight = nn.Parameter(torch.zeros(32, 1, dtype=torch.uint8), requires_grad=False)


class Words(nn.Module):
    """Weights as AutoGPTQ keeps them."""

    def __init__(self):
        super().__init__()
        self.register_buffer("qweight", torch.zeros(1, 8, dtype=torch.int32))


def of_a_class():
    """Weights as torchao keeps them: a tensor of a class of its own, which says that it is of float32."""
    layer = nn.Linear(8, 8)
    layer.weight = nn.Parameter(TwoTensor(layer.weight.detach(), layer.weight.detach()), requires_grad=False)
    return layer


PACKED = {
    "bytes": Bytes,
    "words": Words,
    "float8": lambda: nn.Linear(8, 8).to(torch.float8_e4m3fn).requires_grad_(False),
    "tensors of a class": of_a_class,
    "torch": lambda: torch.ao.nn.quantized.dynamic.Linear(8, 8),
}


@pytest.mark.parametrize("name", PACKED)
def test_quantized_weights_are_found(name):
    model = tiny_target("llama")
    model.model.layers[1].mlp.up_proj = PACKED[name]()
    assert is_quantized(model)


@pytest.mark.parametrize("name", TINY_TARGETS)
def test_weights_of_floats_are_not_quantized(target, name):
    assert not is_quantized(target(name)) and not is_quantized(unpacked(tiny_target(name)).to(torch.bfloat16))
