"""Matrix products of a few rows on CPUs, with weights that oneDNN has packed, where these are faster.

A product of one row reads its weights at the bandwidth of the memory. One of 2 to 64 rows, as in a verification, packs
the whole weight first, each time, which takes two to three times as long. oneDNN can pack a weight once. Which way is
faster depends on the shape, the number of rows and of threads, and the processor, so both are timed: each shape of a
process in its first products, as in the benchmark mode of cuDNN. Other layers of a shape are packed as soon as that
takes less time than not having packed them has cost. All packing together takes a share of the time of the loop.
Neither packing nor products that will be packed later count in [`TargetView.clock`], as later steps are without them.

Products are bound to the modules of the target and of the draft while the loop runs. What is not an exact `nn.Linear`
on plain weights keeps its own forward: quantized, offloaded and parametrized layers. The base layers of adapters are
packed.
"""

import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformers.utils import logging

from ..call import PACKED
from ..drafter import DrafterAround
from ..special_case import SpecialCase

logger = logging.get_logger(__name__)

# Rows up to which products are packed, and the smallest weight, in numbers.
MOST_ROWS, FEWEST = 64, 2**16
# Timed products of each way, after one that is not counted. One is enough if the ways differ by the factor `CLEARLY`.
SAMPLES, CLEARLY = 3, 1.4
# Time of packed products, relative to others, that decides for them.
FASTER = 0.95
# Shares of the memory and of the time of the loop that packing may take, and seconds that it may take at once. The
# loss is bounded anyway, as no weight is packed before that pays. With a share of 0.05, 66 steps of SmolLM2-135M on two
# cores took 3.8 s, and with 0.25 they took 2.9 s.
MEMORY_SHARE, TIME_SHARE, AT_ONCE = 0.25, 0.25, 0.02


@dataclass
class Times:
    """Seconds of products of a shape with a number of rows: as they are, and packed."""

    own: list[float] = field(default_factory=list)
    packed: list[float] = field(default_factory=list)
    is_known: bool = False
    gain: float = 0.0  # seconds that a packed product saves; 0 if it is not clearly faster

    def add(self, seconds: float, is_packed: bool) -> None:
        """Count a product."""
        (self.packed if is_packed else self.own).append(seconds)
        if (fewest := min(len(self.own), len(self.packed)) - 1) > 0:
            own, packed = min(self.own[1:]), min(self.packed[1:])
            self.is_known = fewest >= SAMPLES or max(own, packed) > CLEARLY * min(own, packed)
            self.gain = own - packed if packed < FASTER * own else 0.0


@dataclass
class Shape:
    """What is known of products with weights of one shape."""

    times: dict[int, Times] = field(default_factory=dict)  # by the power of two of the number of rows
    packing: float = float("inf")  # seconds of packing a weight


# By the shape of the weight, its type and the number of threads.
_shapes: dict[tuple, Shape] = {}
_products: WeakKeyDictionary[nn.Module, "Product"] = WeakKeyDictionary()
_lock = threading.Lock()


class Budget:
    """Seconds of packing in this process, and of the loops that it serves."""

    def __init__(self) -> None:
        self.spent = self.before = 0.0
        self.started = time.perf_counter()

    def begin(self) -> None:
        """Begin to count the time of a loop."""
        self.started = time.perf_counter()

    def end(self) -> None:
        """Count the time of a loop."""
        self.before += time.perf_counter() - self.started

    @property
    def is_left(self) -> bool:
        """Whether another weight may be packed now."""
        loops = self.before + time.perf_counter() - self.started
        return self.spent <= AT_ONCE + TIME_SHARE * loops


_budget = Budget()


class Product:
    """The forward of a linear layer, by a packed copy of its weight where that is faster.

    Args:
        layer (`nn.Linear`): The layer. The copy is made again if its weight has changed.
    """

    is_of_loop = True  # see `structure_of`

    def __init__(self, layer: nn.Linear):
        self.weight, self.bias, self.thread = layer.weight, layer.bias, 0
        self.state: tuple = ()
        self.packed: torch.Tensor | None = None
        self.sums = torch.tensor([])  # of the weight that was packed
        self.lost = 0.0  # seconds that packing would have saved so far

    def bind(self, steps: Any) -> None:
        """Prepare for the thread that calls, and drop a copy of weights that have changed since.

        Time that later products do not take is added to `steps.seconds`, see [`Steps`].
        """
        self.thread, self.steps = threading.get_ident(), steps
        weight, threads = self.weight, torch.get_num_threads()
        self.clock = time.thread_time if threads == 1 else time.perf_counter  # as `TargetView.clock`
        state = weight.data_ptr(), weight._version, threads
        # fused optimizers, and what writes to `weight.data` as adapters do when they are merged, count no version
        if state != self.state or (self.packed is not None and not torch.equal(sums_of(weight), self.sums)):
            self.state, self.packed, self.lost = state, None, 0.0
        key = *weight.shape, weight.dtype, self.bias is None, threads
        self.shape = _shapes.setdefault(key, Shape())

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.numel() // x.shape[-1]
        fits = 0 < rows <= MOST_ROWS and x.dtype == self.weight.dtype and x.is_contiguous()
        if not fits or threading.get_ident() != self.thread or self.weight._version != self.state[1]:
            return nn.functional.linear(x, self.weight, self.bias)
        times = self.shape.times.get(rows.bit_length())
        if times is None or not times.is_known:
            return self._timed(x, self.shape.times.setdefault(rows.bit_length(), Times()))
        if gain := times.gain:
            if self.packed is not None:
                return self._packed(x)
            self.lost += gain
            if self.lost >= self.shape.packing:
                self._pack()
            if self.lost > 0:  # there is room for a copy
                self.steps.seconds += gain
        return nn.functional.linear(x, self.weight, self.bias)

    def _timed(self, x: torch.Tensor, times: Times) -> torch.Tensor:
        """Return a product by the way that was timed less often, and add its time."""
        is_packed = len(times.packed) < len(times.own) and (self.packed is not None or self._pack())
        if not is_packed and len(times.own) > SAMPLES:
            return nn.functional.linear(x, self.weight, self.bias)
        started = self.clock()
        result = self._packed(x) if is_packed else nn.functional.linear(x, self.weight, self.bias)
        seconds = self.clock() - started
        times.add(seconds, is_packed)
        self.steps.seconds += seconds - min(times.own + times.packed)
        return result

    def _packed(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return result

    def _pack(self) -> bool:
        """Pack the weight, and return whether there was time and room for it."""
        if not _budget.is_left:
            return False
        if not _has_room(self.weight.nbytes):
            self.lost = -float("inf")
            return False
        started = self.clock()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), None)
        self.sums = sums_of(self.weight)
        seconds = self.clock() - started
        _budget.spent += seconds
        self.steps.seconds += seconds
        self.shape.packing = min(self.shape.packing, seconds)
        return True


def sums_of(weight: torch.Tensor) -> torch.Tensor:
    """Return sums of the bits of a weight, which differ after a change of it. They take half the time of a product."""
    words = weight.detach().flatten().view(torch.int64 if weight.nbytes % 8 == 0 else torch.int16)
    return words.view(math.gcd(words.numel(), 64), -1).sum(1)


def packed_bytes() -> int:
    """Return the bytes of all packed weights."""
    return sum(product.weight.nbytes for product in list(_products.values()) if product.packed is not None)


def _has_room(more: int) -> bool:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    return packed_bytes() + more <= MEMORY_SHARE * memory


def packable(module: nn.Module) -> bool:
    """Return whether a module is a linear layer on plain weights that oneDNN packs."""
    if type(module) is not nn.Linear or "forward" in vars(module) or module._compiled_call_impl is not None:
        return False
    weight, bias = module.weight, module.bias
    types = [torch.float32] + [torch.bfloat16] * torch.ops.mkldnn._is_mkldnn_bf16_supported()
    parts = [part for part in (weight, bias) if part is not None]
    is_plain = all(type(part) is nn.Parameter and type(part.data) is torch.Tensor for part in parts)
    return (
        is_plain
        and weight.device.type == "cpu"
        and weight.dtype in types
        and (bias is None or bias.dtype == weight.dtype)
        and weight.is_contiguous()
        and weight.numel() >= FEWEST
        and not weight.is_inference()
    )


@contextmanager
def packed_products(steps: Any, *models: nn.Module) -> Iterator[None]:
    """Bind the products of models that this thread runs while the context is open, for the [`Steps`] of a target."""
    bound: list[tuple[nn.Module, Any]] = []
    before = packed_bytes()
    _budget.begin()
    try:
        for module in (module for model in models for module in model.modules()):
            if packable(module):
                with _lock:
                    product = _products.get(module)
                    if product is None or product.weight is not module.weight:
                        product = _products[module] = Product(module)  # type: ignore[arg-type]
                product.bind(steps)
                vars(module)["forward"] = product
                bound.append((module, product))
        yield
    finally:
        _budget.end()
        for module, product in bound:
            if vars(module).get("forward") is product:
                del vars(module)["forward"]
        if (now := packed_bytes()) > before:
            logger.info("%d MiB of weights have packed copies, as that is faster; compile='off' keeps none", now >> 20)


def are_bound() -> bool:
    """Return whether products may be bound: nothing else watches or changes the operations of torch."""
    return not (
        torch.is_autocast_enabled("cpu")
        or torch.are_deterministic_algorithms_enabled()
        or torch.get_float32_matmul_precision() != "highest"
        or _get_current_function_mode_stack()
        or _get_current_dispatch_mode_stack()
        or not torch.backends.mkldnn.is_available()
        or not torch.backends.mkldnn.enabled
    )


class PackingDrafter(DrafterAround):
    """Run the steps of the target and of a draft with packed weights."""

    def __init__(self, inner: Any, *models: nn.Module):
        super().__init__(inner)
        self._models = models

    @contextmanager
    def attention(self) -> Iterator[None]:
        """Open the context of the other drafter, in which products are bound."""
        with self.inner.attention(), packed_products(self.inner.binding.target.steps, *self._models):
            yield


class PackedProducts(SpecialCase):
    """Calls on a CPU with a target that is large enough."""

    case = PACKED

    def drafter(self, inner: Any, session: Any) -> Any:
        """Return the drafter of a [`Session`], whose loop runs with packed weights."""
        if not are_bound():
            return inner
        views = (getattr(inner, name, None) for name in ("assistant", "stepper"))
        others = [view.model for view in views if view is not None]
        return PackingDrafter(inner, session.target.model, getattr(inner, "draft", session.draft), *others)
