"""The registered attention functions: whole models on ours against their own eager attention, and the refusals."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AttentionMaskInterface, DynamicCache

from hf_longspec.attention_backends.interface import WindowMask, attention_forward, register
from hf_longspec.generation.cache import CACHE_NAME
from tests.attention_backends import reference  # noqa: F401 - registers its name
from tests.pairwise import pairwise
from tests.rounding import rounding
from tests.tiny_targets import tiny_prompts, tiny_target

register()
NAMES = ("hf_longspec", "hf_longspec_torch")
Layer = SimpleNamespace  # all that attention reads of a module are attributes
# Windows (gemma2, gpt_oss, mistral, cohere2), softcap (gemma2), sinks (gpt_oss), value size 12 of 24 (deepseek_v3).
MODELS = ("llama", "gemma2", "gpt_oss", "mistral", "cohere2", "deepseek_v3", "qwen2_moe", "phimoe")
LAYERS = 2  # of each
LENGTHS = (40, 23)


@pytest.fixture(scope="module")
def models():
    made = {name: tiny_target(name) for name in MODELS[:-2]}
    # these put their window into the mask and do not pass it to the attention function
    window = {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1}
    experts = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    made["qwen2_moe"] = tiny_target("qwen3_moe", model_type="qwen2_moe", **window, **experts)
    made["phimoe"] = tiny_target("mixtral", model_type="phimoe", sliding_window=16)
    return made


def run(model, implementation, *args, **kwargs):
    before = model.config._attn_implementation
    model.set_attn_implementation(implementation)
    try:
        with torch.no_grad():
            return model(*args, **kwargs)
    finally:
        model.set_attn_implementation(before)


def tensors(nodes=3, slots=7, batch=2):
    generator = torch.Generator().manual_seed(0)
    shapes = ((batch, 4, nodes, 8), (batch, 2, slots, 8), (batch, 2, slots, 8))
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


@pytest.mark.parametrize(("name", "padded", "implementation"), pairwise(MODELS, (True, False), NAMES))
def test_logits_are_those_of_eager(name, padded, implementation, models):
    input_ids, mask = tiny_prompts(128, LENGTHS if padded else (40, 40))
    expected = run(models[name], "eager", input_ids, attention_mask=mask).logits
    actual = run(models[name], implementation, input_ids, attention_mask=mask).logits
    assert not actual.isnan().any()
    torch.testing.assert_close(actual[mask.bool()], expected[mask.bool()], **rounding(expected, LAYERS))


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_a_prompt_in_chunks(name, models):
    """Keys before the queries and no mask: the last queries see the first keys, and windows reach back into them."""
    model = models[name]
    input_ids, _ = tiny_prompts(128, (40, 40))
    expected = run(model, "eager", input_ids).logits
    for cache in (DynamicCache(), DynamicCache(config=model.config)):
        for start, stop in ((0, 25), (25, 39), (39, 40)):
            chunk = input_ids[:, start:stop]
            actual = run(model, "hf_longspec", chunk, **{CACHE_NAME: cache}, use_cache=True).logits
            torch.testing.assert_close(actual, expected[:, start:stop], **rounding(expected, LAYERS))


@pytest.mark.parametrize(
    "use",
    [
        lambda mask: mask[:, :, -2:],
        lambda mask: ~mask,
        lambda mask: mask.to(torch.float32),
        lambda mask: torch.where(mask, 0.0, -1.0) + 1,
        lambda mask: mask & torch.ones_like(mask.sum(-1, keepdim=True), dtype=torch.bool),
        lambda mask: torch.cat([mask, mask]),
    ],
)
def test_a_window_mask_stands_for_its_entries(use):
    """A tensor without memory, which stays one on another device; what else is done is done with the entries."""
    queries, keys, window = 5, 9, 4
    mask = WindowMask.of(2, queries, keys, window, "cpu")
    seen = [[query - window < key <= query for key in range(keys)] for query in range(keys - queries, keys)]
    expected = torch.tensor(seen).expand(2, 1, -1, -1)
    assert isinstance(mask, WindowMask) and mask.shape == expected.shape and mask.dtype == torch.bool
    assert mask.dim() == mask.ndim == 4 and mask.size(3) == keys and mask.stride() == (0, 0, 0, 0)
    for moved in (mask.to("cpu"), mask.to(torch.device("meta"))):
        assert isinstance(moved, WindowMask) and moved.sliding_window == window
    assert type(use(mask)) is torch.Tensor
    assert torch.equal(use(mask), use(expected))


def test_no_mask_is_built_without_padding(monkeypatch, models):
    calls = []
    sdpa_mask = AttentionMaskInterface()["sdpa"]
    spy = AttentionMaskInterface._global_mapping | {
        "sdpa": lambda **kwargs: calls.append(kwargs) or sdpa_mask(**kwargs)
    }
    monkeypatch.setattr(AttentionMaskInterface, "_global_mapping", spy)
    for name in ("llama", "mistral", "gpt_oss", "qwen2_moe"):
        input_ids, mask = tiny_prompts(128, (40, 40))
        run(models[name], "hf_longspec", input_ids, attention_mask=mask)
        assert calls == []
    input_ids, mask = tiny_prompts(128, LENGTHS)
    run(models["llama"], "hf_longspec", input_ids, attention_mask=mask)
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("name", "padded"), [("llama", True), ("mistral", False), ("gpt_oss", True), ("gemma2", False)]
)
def test_gradients_are_those_of_eager(name, padded):
    input_ids, mask = tiny_prompts(128, LENGTHS if padded else (40, 40))
    # Not the first token either: it is predicted at a padded position, where eager gives the mean of all values.
    labels = input_ids.masked_fill(mask.cumsum(1) < 2, -100)
    gradients = []
    for implementation in ("eager", "hf_longspec"):
        model = tiny_target(name, attn_implementation=implementation)
        model(input_ids, attention_mask=mask, labels=labels).loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert not gradients[1].isnan().any()
    assert (gradients[1] - gradients[0]).norm() < 1e-4 * gradients[0].norm()


@pytest.mark.parametrize("lowest", [None, -torch.inf, torch.finfo(torch.float32).min])
def test_a_query_that_sees_nothing_gives_zero(lowest):
    """With a boolean and an additive mask; the gradient is a number too."""
    query, key, value = tensors()
    query.requires_grad_()
    mask = torch.ones(2, 1, 3, 7, dtype=torch.bool)
    mask[0, :, 1] = False
    if lowest is not None:
        mask = torch.zeros(mask.shape).masked_fill(~mask, lowest)
    for options in ({}, {"s_aux": torch.zeros(4)}, {"softcap": 5.0}):
        out, weights = attention_forward(Layer(), query, key, value, mask, **options)
        with torch.no_grad():
            assert torch.equal(attention_forward(Layer(), query, key, value, mask, **options)[0][0, 1], out[0, 1])
        assert weights is None and out.shape == (2, 3, 4, 8)
        assert not out[0, 1].any() and out[0, 0].all()
        (gradient,) = torch.autograd.grad(out.sum(), query)
        assert not gradient.isnan().any()


@pytest.mark.parametrize("name", [None, *NAMES[1:]])
def test_a_mask_may_be_longer_than_the_keys(name):
    query, key, value = tensors()
    mask = torch.rand(2, 1, 3, 7, generator=torch.Generator().manual_seed(0)) < 0.7
    longer = torch.cat([mask, torch.ones(2, 1, 3, 5, dtype=torch.bool)], dim=-1)
    short, long = (attention_forward(Layer(), query, key, value, m, backend_name=name)[0] for m in (mask, longer))
    assert torch.equal(short, long)


def test_attention_that_is_not_causal():
    """Also in training, by an argument or an attribute of the layer."""
    query, key, value = tensors()
    every = torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True).transpose(1, 2)
    for layer, options in ((Layer(), {"is_causal": False}), (Layer(is_causal=False), {})):
        torch.testing.assert_close(attention_forward(layer, query, key, value, None, **options)[0], every)
        trained = attention_forward(layer, query, key.detach().requires_grad_(), value, None, **options)[0]
        assert trained.requires_grad
        torch.testing.assert_close(trained, every)


@pytest.mark.parametrize("name", ["indices", "position_bias", "cache"])
def test_what_would_be_computed_wrongly_is_refused(name):
    with pytest.raises(ValueError, match=f"does not support {name}: .*eager"):
        attention_forward(Layer(), *tensors(), None, **{name: torch.zeros(1)})
    attention_forward(Layer(), *tensors(), None, **{name: None}, position_ids=torch.zeros(1), use_cache=True)
