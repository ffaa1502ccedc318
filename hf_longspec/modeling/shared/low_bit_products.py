"""Products of vectors with weights of 8 and 4 bits, and the choice between two kernels for 4 bits on a GPU.

torch has kernels for both. Those of gemlite (`pip install '.[lowbit]'`) are made for few vectors with weights of 4
bits. Where it is installed, both are timed for the shapes of a model, and the faster one's layout is kept. Both
multiply the same rounded weights, so the choice changes what is drafted by roundings of the products alone.
"""

import copy
import importlib.util
import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from statistics import mean
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad
from transformers.utils import logging

from ...attention_backends.triton.launch import LIBRARY, launching_on
from ...generation.compiled.cuda_graphs import capture

logger = logging.get_logger(__name__)

# Weights of a row that share a scale in 4 bits. In 8 bits, all of a row do.
GROUP = 64
# Tiles of the innermost dimension in a packed matrix of 4 bits on a GPU.
INNER_TILES = 8
# The number that is added to weights of 4 bits from -7 to 7, as kernels store them without a sign.
MIDDLE = 8
# Largest difference between products of both kernels, relative to the products (L2). Each of them rounds to bfloat16
# what it multiplies or returns, by half of its last of 8 bits, 2**-9; a wrong order of the weights gives more than 1.
TOLERANCE = 2**-7
# Repeats of a timing, of which the fastest counts. Each goes over so many matrices that they fill the largest cache of
# the device this many times, as the layers of a model do, or over `MOST_MATRICES`.
REPEATS, CACHES, MOST_MATRICES = 5, 2, 64
# gemlite's kernels for several vectors read scales without a mask, up to the end of the last split, which has up to so
# many groups, and of the last block of rows. They multiply it by zero, which gives NaN if it is not a finite number.
GROUPS_OF_SPLIT = 16


class LowBitProduct(nn.Module):
    """Multiply vectors with rounded weights, in bfloat16.

    Args:
        rounded (`torch.Tensor` of shape `(rows, columns)`): Multiples of the scales, whole numbers.
        scales (`torch.Tensor` of shape `(rows, groups)`): Scales of the groups of each row.
    """

    packed: torch.Tensor
    scales: torch.Tensor

    def __init__(self, rounded: torch.Tensor, scales: torch.Tensor):
        super().__init__()
        self.columns = rounded.shape[1]
        for name, tensor in zip(("packed", "scales"), self.pack(rounded, scales), strict=True):
            self.register_buffer(name, tensor, False)

    def pack(self, rounded: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weights and scales in the order of the kernels."""
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the products `(N, rows)` of vectors `(N, columns)` in bfloat16."""
        raise NotImplementedError

    def weight(self) -> torch.Tensor:
        """Return the rounded weights `(rows, columns)`."""
        return self(torch.eye(self.columns, dtype=torch.bfloat16, device=self.packed.device)).T


class Int8Product(LowBitProduct):
    """Multiply with weights of 8 bits by torch's kernels."""

    def pack(self, rounded: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rounded.to(torch.int8), scales.squeeze(-1).to(torch.bfloat16).contiguous()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.ops.aten._weight_int8pack_mm(x, self.packed, self.scales)
        return product


class Int4Product(LowBitProduct):
    """Multiply with weights from -7 to 7 by torch's kernels for 4 bits."""

    def pack(self, rounded: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values = (rounded + MIDDLE).to(torch.int32)
        if values.device.type == "cpu":
            packed: torch.Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values, 1)
        else:
            pairs = (values[:, ::2] << 4 | values[:, 1::2]).to(torch.uint8)
            packed = torch.ops.aten._convert_weight_to_int4pack(pairs, INNER_TILES)
        # for each group the scale and the value of the middle
        scales = torch.stack([scales.T, torch.zeros_like(scales.T)], -1)
        return packed, scales.to(torch.bfloat16).contiguous()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_on_cpu, aten = x.device.type == "cpu", torch.ops.aten
        multiply = aten._weight_int4pack_mm_for_cpu if is_on_cpu else aten._weight_int4pack_mm
        product: torch.Tensor = multiply(x, self.packed, GROUP, self.scales)
        return product


class GemliteProduct(LowBitProduct):
    """Multiply with weights from -7 to 7 by gemlite's kernels, which sum in float32 in no fixed order.

    The result is in float32: sums of hundreds of parts in bfloat16 would differ from torch's by more than `TOLERANCE`.
    """

    def pack(self, rounded: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        import gemlite

        (rows, columns), types = rounded.shape, gemlite.DType
        linear = gemlite.GemLiteLinear(4, GROUP, columns, rows, input_dtype=types.BF16, output_dtype=types.FP32)
        with launching_on(rounded):
            linear.pack((rounded + MIDDLE).to(torch.uint8), scales.to(torch.bfloat16), MIDDLE)
        self.numbers = list(map(int, linear.get_meta_args()))
        packed, scales, *others = (tensor.detach() for tensor in linear.get_tensor_args())
        self.others = [f"other_{place}" for place in range(len(others))]
        for name, tensor in zip(self.others, others, strict=True):
            self.register_buffer(name, tensor, False)
        end = -(-(len(scales) + 1) // GROUPS_OF_SPLIT) * GROUPS_OF_SPLIT  # one more at least, for the rows
        return packed, pad(scales, (0, 0, 0, end - len(scales)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tensors = [self.packed, self.scales, *(getattr(self, name) for name in self.others)]
        product: torch.Tensor = gemlite_product(x, tensors, self.numbers)
        return product

    def weight(self) -> torch.Tensor:
        """Return the rounded weights `(rows, columns)`, read from the packed ones: a product would be tuned first."""
        places = torch.arange(2 * self.packed.element_size(), device=self.packed.device)
        values = (self.packed[:, None] >> 4 * places[:, None] & 15).flatten(0, 1) - MIDDLE
        scales = self.scales[: self.columns // GROUP, None]
        return (values.unflatten(0, (-1, GROUP)) * scales).flatten(0, 1).T


@torch.library.custom_op(f"{LIBRARY}::gemlite_product", mutates_args=())
def gemlite_product(x: torch.Tensor, tensors: Sequence[torch.Tensor], numbers: Sequence[int]) -> torch.Tensor:
    """Return gemlite's products `(N, rows)` of vectors `(N, columns)`, in float32.

    gemlite's own operator tells the compiler that they have the dtype of the vectors.
    """
    import gemlite

    with launching_on(x):
        product: torch.Tensor = gemlite.forward_functional(x, None, list(tensors), list(numbers))
    return product


@gemlite_product.register_fake
def _(x, tensors, numbers):
    return x.new_empty(len(x), tensors[0].shape[1], dtype=torch.float32)


def chosen_products(
    shapes: Iterable[tuple[int, int]], occurred: Iterable[tuple[int, bool]], device: torch.device
) -> dict[tuple[int, int], type[LowBitProduct]]:
    """Return what multiplies matrices of 4 bits, by rows and columns.

    A matrix is kept in one layout, for all numbers of vectors: gemlite's, if it takes less time in the mean of them.

    Args:
        shapes (`Iterable[tuple[int, int]]`): Rows and columns.
        occurred (`Iterable[tuple[int, bool]]`): Numbers of vectors, each with whether steps are captured.
        device (`torch.device`): Device of the matrices.
    """
    found: dict[tuple[int, int], type[LowBitProduct]] = {}
    for shape in dict.fromkeys(shapes):
        is_faster = why_not_gemlite(device) is None and mean(ratio(*shape, *how, device) for how in occurred) < 1
        found[shape] = GemliteProduct if is_faster else Int4Product
    return found


def why_not_gemlite(device: torch.device) -> str | None:
    """Return why gemlite's kernels are not tried on a device; `None` if they are."""
    if device.type != "cuda":
        return f"device is {device.type}, expected cuda"
    if torch.are_deterministic_algorithms_enabled():
        return "deterministic algorithms are enabled in torch, and gemlite sums in no fixed order"
    return _why_not_imported()


@cache
def _why_not_imported() -> str | None:
    if importlib.util.find_spec("gemlite") is None:
        return "gemlite is not installed: pip install '.[lowbit]'"
    try:
        import gemlite  # noqa: F401
    except Exception as error:  # it asks the driver while it is imported
        reason = f"gemlite cannot be imported: {_first_line(error)}"
        logger.warning_once(f"draft_weights='int4': {reason}. torch's kernels are used.")
        return reason
    return None


@cache
def ratio(rows: int, columns: int, vectors: int, is_captured: bool, device: torch.device) -> float:
    """Return the time of gemlite's product over that of torch's; infinity if it fails or is wrong.

    Both are timed on random weights, once in a process. gemlite compiles and tunes its kernels meanwhile, which cannot
    be done in a capture.

    Args:
        rows (`int`), columns (`int`): Size of the matrix, a multiple of `GROUP` each.
        vectors (`int`): Number of vectors that it multiplies.
        is_captured (`bool`): Whether to time replays of a graph; otherwise launches count, too.
        device (`torch.device`): A GPU.
    """
    what = f"{rows} x {columns}, {vectors} vectors"
    logger.info("hf_longspec: timing two kernels for products in 4 bits of %s, up to a minute", what)
    try:
        times = dict(zip(("torch", "gemlite"), _times(rows, columns, vectors, is_captured, device), strict=True))
    except Exception as error:  # CUDA, Triton and gemlite share no class of errors
        logger.warning_once(
            f"draft_weights='int4': gemlite's kernels are not used for {what}, but torch's: {_first_line(error)}"
        )
        return math.inf
    logger.debug("products in 4 bits of %s: %s ms", what, times)
    return times["gemlite"] / times["torch"]


@torch.no_grad()
def _times(rows: int, columns: int, vectors: int, is_captured: bool, device: torch.device) -> list[float]:
    """Return the milliseconds of torch's and of gemlite's product; ValueError if they differ."""
    weights, x = random_weights(rows, columns, device), random_vectors(vectors, columns, device)
    both = [kind(*weights) for kind in (Int4Product, GemliteProduct)]
    expected, found = (product(x).float() for product in both)
    error = ((found - expected).norm() / expected.norm()).item()
    if not error <= TOLERANCE:  # also for NaN
        raise ValueError(f"its products differ from torch's by {error:.1e}, over {TOLERANCE:.1e}")
    return [milliseconds(rotated(product), x, is_captured) for product in both]


def random_weights(rows: int, columns: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights from -7 to 7 `(rows, columns)` and scales `(rows, groups)`, from a generator of their own."""
    generator = torch.Generator(device=device).manual_seed(0)
    rounded = torch.randint(-7, 8, (rows, columns), generator=generator, device=device)
    scales = torch.rand(rows, columns // GROUP, generator=generator, device=device) + 0.5
    return rounded, scales


def random_vectors(vectors: int, columns: int, device: torch.device) -> torch.Tensor:
    """Return vectors `(vectors, columns)` in bfloat16."""
    generator = torch.Generator(device=device).manual_seed(1)
    return torch.randn(vectors, columns, generator=generator, device=device).to(torch.bfloat16)


def rotated(product: LowBitProduct) -> list[LowBitProduct]:
    """Return a product and copies of it, so many that no cache of the device holds all of their weights."""
    size = getattr(torch.cuda.get_device_properties(product.packed.device), "L2_cache_size", 0)
    count = math.ceil(CACHES * size / product.packed.nbytes)
    return [product, *(copy.deepcopy(product) for _ in range(min(count, MOST_MATRICES) - 1))]


def milliseconds(products: Sequence[LowBitProduct], x: torch.Tensor, is_captured: bool) -> float:
    """Return the time of one of these products on a GPU, in the dtype of the vectors, by events.

    Args:
        products (`Sequence[LowBitProduct]`): Products with matrices of one shape.
        x (`torch.Tensor` of shape `(N, columns)`): What they multiply.
        is_captured (`bool`): Whether to time replays of a graph of all products.
    """

    def all_products() -> torch.Tensor:
        return [product(x).to(x.dtype) for product in products][-1]

    run: Callable[[], Any] = all_products
    run()  # compiles and tunes
    if is_captured:
        _, run = capture(run, x.device, nn.Module())
    times = []
    with torch.cuda.device(x.device):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(REPEATS):
            begin.record()
            run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
    return min(times) / len(products)


def _first_line(error: Exception) -> str:
    return (str(error) or repr(error)).splitlines()[0]
