"""Products of a few rows with weights that oneDNN has packed: their results, where they run, and what they leave."""

import itertools
import threading
from itertools import zip_longest
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hf_longspec import NgramDraftModel, PlainDraftModel
from hf_longspec.generation import call
from hf_longspec.generation.special_cases import packed_products as module
from hf_longspec.generation.special_cases.gate import GatedDrafter
from hf_longspec.generation.special_cases.packed_products import Product, Times, are_bound, packable, packed_products
from hf_longspec.generation.target import Steps, TargetView
from hf_longspec.generation.target_modules import structure_of
from tests.tiny_targets import RandomTreeDraftModel, generate, random_longspec_draft, tiny_target
from tests.user_objects import Recorder
from tests.watching import after

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # of sums in another order, relative


@pytest.fixture
def small(monkeypatch):
    """Packs the layers of tiny targets, too, and takes packed products to be faster once they are timed."""
    monkeypatch.setattr(call, "LARGE", 1)
    monkeypatch.setattr(module, "FEWEST", 1)
    monkeypatch.setattr(module, "_shapes", {})
    monkeypatch.setattr(module, "AT_ONCE", 60.0)
    monkeypatch.setattr(Times, "gain", property(lambda times: 1.0, lambda *_: None))


@pytest.fixture
def packed(monkeypatch):
    """The rows of all packed products."""
    rows, product = [], Product._packed

    def counted(self, x):
        rows.append(x.numel() // x.shape[-1])
        return product(self, x)

    monkeypatch.setattr(Product, "_packed", counted)
    return rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_products_are_those_of_the_layer(small, packed, dtype, bias):
    if dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this processor has no instructions for bfloat16")
    torch.manual_seed(0)
    layer = nn.Linear(37, 53, bias=bias, dtype=dtype)
    with torch.no_grad(), packed_products(Steps(), layer):
        for rows in (1, 2, 5, 17, 64):
            x = torch.randn(1, rows, 37, dtype=dtype)
            expected = nn.functional.linear(x, layer.weight, layer.bias)
            for _ in range(12):
                torch.testing.assert_close(layer(x), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        count = len(packed)
        layer(torch.randn(65, 37, dtype=dtype))
        layer(torch.randn(37, 4, dtype=dtype).T)
        assert len(packed) == count  # more rows, and rows that do not lie one after the other
    assert {*packed} == {1, 2, 5, 17, 64}


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("sampled", [False, True])
def test_texts_are_those_without(small, packed, name, sampled):
    model = tiny_target(name)
    options = {"max_new_tokens": 30, "do_sample": sampled}
    plain = PlainDraftModel.from_target(model)
    plain.generation_config.compile = "off"
    expected = generate(model, plain, **options)
    assert not packed
    for draft in (RandomTreeDraftModel.from_target(model), NgramDraftModel.from_target(model)):
        draft.generation_config.gate = False
        assert torch.equal(generate(model, draft, **options), expected)
    assert len(packed) > 100


def test_drafts_run_packed_too(small, packed):
    model = tiny_target("llama")
    draft = random_longspec_draft(model)
    assert torch.equal(generate(model, draft, max_new_tokens=20), generate(model, max_new_tokens=20))
    assert any(layer in module._products for layer in draft.modules())


def test_the_target_is_left_as_it_was(small):
    model = tiny_target("llama")
    draft = NgramDraftModel.from_target(model)
    before = structure_of(model)

    class Failing(Recorder):
        def put(self, value):
            super().put(value)
            if len(self.puts) == 5:
                assert structure_of(model) == before  # also while products are bound
                assert any("forward" in vars(layer) for layer in model.modules())
                raise KeyError

    with pytest.raises(KeyError):
        generate(model, draft, streamer=Failing(), lengths=(9,))
    assert not any("forward" in vars(layer) for layer in model.modules())


def in_place(model):
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                layer.weight.mul_(-1.5)


def one_number(model):
    """As adapters are merged: torch counts no version of what is written to `data`."""
    weights = [layer.weight for layer in model.modules() if isinstance(layer, nn.Linear)]
    versions = [weight._version for weight in weights]
    for weight in weights:
        weight.data[1, 2] = 9.0
    assert versions == [weight._version for weight in weights]


def fused_step(model):
    """A step of the optimizer that transformers trains with, which counts no version."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.3, fused=True)
    model(torch.ones(1, 9, dtype=torch.long)).logits.logsumexp(-1).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("change", [in_place, one_number, fused_step], ids=lambda change: change.__name__)
def test_changed_weights_are_packed_again(small, packed, change):
    model = tiny_target("llama")
    draft = NgramDraftModel.from_target(model)
    first = generate(model, draft)
    assert packed
    change(model)
    expected = generate(model)
    packed.clear()
    assert not torch.equal(first, expected) and torch.equal(generate(model, draft), expected) and packed


def test_other_threads_run_the_layers_own_products(small, packed):
    layer, x = nn.Linear(8, 8), torch.randn(2, 8)
    with torch.no_grad(), packed_products(Steps(), layer):
        for _ in range(12):
            layer(x)
        count, thread = len(packed), threading.Thread(target=lambda: layer(x))
        thread.start()
        thread.join()
        assert len(packed) == count > 0


class OwnLinear(nn.Linear):
    pass


def with_own_forward():
    layer = nn.Linear(8, 8)
    layer.forward = lambda x: x
    return layer


@pytest.mark.parametrize(
    "make",
    [
        lambda: OwnLinear(8, 8),
        with_own_forward,
        lambda: nn.Linear(8, 8, dtype=torch.float64),
        lambda: nn.Linear(8, 8, device="meta"),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
    ],
    ids=["subclass", "own forward", "float64", "meta", "parametrized"],
)
def test_other_layers_keep_their_own(small, make):
    assert packable(nn.Linear(8, 8)) and not packable(make())


def test_nothing_is_packed_beside_what_watches_operations(small):
    with torch.autocast("cpu", torch.bfloat16):
        assert not are_bound()
    with torch.utils.flop_counter.FlopCounterMode(display=False):
        assert not are_bound()
    assert are_bound()


def test_memory_is_bounded(small, packed, monkeypatch):
    monkeypatch.setattr(module, "MEMORY_SHARE", 0.0)
    model = tiny_target("llama")
    assert torch.equal(generate(model, NgramDraftModel.from_target(model)), generate(model)) and not packed


def test_packing_takes_a_share_of_the_time(small, packed, monkeypatch):
    """Nothing is packed while earlier packing has taken more than its share of the loops so far."""
    budget = module.Budget()
    budget.spent = 61.0
    monkeypatch.setattr(module, "_budget", budget)
    layers, x = [nn.Linear(8, 8) for _ in range(12)], torch.randn(2, 8)
    with torch.no_grad(), packed_products(Steps(), *layers):
        for layer in layers:
            layer(x)
        assert not packed and [len(times.own) for times in module._shapes[8, 8, x.dtype, False, 1].times.values()] == [
            4
        ]
        budget.before += 21.0
        for layer in layers:
            layer(x)
        assert packed


@pytest.fixture
def ticking(monkeypatch):
    """Times that grow by a second whenever they are read."""
    tick = itertools.count().__next__
    monkeypatch.setattr(module, "time", SimpleNamespace(thread_time=tick, perf_counter=tick))
    monkeypatch.setattr(module, "_budget", module.Budget())


def test_what_later_steps_do_not_take_is_not_their_time(small, ticking):
    """Packing takes a second, and products that will be packed a second too much."""
    steps, layers, x = Steps(), [nn.Linear(8, 8) for _ in range(2)], torch.randn(2, 8)
    with torch.no_grad(), packed_products(steps, *layers):
        first, second = layers
        for _ in range(8):
            first(x)
        (shape,) = module._shapes.values()
        assert shape.times[2].is_known and steps.seconds == shape.packing == 1  # equal products, timed four times each
        shape.packing = 2.5
        for count in (2, 3):
            second(x)
            assert steps.seconds == count
        second(x)
        assert steps.seconds == 5 and module._products[second].packed is not None
        second(x)
        assert steps.seconds == 5


def test_a_weight_that_has_no_room_costs_its_time(small, ticking, monkeypatch):
    steps, layers, x = Steps(), [nn.Linear(8, 8) for _ in range(2)], torch.randn(2, 8)
    with torch.no_grad(), packed_products(steps, *layers):
        for _ in range(8):
            layers[0](x)
        monkeypatch.setattr(module, "MEMORY_SHARE", 0.0)
        before = steps.seconds
        for _ in range(4):
            layers[1](x)
        assert steps.seconds == before and module._products[layers[1]].packed is None


def test_the_gate_reads_a_clock_without_it(small, ticking, monkeypatch):
    clocks = []
    after(monkeypatch, GatedDrafter, "__init__", lambda _, drafter, *__: clocks.append(drafter._clock))
    generate(model := tiny_target("llama"), NgramDraftModel.from_target(model))
    target = clocks[0].__self__
    assert isinstance(target, TargetView) and target.steps.seconds >= 1


def test_products_that_differ_clearly_are_timed_twice():
    def timed(own, packed):
        times = Times()
        for pair in zip_longest(own, packed):
            for is_packed, seconds in enumerate(pair):
                if seconds is not None:
                    times.add(seconds, bool(is_packed))
        return times

    assert not timed([9.0, 2.0], [9.0]).is_known
    assert timed([9.0, 2.0], [9.0, 1.0]).is_known
    assert not timed([9.0, 2.0], [9.0, 1.9]).is_known
    assert timed([9.0, 2.0, 2.0, 2.0], [9.0, 1.9, 1.9, 1.9]).is_known
    assert timed([9.0, 2.0, 2.0, 2.0], [9.0, 1.0, 1.0, 1.0]).gain == 1.0


def test_packing_waits_until_it_pays(small):
    """A weight that is not needed for timing is packed when not packing it has cost as much."""
    layers, x = [nn.Linear(8, 8) for _ in range(12)], torch.randn(2, 8)
    with torch.no_grad(), packed_products(Steps(), *layers):
        for layer in layers[:-1]:
            layer(x)
        (shape,) = module._shapes.values()
        shape.packing, late = 3.5, module._products[layers[-1]]
        assert shape.times[2].is_known and late.packed is None
        for _ in range(3):
            layers[-1](x)
        assert late.packed is None
        layers[-1](x)
        assert late.packed is not None
