# Published with a draft by hf_longspec, Apache-2.0.
"""Functions of fixed shapes as CUDA graphs: captured once per cache and bucket of lengths, then replayed.

A graph holds addresses. Small inputs are therefore copied into tensors of its own; lengths are read on the device only,
by kernels that take them from there, and buffers are used up to the next power of two.

The code that talks to CUDA is `capture`; it was written from the documentation and has never run on a GPU.
"""

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch

from .generation_row_lengths import RowLengths

SMALLEST_BUCKET = 1024
WARM_UP = 3

# Graphs are bound to the buffers of one cache or drafter, and are dropped with it.
_captured: WeakKeyDictionary[Any, dict[tuple, "CapturedFunction"]] = WeakKeyDictionary()


class CapturedRunner:
    """Runs functions as captured graphs.

    Args:
        inner ([`CompiledRunner`], *optional*): Compiles the functions before they are captured.
    """

    def __init__(self, inner: Callable[..., Any] | None = None):
        self.inner = inner

    def takes(self, rows: RowLengths) -> bool:
        """Any prefix."""
        return True

    def knows(self, rows: RowLengths) -> int:
        """No length: a captured graph would repeat those it was captured with."""
        return 0

    def sizes(self, rows: RowLengths, nodes: int, capacity: int) -> list[torch.Tensor]:
        """An empty tensor whose first size, with the nodes, is the bucket of these lengths."""
        return [torch.empty(bucket(rows.longest + nodes, capacity) - nodes, 0)]

    def buffer(self, buffer: torch.Tensor) -> torch.Tensor:
        """The same buffer."""
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
        """`function(changing, *fixed)`; what it returns is overwritten by the next call. See [`CompiledRunner`]."""
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
    """One graph, with tensors of its own for the inputs.

    Args:
        function (`Callable`): Of a tuple of tensors; running it twice must leave what running it once leaves.
        inputs (`tuple[torch.Tensor, ...]`): Those of the first call.
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
    """Capture a function without arguments: its outputs, and what computes them anew."""
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
    """Slots that a graph for `length` used slots reads: the next power of two, at most the whole buffer.

    >>> [bucket(length, 5000) for length in (5, 1024, 1025, 4097)]
    [1024, 1024, 2048, 5000]
    """
    return min(capacity, max(SMALLEST_BUCKET, 1 << (length - 1).bit_length()))


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [x for part in value for x in _tensors(part)] if isinstance(value, list | tuple) else []
