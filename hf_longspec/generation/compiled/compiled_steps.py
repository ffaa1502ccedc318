"""Steps of fixed shapes, compiled with `torch.compile`, and the choice of what runs the steps of a call.

[`CompiledRunner`] compiles a step in one graph that serves all prefix lengths. A length is passed as the size of an
empty tensor, which the compiler keeps symbolic: one size if all rows are equally long, one for each row otherwise. In
large batches of different lengths, the lengths stay in a tensor, and attention masks the slots beyond them. The graph
reads nothing else on the host, so no graph is built twice. `cuda_graphs.py` has the same interface for captures.
"""

from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch._dynamo.exc import TorchDynamoException
from transformers import PreTrainedModel
from transformers.utils import logging

from ...attention_backends.lengths import SeqLens
from ...attention_backends.triton.config import INSTALLED
from ..target import FixedStep
from .cuda_graphs import CapturedRunner
from .fixed_steps import LengthsInGraph, Runner
from .fused_layers import FusedRunner

logger = logging.get_logger(__name__)

# torch.compile treats sizes 0 and 1 as constants, and steps after so short a prefix are not worth a graph of their own.
SHORTEST_PREFIX = 2
# Most rows whose different lengths are passed one by one. The graph attends to each row on its own, so it grows with
# their number.
MOST_ROWS = 8
BACKEND = "inductor"
_NOT_COMPILED = (
    "%s could not be compiled in one graph (%s) and runs in eager mode. Set draft.generation_config.compile='off' to "
    "skip the attempt."
)
_FAILED = object()

# Steps that were compiled for a target or a draft serve all later calls.
_compiled: WeakKeyDictionary[torch.nn.Module, dict[tuple, Any]] = WeakKeyDictionary()


class CompiledRunner(Runner):
    """Run steps compiled. Each is compiled once per module, key and shapes."""

    compiles = True

    def lengths(self, lengths: SeqLens, room: int, capacity: int, parts: int = 1) -> LengthsInGraph | None:
        """Return how a graph gets these lengths, whose sizes stay symbolic; `None` if a prefix is too short."""
        if lengths.longest < SHORTEST_PREFIX:
            return None
        known = len(lengths.host) if lengths.is_ragged else 1
        if known > MOST_ROWS or min(lengths.host) < SHORTEST_PREFIX:
            known = 0
        sizes = [torch.empty(size, 0) for size in (lengths.host if known > 1 else (lengths.longest,))]
        for size in sizes:
            torch._dynamo.mark_dynamic(size, 0)
        return LengthsInGraph(sizes, known, (known,))

    def buffer(self, buffer: torch.Tensor) -> torch.Tensor:
        """Mark the capacity of a buffer `(B, K, capacity, D)` as symbolic, as it differs between calls; return it."""
        if not hasattr(buffer, "_dynamo_dynamic_indices"):
            torch._dynamo.mark_dynamic(buffer, 2)
        return buffer

    def __call__(self, step: FixedStep, *inputs: torch.Tensor, sizes: tuple = ()) -> Any:
        """Return `step.run(*inputs)`, or `None`, with nothing done, if it cannot be compiled.

        Inside of captures, `sizes` are those of the buffers.
        """
        functions = _compiled.setdefault(step.module, {})
        key = type(step), step.key, tuple(x.shape for x in inputs), sizes
        if key not in functions:
            # torch.compile stores, limits and searches its graphs per code object, so each key gets a copy.
            run, number = type(step).run, len(functions) + 1
            code = run.__code__.replace(co_name=f"{type(step).__name__}_{number}")
            functions[key] = torch.compile(FunctionType(code, run.__globals__), fullgraph=True, backend=BACKEND)
            logger.info("hf_longspec: compiling step %d of %s, up to a minute", number, type(step.module).__name__)
        if functions[key] is _FAILED:
            return None
        try:
            return functions[key](step, *inputs)
        except TorchDynamoException as error:
            functions[key] = _FAILED
            logger.warning(_NOT_COMPILED, type(step.module).__name__, type(error).__name__)
            return None


def runner_of(mode: str, model: PreTrainedModel, draft: torch.nn.Module, device: torch.device) -> Runner | None:
    """Return the runner of a mode for one call; `None` if steps run as they are.

    "auto" captures graphs on a GPU, as launching the kernels of a step takes longer than running them; where triton is
    installed, it is "fused". On a CPU "auto" compiles nothing, as compilation delays the first
    token by half a minute or more, which pays off in long outputs only. `device` is that of the prompts.
    """
    if mode in ("graph", "fused") and device.type != "cuda":
        raise ValueError(f"compile={mode!r} needs a CUDA device, and the model is on {device}. Choose 'compile'.")
    if mode == "fused" and not INSTALLED:
        raise ValueError("compile='fused' needs triton, which is not installed. Install it, or choose 'graph'.")
    if mode == "off" or (mode == "auto" and device.type != "cuda"):
        return None
    if device.type != "cuda":
        return CompiledRunner()
    inner: Any = {"auto": INSTALLED and FusedRunner, "fused": FusedRunner, "compile": CompiledRunner}.get(mode)
    return CapturedRunner(model, draft, inner() if inner else None)
