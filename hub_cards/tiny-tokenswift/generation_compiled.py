# Published with a draft by hf_longspec, Apache-2.0.
"""Functions of fixed shapes through `torch.compile`, in one graph each, whatever the lengths are.

A length is handed over as the size of an empty tensor, which the compiler keeps symbolic: one size for rows that are
equally long, one for each row otherwise. In large batches lengths that differ stay in a tensor, and attention masks
what lies beyond them. Nothing else is read on the host, so no graph is built twice.
"""

from collections.abc import Callable
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch._dynamo.exc import TorchDynamoException
from transformers.utils import logging

from .generation_row_lengths import RowLengths

logger = logging.get_logger(__name__)

# Sizes 0 and 1 are constants to torch.compile; steps behind so short a prefix are not worth a graph of their own.
SHORTEST_PREFIX = 2
# Rows of different lengths are told one by one up to here: a graph attends to each on its own, and grows with them.
MOST_ROWS = 8
BACKEND = "inductor"
_NOT_COMPILED = (
    "%s could not be compiled in one graph (%s), so it runs as it is. Set draft.generation_config.compile to 'off' to "
    "skip the attempt."
)
_FAILED = object()

# What was compiled for a target or a draft serves all later calls.
_compiled: WeakKeyDictionary[torch.nn.Module, dict[tuple, Any]] = WeakKeyDictionary()


class CompiledRunner:
    """Runs functions compiled, each once per module and shape."""

    def takes(self, rows: RowLengths) -> bool:
        """Whether steps behind these prefixes are compiled."""
        return rows.longest >= SHORTEST_PREFIX

    def knows(self, rows: RowLengths) -> int:
        """How many lengths the function will be told by sizes: one for all rows, one for each, or none."""
        if rows.equal_length is not None:
            return 1
        return rows.batch_size if rows.batch_size <= MOST_ROWS and min(rows.host) >= SHORTEST_PREFIX else 0

    def sizes(self, rows: RowLengths, nodes: int, capacity: int) -> list[torch.Tensor]:
        """Empty tensors whose first sizes are these lengths, or the longest, and may be others in the next call."""
        carriers = [torch.empty(length, 0) for length in (rows.host if self.knows(rows) > 1 else (rows.longest,))]
        for carrier in carriers:
            torch._dynamo.mark_dynamic(carrier, 0)
        return carriers

    def buffer(self, buffer: torch.Tensor) -> torch.Tensor:
        """The same buffer `(B, K, capacity, D)`, its capacity not compiled in: another call has another."""
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
        """`function(changing, *fixed)`, or None, with nothing done, if it cannot be compiled.

        Args:
            function (`Callable`): A function without a closure.
            shape (`tuple`): Whatever makes calls differ in more than lengths.
            changing (`tuple[torch.Tensor, ...]`): Small inputs, new in every call.
            fixed (`tuple`): Modules, constants, and the buffers that are read and written.
            module (`torch.nn.Module`): Whom the graph belongs to, and with whom it is dropped.
            holder (`Any`): Whom the buffers belong to; of no account here.
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
    # A code object of its own: torch.compile keeps, limits and searches its graphs by code object.
    code = function.__code__.replace(co_name=f"{function.__name__}_{number}")
    return torch.compile(FunctionType(code, function.__globals__), fullgraph=True, backend=BACKEND)


def known_lengths(sizes: list[torch.Tensor], known: int, rows: int, ahead: int = 0) -> tuple[int, ...] | None:
    """Inside such a function: the lengths of all rows that sizes tell, `ahead` more each, or None."""
    if not known:
        return None
    lengths = tuple(size.shape[0] + ahead for size in sizes)
    return lengths if known > 1 else lengths * rows


def end_of_prefixes(sizes: list[torch.Tensor], known: int) -> int | None:
    """Inside such a function: where the longest prefix ends; None, for all of a buffer, if each row is cut to size."""
    return None if known > 1 else sizes[0].shape[0]
