"""Forwards of the target in fixed shapes, compiled with `torch.compile` or captured as CUDA graphs.

[`CompiledRunner`] compiles a function in one graph that serves all prefix lengths. A length is passed as the size of an
empty tensor, which the compiler keeps symbolic: one size if all rows are equally long, one for each row otherwise. In
large batches of different lengths, the lengths stay in a tensor, and attention masks the slots beyond them. The graph
reads nothing else on the host, so no graph is built twice.

[`CapturedRunner`] captures a function as a CUDA graph, once per cache and bucket of lengths, and replays it. A graph
holds addresses, so small inputs are copied into its own tensors. Kernels read the lengths on the device, and buffers
are read up to the next power of two. A function that cannot be captured is not tried again. `capture` contains all
calls of CUDA. It was tested on a simulated device and has never run on a GPU.

`_step` is the content of a graph. It gets the cache as buffers and lengths, and builds around them the few objects that
the model's forward expects; the attention context of a step is made again by its own class.
"""

from collections.abc import Callable
from threading import Lock
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch._dynamo.exc import TorchDynamoException
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.utils import logging

from ..attention_backends.lengths import SeqLens
from .cache import Rows
from .target_modules import logits_under, with_final_norm_input

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

    def takes(self, lengths: SeqLens) -> bool:
        """Return whether steps after prefixes of these lengths are compiled."""
        return lengths.longest >= SHORTEST_PREFIX

    def knows(self, lengths: SeqLens) -> int:
        """Return how many lengths are passed as sizes: 1 for all rows, the batch size for one each, or 0."""
        if not lengths.is_ragged:
            return 1
        rows = len(lengths.host)
        return rows if rows <= MOST_ROWS and min(lengths.host) >= SHORTEST_PREFIX else 0

    def sizes(self, lengths: SeqLens, nodes: int, capacity: int) -> list[torch.Tensor]:
        """Return empty tensors whose first sizes are these lengths, or the longest. The sizes stay symbolic."""
        carriers = [torch.empty(size, 0) for size in (lengths.host if self.knows(lengths) > 1 else (lengths.longest,))]
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


SMALLEST_BUCKET = 1024
WARM_UP = 3

_NOT_CAPTURED = (
    "A step of %s could not be captured as a CUDA graph (%s), so it runs as it is. Set "
    "draft.generation_config.compile to 'off' to skip the attempt."
)

# A graph is bound to the buffers of one cache or drafter, and is dropped with it.
_captured: WeakKeyDictionary[Any, dict[tuple, "CapturedFunction"]] = WeakKeyDictionary()
# Functions and shapes of a target or a draft that could not be captured, and are not tried again.
_not_captured: WeakKeyDictionary[torch.nn.Module, set[tuple]] = WeakKeyDictionary()
_capturing = Lock()


class CapturedRunner:
    """Run functions as captured graphs.

    Args:
        inner ([`CompiledRunner`], *optional*): Compiles the functions before they are captured.
    """

    def __init__(self, inner: Callable[..., Any] | None = None):
        self.inner = inner

    def takes(self, lengths: SeqLens) -> bool:
        """Return `True`: any prefix can be captured."""
        return True

    def knows(self, lengths: SeqLens) -> int:
        """Return 0: a captured graph would reuse the lengths it was captured with, so none is passed as a size."""
        return 0

    def sizes(self, lengths: SeqLens, nodes: int, capacity: int) -> list[torch.Tensor]:
        """Return one empty tensor whose first size plus `nodes` is the bucket of these lengths."""
        return [torch.empty(bucket(lengths.longest + nodes, capacity) - nodes, 0)]

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
        """Return `function(changing, *fixed)`, which the next call overwrites; `None` if it cannot be captured.

        See [`CompiledRunner`] for the arguments.
        """
        graphs, failed = _captured.setdefault(holder, {}), _not_captured.setdefault(module, set())
        if (function, shape) in failed:
            return None
        addresses = tuple(x.data_ptr() for x in _tensors(fixed) if x.numel())
        sizes = tuple(x.shape for x in _tensors(fixed))
        key = (function, shape, sizes, addresses)
        if key not in graphs:

            def run(inputs: tuple[torch.Tensor, ...]) -> Any:
                if self.inner is None:
                    return function(inputs, *fixed)
                return self.inner(function, (shape, sizes), inputs, fixed, module, holder)

            try:
                graphs[key] = CapturedFunction(run, changing)
            except Exception as error:  # CUDA, Triton and torch share no class of errors
                failed.add((function, shape))
                logger.warning(_NOT_CAPTURED, type(module).__name__, (str(error) or repr(error)).splitlines()[0])
                return None
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
        self.outputs, self.replay = capture(lambda: function(self.inputs), inputs[0].device)

    def __call__(self, inputs: tuple[torch.Tensor, ...]) -> Any:
        for own, new in zip(self.inputs, inputs, strict=True):
            own.copy_(new)
        self.replay()
        return self.outputs


def capture(function: Callable[[], Any], device: torch.device) -> tuple[Any, Callable[[], None]]:
    """Capture a function without arguments; return its outputs and a function that computes them again in place.

    After an error, stream and default generator are as before: a capture that ends early would change both.

    Raises:
        RuntimeError: If `function` returns nothing, since it could not be compiled, or if CUDA refuses the capture.
    """
    with _capturing, torch.cuda.device(device):
        stream, before = torch.cuda.Stream(), torch.cuda.current_stream()
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        state = generator.clone_state()
        try:
            stream.wait_stream(before)
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP):  # kernels are compiled and chosen before the capture, which allows neither
                    if function() is None:
                        raise RuntimeError("it could not be compiled")
            before.wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # Other threads may go on to launch kernels, and to wait for them, on this device.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                outputs = function()
        except BaseException:
            torch.cuda.set_stream(before)
            generator.graphsafe_set_state(state)
            raise
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


COMPILE_MODES = ("auto", "graph", "compile", "off")
Runner = CompiledRunner | CapturedRunner


def runner_of(mode: str, device: torch.device) -> Runner | None:
    """Return the runner of a mode on a device; `None` if steps run as they are.

    "auto" captures graphs on a GPU, as launching the kernels of a step takes longer than running them. On a CPU "auto"
    compiles nothing, as compilation delays the first token by half a minute or more, which pays off in long outputs
    only.

    Args:
        mode (`str`): One of `COMPILE_MODES`.
        device (`torch.device`): Device of the target.

    Raises:
        ValueError: If the mode does not exist, or needs a GPU.
    """
    if mode not in COMPILE_MODES:
        raise ValueError(f"compile={mode!r}: expected one of {', '.join(COMPILE_MODES)}.")
    if mode == "graph" and device.type != "cuda":
        raise ValueError(f"compile='graph' captures CUDA graphs, and the model is on {device}. Choose 'compile'.")
    if mode == "off" or (mode == "auto" and device.type != "cuda"):
        return None
    if device.type != "cuda":
        return CompiledRunner()
    return CapturedRunner(CompiledRunner() if mode == "compile" else None)


class FixedSteps:
    """Run the steps of one target through a runner.

    Args:
        model (`PreTrainedModel`): A causal language model.
        runner ([`CompiledRunner`] or [`CapturedRunner`]): Compiles or captures.
    """

    def __init__(self, model: PreTrainedModel, runner: Runner):
        self.model = model
        self.runner = runner

    def run(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        cache: Any,
        mask: torch.Tensor,
        context: Any,
        with_hidden: bool | tuple[int, ...] = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Run one step, or return `None`, with nothing done, if it cannot run compiled or captured.

        Args:
            tokens (`torch.LongTensor` of shape `(B, N)`): Tokens.
            positions (`torch.LongTensor` of shape `(B, N)`): Positions of the tokens.
            cache ([`SpeculativeCache`] or [`CompactCache`]): Cache, to which keys and values of the tokens are written.
            mask (`torch.BoolTensor` of shape `(B, 1, N, N)`): Mask between the tokens.
            context ([`StepContext`]): Attention context, whose capture is filled.
            with_hidden (`bool` or `tuple[int, ...]`, *optional*, defaults to `False`): Whether to return the input of
                the final norm too, or of which layers. This needs the open context of [`states_of`].

        Returns:
            `tuple`, *optional*: Logits `(B, N, vocab)`, and the input of the final norm `(B, N, hidden)` or `None`.
        """
        groups = _groups(cache)
        prefixes = [rows.lengths for rows in groups]
        if not all(map(self.runner.takes, prefixes)) or not all(layer.is_initialized for layer in cache.layers):
            return None
        nodes, capacity = tokens.shape[1], min(layer.keys.shape[2] for layer in cache.layers)
        members = tuple(groups.index(layer.rows) for layer in cache.layers)
        known = tuple(map(self.runner.knows, prefixes))
        sizes = [self.runner.sizes(prefix, nodes, capacity) for prefix in prefixes]
        buffers = [(self.runner.buffer(layer.keys), self.runner.buffer(layer.values)) for layer in cache.layers]
        lengths = [prefix.on(tokens.device) for prefix in prefixes]
        more, settings = context.of_step()
        changing = (tokens, positions, mask, *lengths, *more)
        shape = *tokens.shape, type(context), known, members, settings, with_hidden
        fixed = self.model, type(context), members, known, settings, with_hidden, sizes, buffers
        result = self.runner(_step, shape, changing, fixed, self.model, cache)
        if result is None:
            return None
        logits, hidden, collected, scored = result
        for layer_idx, scores in scored:
            context.capture.keep_scores(layer_idx, scores, context.lengths)
        for layer_idx, query, lse, options in collected:
            stored = buffers[layer_idx][0][:, :, : prefixes[members[layer_idx]].longest + nodes]
            context.capture.collect(layer_idx, query, stored, lse, lengths=context.lengths, **options)
        return logits, hidden


class StepCache(Cache):
    """The model's cache inside a step: buffers, and the slots that the step writes to.

    Args:
        buffers (`list[tuple[torch.Tensor, torch.Tensor]]`): Keys and values of every layer, `(B, K, capacity, D)`.
        places (`list[tuple]`): For every layer, whether all rows write to the same slots, these slots `(N,)` or
            `(B, N)`, and the end of the slots that are read (`None` for the whole buffer).
    """

    def __init__(self, buffers: list[tuple[torch.Tensor, torch.Tensor]], places: list[tuple]):
        self.buffers = buffers
        self.places = places
        self.layers: list[Any] = []

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values of the nodes, and return the used part of both buffers."""
        keys, values = self.buffers[layer_idx]
        same, slots, end = self.places[layer_idx]
        if same:
            keys.index_copy_(2, slots, key_states)
            values.index_copy_(2, slots, value_states)
        else:
            row = torch.arange(len(slots), device=slots.device)[:, None]
            keys[row, :, slots] = key_states.transpose(1, 2)
            values[row, :, slots] = value_states.transpose(1, 2)
        return keys[:, :, :end], values[:, :, :end]

    @property
    def is_sliding(self) -> list[bool]:
        """False for every layer, as none drops entries."""
        return [False] * len(self.buffers)


class Collected:
    """Keep the data for a capture inside a graph, and pass them on to the capture after the step."""

    score_rows: Any = None
    last_node: Any = None

    def __init__(self) -> None:
        self.layers: list[tuple] = []
        self.scored: list[tuple[int, torch.Tensor]] = []

    def keep_scores(self, layer_idx: int, scores: torch.Tensor, lengths: SeqLens) -> None:
        """Keep the scores of one layer, one per entry."""
        self.scored.append((layer_idx, scores))

    def collect(
        self, layer_idx: int, query: torch.Tensor, key: torch.Tensor, lse: torch.Tensor, *, scaling, softcap, **where
    ) -> None:
        """Keep queries and log-sum-exp of one layer."""
        self.layers.append((layer_idx, query, lse, {"scaling": scaling, "softcap": softcap}))


def _step(changing, model, kind, members, known, settings, with_hidden, sizes, buffers):
    """Run the model under a context of this kind; return logits, input of the final norm, and data for a capture."""
    tokens, positions, mask, *rest = changing
    lengths, more = rest[: len(sizes)], rest[len(sizes) :]
    prefixes = [SeqLens.in_graph(*one) for one in zip(lengths, sizes, known, strict=True)]
    kept = Collected()
    context = kind.in_graph(more, settings, mask, [prefixes[group] for group in members], kept)
    cache = StepCache(buffers, _places(members, prefixes, tokens))

    def forward():
        return logits_under(context, model, tokens, positions, cache, mask)

    logits, hidden = with_final_norm_input(model, forward, with_hidden) if with_hidden else (forward(), None)
    return logits, hidden, kept.layers, kept.scored


def _places(members, prefixes, tokens) -> list[tuple]:
    nodes, of_group = tokens.shape[1], []
    offsets = torch.arange(nodes, device=tokens.device)
    for prefix in prefixes:
        slots = offsets + (prefix.on(tokens.device)[:, None] if prefix.is_ragged else prefix.shared)
        of_group.append((not prefix.is_ragged, slots, None if prefix.longest is None else prefix.longest + nodes))
    return [of_group[group] for group in members]


def _groups(cache: Any) -> list[Rows]:
    """Return the different rows of the layers of a cache: one, or two for a compact cache with dense layers."""
    groups: list[Rows] = []
    for layer in cache.layers:
        if not any(layer.rows is rows for rows in groups):
            groups.append(layer.rows)
    return groups
