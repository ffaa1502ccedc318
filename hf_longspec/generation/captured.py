"""Capture functions of fixed shapes as CUDA graphs, once per cache and bucket of lengths, and replay them.

A graph holds addresses, so small inputs are copied into its own tensors. Kernels read the lengths on the device, and
buffers are read up to the next power of two.

`capture` contains all calls of CUDA. It follows the documentation and has never run on a GPU.
"""

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch

from .row_lengths import RowLengths

SMALLEST_BUCKET = 1024
WARM_UP = 3

# A graph is bound to the buffers of one cache or drafter, and is dropped with it.
_captured: WeakKeyDictionary[Any, dict[tuple, "CapturedFunction"]] = WeakKeyDictionary()


class CapturedRunner:
    """Run functions as captured graphs.

    Args:
        inner ([`CompiledRunner`], *optional*): Compiles the functions before they are captured.
    """

    def __init__(self, inner: Callable[..., Any] | None = None):
        self.inner = inner

    def takes(self, rows: RowLengths) -> bool:
        """Return `True`: any prefix can be captured."""
        return True

    def knows(self, rows: RowLengths) -> int:
        """Return 0: a captured graph would reuse the lengths it was captured with, so none is passed as a size."""
        return 0

    def sizes(self, rows: RowLengths, nodes: int, capacity: int) -> list[torch.Tensor]:
        """Return one empty tensor whose first size plus `nodes` is the bucket of these lengths."""
        return [torch.empty(bucket(rows.longest + nodes, capacity) - nodes, 0)]

    def buffer(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the buffer unchanged."""
        return buffer

    def __call__(
        self,
        function: Callable[..., Any],
        shape: tuple,
        changing: tuple[torch.Tensor, ...],
        fixed: tuple,
        module: torch.nn.Module,
        holder: Any,
    ) -> Any:
        """Return `function(changing, *fixed)`. The next call overwrites the result. See [`CompiledRunner`]."""
        graphs = _captured.setdefault(holder, {})
        addresses = tuple(x.data_ptr() for x in _tensors(fixed) if x.numel())
        sizes = tuple(x.shape for x in _tensors(fixed))
        key = (function, shape, sizes, addresses)
        if key not in graphs:

            def run(inputs: tuple[torch.Tensor, ...]) -> Any:
                if self.inner is None:
                    return function(inputs, *fixed)
                return self.inner(function, (shape, sizes), inputs, fixed, module, holder)

            graphs[key] = CapturedFunction(run, changing)
        return graphs[key](changing)


class CapturedFunction:
    """Replay one graph on inputs that are copied into its own tensors.

    Args:
        function (`Callable`): A function of a tuple of tensors. It must be idempotent, as it runs several times before
            it is captured.
        inputs (`tuple[torch.Tensor, ...]`): Inputs of the first call, which decide the shapes.
    """

    def __init__(self, function: Callable[..., Any], inputs: tuple[torch.Tensor, ...]):
        self.inputs = tuple(x.clone() for x in inputs)
        self.outputs, self.replay = capture(lambda: function(self.inputs))

    def __call__(self, inputs: tuple[torch.Tensor, ...]) -> Any:
        for own, new in zip(self.inputs, inputs, strict=True):
            own.copy_(new)
        self.replay()
        return self.outputs


def capture(function: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
    """Capture a function without arguments; return its outputs and a function that computes them again in place."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):  # kernels are compiled and chosen before the capture, which allows neither
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = function()
    return outputs, graph.replay


def bucket(length: int, capacity: int) -> int:
    """Return the number of slots that a graph reads for `length` used ones: a power of two, at most `capacity`.

    >>> [bucket(length, 5000) for length in (5, 1024, 1025, 4097)]
    [1024, 1024, 2048, 5000]
    """
    return min(capacity, max(SMALLEST_BUCKET, 1 << (length - 1).bit_length()))


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [x for part in value for x in _tensors(part)] if isinstance(value, list | tuple) else []
