"""Which kernel multiplies weights of 4 bits on a GPU, on the simulated device and with a module in place of gemlite.

Where gemlite is installed, its own kernels run in Triton's interpreter and are compiled for sm_90.
"""

import importlib.util
import json
import logging
import math
import os
import sys
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from hf_longspec import SpecAttnDraftModel
from hf_longspec.attention_backends.triton.config import triton
from hf_longspec.modeling.shared import low_bit_products
from hf_longspec.modeling.shared.draft_weights import LowBitLinear
from hf_longspec.modeling.shared.low_bit_products import (
    GROUP,
    GROUPS_OF_SPLIT,
    GemliteProduct,
    Int4Product,
    chosen_products,
    gemlite_product,
    random_vectors,
    random_weights,
    rotated,
)
from tests.simulated_cuda import REPLACED, SimulatedCuda
from tests.simulated_kernels import KERNELS
from tests.tiny_targets import tiny_prompts, tiny_target

pytest.importorskip("triton", reason="captured steps need Triton's kernels")
from tests.generation.test_on_simulated_cuda import simulated

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
TORCH_OP = "aten::_weight_int4pack_mm"
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "vocab_size": 24}
REMEMBERED = (low_bit_products.ratio, low_bit_products._why_not_imported)
REMEMBERED += (low_bit_products.logger.warning_once.__func__,)
FREE = {"gate": False, "check_target": False, "sparse_min_tokens": 8, "num_assistant_tokens": 3}


class Linear:
    """`GemLiteLinear`, with two weights in a byte."""

    def __init__(self, bits, group, columns, rows, input_dtype, output_dtype):
        assert (bits, input_dtype, output_dtype) == (4, "bf16", "fp32")
        self.group, self.size = group, (rows, columns)

    def pack(self, values, scales, middle):
        assert values.dtype == torch.uint8 and scales.dtype == torch.bfloat16 and values.shape == self.size
        packed = values[:, ::2] | values[:, 1::2] << 4
        self.tensors = packed.T.contiguous(), scales.T.contiguous(), values.new_full((), middle)

    def get_tensor_args(self):
        return list(self.tensors)

    def get_meta_args(self):
        return [self.group]


def multiply(x, bias, tensors, numbers):
    """`forward_functional`."""
    (packed, scales, middle), (group,) = tensors, numbers
    values = torch.stack([packed & 15, packed >> 4], 1).flatten(0, 1)
    scales = scales[: len(values) // group].repeat_interleave(group, 0, output_size=len(values))
    weight = (values.to(torch.bfloat16) - middle.to(torch.bfloat16)) * scales
    return x.float() @ weight.float()


def failing(*args):
    raise RuntimeError("no kernel image is available\nfor this device")


# What stands in place of gemlite's product.
PRODUCTS = {
    "right": multiply,
    "fails": failing,
    "wrong": lambda x, *args: multiply(x.roll(1, -1), *args),
    "NaN": lambda x, *args: multiply(x, *args) * math.nan,
}


def forget():
    for function in REMEMBERED:
        function.cache_clear()


@pytest.fixture(autouse=True)
def nothing_measured():
    forget()
    yield
    forget()


@pytest.fixture
def installed(monkeypatch):
    """Put a module in place of gemlite, with one of the products."""

    def install(product="right"):
        types = SimpleNamespace(BF16="bf16", FP32="fp32")
        parts = {"DType": types, "GemLiteLinear": Linear, "forward_functional": PRODUCTS[product]}
        module = ModuleType("gemlite")
        vars(module).update(parts, __spec__=SimpleNamespace())
        monkeypatch.setitem(sys.modules, "gemlite", module)

    return install


@contextmanager
def device_with(launches):
    """The simulated device, whose product of torch for 4 bits takes so many launches, and as much time."""
    kernels = KERNELS | {TORCH_OP: (REPLACED["_weight_int4pack_mm"], launches)}
    with SimulatedCuda(kernels=kernels) as cuda:
        yield cuda


FAST, SLOW = 1000, 1  # launches of torch's product, beside which the other one is fast or slow


@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize(
    ("product", "launches", "kind", "message"),
    [
        ("right", FAST, GemliteProduct, ""),
        ("right", SLOW, Int4Product, ""),
        ("fails", FAST, Int4Product, "128 x 256, 3 vectors, but torch's: no kernel image is available"),
        ("wrong", FAST, Int4Product, "its products differ from torch's by 1."),
        ("NaN", FAST, Int4Product, "its products differ from torch's by nan"),
    ],
)
def test_the_faster_kernel_is_chosen_if_it_is_right(installed, caplog, product, launches, kind, message, is_captured):
    installed(product)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    with caplog.at_level(logging.WARNING), device_with(launches) as cuda:
        assert chosen_products([(128, 256)] * 2, {(3, is_captured)}, CUDA) == {(128, 256): kind}
        assert bool(cuda.graphs or cuda.replays) == (is_captured and not message)
        spent = cuda.launches.total()
        chosen_products([(128, 256)], {(3, is_captured)}, CUDA)  # once in a process
        assert cuda.launches.total() == spent
    assert message in caplog.text and bool(message) == bool(caplog.records)
    assert "for this device" not in caplog.text
    assert torch.equal(torch.get_rng_state(), state)  # the user's random numbers are not touched


def test_a_kernel_is_chosen_for_all_numbers_of_vectors(installed, monkeypatch):
    """By the mean of the ratios; one that fails for a number of vectors is not used."""
    installed()
    ratios = {1: 0.4, 8: 1.5, 64: math.inf}
    monkeypatch.setattr(low_bit_products, "ratio", lambda rows, columns, vectors, *_: ratios[vectors])
    for vectors, kind in (
        ((1,), GemliteProduct),
        ((8,), Int4Product),
        ((1, 8), GemliteProduct),
        ((1, 64), Int4Product),
    ):
        found = chosen_products([(64, 128)], [(count, True) for count in vectors], CUDA)
        assert found == {(64, 128): kind}, vectors


def test_where_gemlite_is_not_tried(installed, monkeypatch, caplog):
    """On a CPU, without the package, where it cannot be imported, and where results must not depend on an order."""
    monkeypatch.setattr(low_bit_products, "ratio", lambda *_: 0.1)
    chosen = lambda device: chosen_products([(64, 128)], [(1, True)], device)[64, 128]  # noqa: E731
    installed()
    assert chosen(CUDA) is GemliteProduct and chosen(CPU) is Int4Product
    torch.use_deterministic_algorithms(True)
    try:
        assert chosen(CUDA) is Int4Product
    finally:
        torch.use_deterministic_algorithms(False)
    forget()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING):
        assert chosen(CUDA) is Int4Product and not caplog.records
        forget()
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
        monkeypatch.setitem(sys.modules, "gemlite", None)  # what makes its import fail
        assert chosen(CUDA) is Int4Product
    assert "gemlite cannot be imported: " in caplog.text


def drafted(target, steps, prompts, monkeypatch, of_gemlite):
    """The text and tau of a draft on the simulated device, and its copy of the target."""
    monkeypatch.setattr(low_bit_products, "ratio", lambda *_: 0.5 if of_gemlite else 2.0)
    draft = SpecAttnDraftModel.from_target(target, draft_weights="int4", **FREE)
    draft.generation_config.compile = steps
    with simulated() as cuda:
        model, (ids, mask) = cuda.place(target), cuda.place(prompts)
        how = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
        text = cuda.fetch(model.generate(ids, assistant_model=draft, **how))
        copied = draft.weights_for(model, len(mask), steps != "off")
        layers = [module for module in copied.modules() if isinstance(module, LowBitLinear)]
        assert {type(layer.product) for layer in layers} == {GemliteProduct if of_gemlite else Int4Product}
        assert bool(cuda.replays) == (steps != "off")
        for layer in layers:  # one layout alone is kept
            values = layer.product.weight().numel()
            assert layer.packed.nbytes == values // 2
            assert sum(x.nbytes for x in layer.buffers() if x is not layer.packed) < values // 2
        first = copied.model.layers[0].mlp.up_proj
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight.mul_(2)
        renewed = draft.weights_for(model, len(mask), steps != "off").model.layers[0].mlp.up_proj
        assert type(renewed.product) is type(first.product)
        assert torch.equal(cuda.fetch(renewed.weight), 2 * cuda.fetch(first.weight))
    return text, draft.last_speculation


@pytest.mark.parametrize("steps", ["off", "graph"])
def test_texts_and_tau_do_not_depend_on_the_kernel(installed, monkeypatch, caplog, steps):
    installed()
    prompts = tiny_prompts(24, [31, 9])
    expected = tiny_target("llama", **SIZES).generate(
        prompts[0], attention_mask=prompts[1], max_new_tokens=12, do_sample=False, pad_token_id=0
    )
    counts = []
    for of_gemlite in (True, False):
        text, stats = drafted(tiny_target("llama", **SIZES), steps, prompts, monkeypatch, of_gemlite)
        assert torch.equal(text, expected)
        counts.append((stats.num_spec_steps, stats.num_accepted_draft_tokens))
    assert counts[0] == counts[1] and counts[0][1] > 0
    assert "could not be captured" not in caplog.text


def test_a_copy_is_made_again_for_another_choice_alone(installed, monkeypatch):
    """Another number of rows makes another copy if it changes what multiplies; the numbers before it count, too."""
    installed()
    ratios = {1: 0.4, 2: 0.6, 8: 9.0}
    monkeypatch.setattr(low_bit_products, "ratio", lambda rows, columns, vectors, *_: ratios[vectors])
    target = tiny_target("llama", **SIZES)
    draft = SpecAttnDraftModel.from_target(target, draft_weights="int4", **FREE)
    with simulated() as cuda:
        model = cuda.place(target)
        copies = [draft.weights_for(model, rows) for rows in (1, 2, 8, 1)]
        kinds = [type(copied.model.layers[0].mlp.up_proj.product) for copied in copies]
    assert kinds == [GemliteProduct, GemliteProduct, Int4Product, Int4Product]
    assert copies[0] is copies[1] and copies[2] is copies[3] is not copies[1]


def test_matrices_that_are_timed_fill_the_caches(monkeypatch):
    product = Int4Product(*random_weights(64, 128, CPU))
    properties = SimpleNamespace(L2_cache_size=5 * product.packed.nbytes)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert len({one.packed.data_ptr() for one in rotated(product)}) == 10
    properties.L2_cache_size = 10**9
    assert len(rotated(product)) == 64


@pytest.mark.parametrize("columns", [128, 64 * (GROUPS_OF_SPLIT - 1), 64 * GROUPS_OF_SPLIT])
def test_scales_end_with_zeros(installed, columns):
    """As gemlite's kernels read scales after the last ones: to the end of a split, and of a block of rows."""
    installed()
    scales, groups = GemliteProduct(*random_weights(64, columns, CPU)).scales, columns // GROUP
    assert scales[:groups].all() and not scales[groups:].any()
    assert len(scales) > groups and len(scales) % GROUPS_OF_SPLIT == 0


def test_the_operator_can_be_compiled(installed):
    installed()
    product, x = GemliteProduct(*random_weights(64, 128, CPU)), random_vectors(3, 128, CPU)
    tensors = [product.packed, product.scales, product.other_0]
    torch.library.opcheck(gemlite_product, (x, tensors, product.numbers))
    compiled = torch.compile(lambda x: product(x).to(x.dtype) + 1, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), product(x).to(x.dtype) + 1)


# -- gemlite itself, where it is installed


def needs_gemlite():
    if importlib.util.find_spec("gemlite") is None:
        pytest.skip("gemlite is not installed")


@pytest.mark.parametrize(("rows", "columns", "vectors"), [(64, 128, 1), (192, 192, 3), (64, 128, 5), (128, 320, 8)])
def test_products_of_gemlite_in_the_interpreter(rows, columns, vectors):
    """In float32, as the interpreter multiplies numbers in bfloat16 wrongly."""
    needs_gemlite()
    if vectors > 4 and tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9):
        pytest.skip("older interpreters refuse the numbers in a mask of gemlite's other kernel")
    from tests.attention_backends.triton.machine import language_listed_once
    from tests.modeling.shared.gemlite_without_gpu import without_gpu

    rounded, scales = random_weights(rows, columns, CPU)
    x = random_vectors(vectors, columns, CPU).float()
    exact = x.double() @ (rounded.double() * scales.double().repeat_interleave(GROUP, 1)).T
    with language_listed_once(), without_gpu():
        from gemlite import DType, GemLiteLinear

        product = GemliteProduct(rounded, scales)
        assert torch.equal(product.weight(), Int4Product(rounded, scales).weight())
        in_float32 = GemLiteLinear(4, GROUP, columns, rows, input_dtype=DType.FP32, output_dtype=DType.FP32)
        in_float32.pack((rounded + 8).to(torch.uint8), scales, 8)
        product.numbers = in_float32.get_meta_args()
        # what lies after the scales is read and must not count
        memory = torch.full((2 * GROUPS_OF_SPLIT * len(product.scales), rows), math.nan)
        memory[: len(product.scales)] = 0
        memory[: columns // GROUP] = scales.T
        product.scales = memory[: len(product.scales)]
        found = product(x)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=columns * 2**-24 * exact.abs().max().item())


def compiled_kernels(profile, folder):
    needs_gemlite()
    from tests.attention_backends.triton.machine import ROOT, python

    installed = Path(importlib.util.find_spec("gemlite").origin).parents[1]
    paths = {"PYTHONPATH": f"{ROOT}{os.pathsep}{installed}", "TRITON_CACHE_DIR": str(folder)}
    lines = python(Path(__file__).with_name("gemlite_without_gpu.py"), profile, **paths).splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def check_compiled(profile, shapes, folder):
    found = compiled_kernels(profile, folder)
    kernels = {1: "gemv_INT_revsplitK_kernel", 8: "gemm_splitK_INT_kernel"}
    expected = [(*shape, vectors, kernels[vectors]) for shape in shapes for vectors in (1, 8)]
    assert [(row["rows"], row["columns"], row["vectors"], row["kernel"]) for row in found] == expected
    assert all(row["cubin"] > 0 and row["shared"] <= 227 * 1024 for row in found)


def test_kernels_of_gemlite_compile(tmp_path):
    check_compiled("short", [(4096, 4096), (576, 640)], tmp_path)


@pytest.mark.soak
def test_kernels_of_gemlite_compile_for_all_layers_of_8b(tmp_path):
    shapes = [(4096, 4096), (576, 640), (1024, 4096), (14336, 4096), (4096, 14336)]
    check_compiled("all", shapes, tmp_path)
