"""Compile functions of fixed shapes with `torch.compile`, in one graph each that serves all prefix lengths.

A length is passed as the size of an empty tensor, which the compiler keeps symbolic: one size if all rows are equally
long, one for each row otherwise. In large batches of different lengths, the lengths stay in a tensor, and attention
masks the slots beyond them. The graph reads nothing else on the host, so no graph is built twice.
"""

from collections.abc import Callable
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch._dynamo.exc import TorchDynamoException
from transformers.utils import logging

from .row_lengths import RowLengths

logger = logging.get_logger(__name__)

# torch.compile treats sizes 0 and 1 as constants, and steps after so short a prefix are not worth a graph of their own.
SHORTEST_PREFIX = 2
# Most rows whose different lengths are passed one by one. The graph attends to each row on its own, so it grows with
# their number.
MOST_ROWS = 8
BACKEND = "inductor"
_NOT_COMPILED = (
    "%s could not be compiled in one graph (%s), so it runs as it is. Set draft.generation_config.compile to 'off' to "
    "skip the attempt."
)
_FAILED = object()

# Functions that were compiled for a target or a draft serve all later calls.
_compiled: WeakKeyDictionary[torch.nn.Module, dict[tuple, Any]] = WeakKeyDictionary()


class CompiledRunner:
    """Run functions compiled. Each is compiled once per module and shape."""

    def takes(self, rows: RowLengths) -> bool:
        """Return whether steps after prefixes of these lengths are compiled."""
        return rows.longest >= SHORTEST_PREFIX

    def knows(self, rows: RowLengths) -> int:
        """Return how many lengths are passed as sizes: 1 for all rows, the batch size for one each, or 0."""
        if rows.equal_length is not None:
            return 1
        return rows.batch_size if rows.batch_size <= MOST_ROWS and min(rows.host) >= SHORTEST_PREFIX else 0

    def sizes(self, rows: RowLengths, nodes: int, capacity: int) -> list[torch.Tensor]:
        """Return empty tensors whose first sizes are these lengths, or the longest. The sizes stay symbolic."""
        carriers = [torch.empty(length, 0) for length in (rows.host if self.knows(rows) > 1 else (rows.longest,))]
        for carrier in carriers:
            torch._dynamo.mark_dynamic(carrier, 0)
        return carriers

    def buffer(self, buffer: torch.Tensor) -> torch.Tensor:
        """Mark the capacity of a buffer `(B, K, capacity, D)` as symbolic, as it differs between calls; return it."""
        if not hasattr(buffer, "_dynamo_dynamic_indices"):
            torch._dynamo.mark_dynamic(buffer, 2)
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
        """Return `function(changing, *fixed)`, or `None`, with nothing done, if it cannot be compiled.

        Args:
            function (`Callable`): A function without a closure.
            shape (`tuple`): Hashable values; calls that differ in more than lengths differ in these.
            changing (`tuple[torch.Tensor, ...]`): Small inputs, new in every call.
            fixed (`tuple`): Modules, constants, and the buffers that are read and written.
            module (`torch.nn.Module`): Owner of the graph, which is dropped with it.
            holder (`Any`): Owner of the buffers. Not used here.
        """
        functions = _compiled.setdefault(module, {})
        key = function, shape
        if key not in functions:
            functions[key] = _in_one_graph(function, len(functions))
        if functions[key] is _FAILED:
            return None
        try:
            return functions[key](changing, *fixed)
        except TorchDynamoException as error:
            functions[key] = _FAILED
            logger.warning(_NOT_COMPILED, type(module).__name__, type(error).__name__)
            return None


def _in_one_graph(function: Callable[..., Any], number: int) -> Any:
    # torch.compile stores, limits and searches its graphs per code object, so each function gets a copy.
    code = function.__code__.replace(co_name=f"{function.__name__}_{number}")
    return torch.compile(FunctionType(code, function.__globals__), fullgraph=True, backend=BACKEND)


def known_lengths(sizes: list[torch.Tensor], known: int, rows: int, ahead: int = 0) -> tuple[int, ...] | None:
    """Return inside a compiled function the lengths of all rows plus `ahead`, or `None` if sizes do not hold them.

    Args:
        sizes (`list[torch.Tensor]`): Result of the runner's `sizes`.
        known (`int`): Result of the runner's `knows`.
        rows (`int`): Batch size.
        ahead (`int`, *optional*, defaults to 0): Number that is added to each length.
    """
    if not known:
        return None
    lengths = tuple(size.shape[0] + ahead for size in sizes)
    return lengths if known > 1 else lengths * rows


def end_of_prefixes(sizes: list[torch.Tensor], known: int) -> int | None:
    """Return inside a compiled function the end of the longest prefix, or `None` if each row is cut on its own."""
    return None if known > 1 else sizes[0].shape[0]
