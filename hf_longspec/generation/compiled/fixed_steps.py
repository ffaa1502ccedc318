"""Steps of one target in fixed shapes, which a runner compiles or captures.

[`ForwardsOnCache`] gets the cache as buffers and lengths, and builds around them the few objects that the model's
forward expects, a [`StepCache`] among them; the attention context of a step is made again by its own class.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ...attention_backends.contexts import GraphStep
from ...attention_backends.lengths import SeqLens
from ..draft_tree import DraftTree
from ..special_case import VerificationMode
from ..target import FixedStep, Forward, Forwards, StepResult, Steps
from ..target_modules import with_final_norm_input, written


@dataclass(eq=False)
class LengthsInGraph:
    """How a graph gets the lengths of rows."""

    sizes: list[torch.Tensor]  # empty ones, whose first sizes are the lengths that the host knows, or bounds
    known: int  # how many lengths are sizes: 1 for all rows, the batch size for one each, or 0 for a bound
    key: tuple[int, ...]  # what tells graphs apart

    def of(self, tensor: torch.Tensor) -> SeqLens:
        """Return the lengths inside a graph, which gets them as a tensor `(B,)`."""
        return SeqLens.in_graph(tensor, self.sizes, self.known)


NO_KEYS: Any = (None, None)


@dataclass(eq=False)
class Layout:
    """Where the entries of a cache lie, which is the same in all steps until a buffer is replaced."""

    number: tuple[int, ...]  # `layout` of the cache
    groups: list[Any]  # the different [`Rows`] of its layers: one, or two for a compact cache with dense layers
    members: tuple[int, ...]  # for every layer, the index of its rows
    capacity: int  # slots of the smallest buffer
    buffers: list[tuple[torch.Tensor, torch.Tensor]]  # keys and values of every layer
    indexers: list[Any]  # keys `(B, 1, S, D)` of the indexer of every layer, or `None`

    @classmethod
    def of(cls, cache: Any, buffer: Callable[[torch.Tensor], torch.Tensor]) -> "Layout":
        """Return the layout of a cache; `buffer` marks what a runner has to know of a buffer."""
        rows = [getattr(layer, "rows", None) for layer in cache.layers]  # some layers keep nothing
        groups = list({id(one): one for one in rows if one is not None}.values())
        members = tuple(0 if one is None else groups.index(one) for one in rows)
        buffers = [(buffer(x.keys), buffer(x.values)) if _has_buffers(x) else NO_KEYS for x in cache.layers]
        capacity = min(keys.shape[2] for keys, _ in buffers if keys is not None)
        indexers = [getattr(getattr(x, "indexer", None), "keys", None) for x in cache.layers]
        return cls(cache.layout, groups, members, capacity, buffers, indexers)


def _has_buffers(layer: Any) -> bool:
    return hasattr(layer, "keys") and layer.is_initialized


class StepCache(Cache):
    """The model's cache inside a step: the buffers of a [`Layout`], and the slots that the step writes to.

    Args:
        starts (`Sequence[SeqLens]`): The prefix of each group of layers, after which the tokens come.
        tokens (`torch.LongTensor` of shape `(B, N)`): Tokens of the step.
        states (`dict[int, Any]`): Layers with recurrent states, by their number.
    """

    def __init__(self, layout: Layout, starts: Sequence[SeqLens], tokens: torch.Tensor, states: dict[int, Any]):
        self.buffers, self.indexers = layout.buffers, layout.indexers
        self.layers: list[Any] = [states.get(number) for number in range(len(layout.buffers))] if states else []
        nodes, places = tokens.shape[1], []
        offsets = torch.arange(nodes, device=tokens.device)
        for prefix in starts:
            start: Any = prefix.on(tokens.device)[:, None] if prefix.is_ragged else prefix.shared
            # the slots that are written, `(N,)` if they are the same in all rows or `(B, N)`, and the end of the slots
            # that are read, `None` for the whole buffer
            places.append((offsets + start, None if prefix.longest is None else prefix.longest + nodes))
        self.places = [places[group] for group in layout.members]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values of the nodes, and return the used part of both buffers."""
        slots, end = self.places[layer_idx]
        keys, values = written(key_states, value_states, *self.buffers[layer_idx], slots)
        return keys[:, :, :end], values[:, :, :end]

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Write the nodes' keys `(B, N, D)` of an indexer, and return the used part of their buffer, `(B, S, D)`."""
        keys, (slots, end) = self.indexers[layer_idx], self.places[layer_idx]
        states = indexer_key_states[:, None]
        written(states, states[..., :0], keys, keys[..., :0], slots)
        return keys[:, 0, :end]

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return `None`, so that a mixer with a state runs the functions for several tokens also on one."""

    get_recurrent_state = get_conv_state

    @property
    def is_sliding(self) -> list[bool]:
        """False for every layer, as none drops entries."""
        return [False] * len(self.buffers)


class Runner:
    """Runs steps compiled or captured, for one call of `generate`: `runner(step, *inputs)`, `None` if it cannot."""

    captures = compiles = False
    seconds = 0.0  # that captures took

    def steps_of(self, model: PreTrainedModel, mode: VerificationMode) -> "FixedSteps":
        """Return the steps of a target, which this runner compiles or captures."""
        return FixedSteps(model, self, mode)

    def lengths(self, lengths: SeqLens, room: int, capacity: int, parts: int = 1) -> LengthsInGraph | None:
        """Return how a graph gets the lengths of a cache with `capacity` slots, after which it uses `room` slots.

        It reads up to a power of two of the slots, or to one of `parts` of it. `None` if no graph takes these lengths.
        """
        raise NotImplementedError

    def buffer(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return a buffer `(B, K, capacity, D)` of a cache, marked with what the runner has to know of it."""
        return buffer

    def __call__(self, step: FixedStep, *inputs: torch.Tensor) -> Any:
        """Return `step.run(*inputs)`, or `None`, with nothing done, if it is neither compiled nor captured."""
        raise NotImplementedError


class FixedSteps(Steps):
    """Run the steps of one target through a runner, which compiles or captures them."""

    def __init__(self, model: PreTrainedModel, runner: Any, mode: VerificationMode):
        self.model, self.mode = model, mode
        self.runner, self.captures, self.compiles = runner, runner.captures, runner.compiles
        self._layouts: dict[int, Layout] = {}

    @property
    def seconds(self) -> float:  # type: ignore[override]
        """Time that captures took."""
        return self.runner.seconds

    def run(self, step: FixedStep, *inputs: torch.Tensor) -> Any:
        return self.runner(step, *inputs)

    def verify(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        cache: Any,
        mask: torch.Tensor,
        context: Any,
        with_hidden: bool | tuple[int, ...] = False,
    ) -> StepResult | None:
        """Run one step as [`TargetView.step`] does.

        The capture of the context is filled. `with_hidden` needs the open context of [`LayerInputs`].
        """
        if (layout := self._layout(cache)) is None:
            return None
        more, settings = context.of_step()
        # The context's positions are the same tensor until the last steps of a call, in which the model's are clamped.
        # torch.compile makes another graph when inputs are no longer one tensor.
        inputs = tokens, positions.view_as(positions), mask, *more
        verification = OneForward(self.model, layout.members, type(context), settings, with_hidden)
        result = self._run(verification, cache, tokens.shape[1], *inputs)
        if result is None:
            return None
        logits, hidden, collected, scored = result
        if scored and self.captures:
            context.capture.is_replayed = True
        for layer_idx, scores in scored:
            context.capture.keep_scores(layer_idx, scores)
        for layer_idx, query, lse, options in collected:
            prefix = layout.groups[layout.members[layer_idx]].lengths
            stored = layout.buffers[layer_idx][0][:, :, : prefix.longest + tokens.shape[1]]
            context.capture.collect(layer_idx, query, stored, lse, lengths=context.lengths, **options)
        self.logits = logits if self.captures else None
        return StepResult(logits, hidden)

    def forwards(self, forwards: Forwards, cache: Any, room: int, *inputs: torch.Tensor, may_compile: bool) -> Any:
        if not self.captures or (self.compiles and not may_compile):
            return None
        result = self._run(forwards, cache, room, *inputs)
        self.results = () if result is None else result
        return result

    def _layout(self, cache: Any) -> Layout | None:
        """Return the layout of a cache; `None` if it has no buffers yet."""
        layout = self._layouts.get(id(cache))
        if layout is None or layout.number != cache.layout:
            if not any(map(_has_buffers, cache.layers)):
                return None
            layout = self._layouts[id(cache)] = Layout.of(cache, self.runner.buffer)
        return layout

    def _run(self, forwards: Forwards, cache: Any, room: int, *inputs: torch.Tensor) -> Any:
        if (layout := self._layout(cache)) is None:
            return None
        states = cache.parts[0].fixed() if cache.parts else None
        if states is None and cache.parts:
            return None
        prefixes = [rows.lengths for rows in layout.groups]
        parts = self.mode.parts_of_bucket
        lengths = [self.runner.lengths(prefix, room, layout.capacity, parts) for prefix in prefixes]
        if None in lengths:
            return None
        step = ForwardsOnCache(self.model, cache, self.mode, forwards, room, lengths, layout, states)
        before = *(prefix.on(inputs[0].device) for prefix in prefixes), *(() if states is None else states.tensors)
        result = self.runner(step, *before, *inputs)
        if states is None or result is None:
            return result
        *result, found = result
        cache.parts[0].take(found, self._commit)
        return result

    def _commit(self, step: FixedStep, *inputs: torch.Tensor) -> None:
        """Run a step of a part of the cache, by a graph if that is possible."""
        step.module = self.model
        if self.runner(step, *inputs) is None:
            step.run(*inputs)

    def workspace(self, batch_size: int, max_length: int) -> Any:
        return self.runner.workspace(batch_size, max_length) if self.captures else None

    def keep(self, workspace: Any, cache: Any) -> None:
        self.runner.keep(workspace, cache)


@dataclass(eq=False)
class ForwardsOnCache(FixedStep):
    """[`Forwards`] over a cache, which a graph gets as buffers and lengths."""

    mode: VerificationMode
    forwards: Forwards
    room: int
    lengths: list[LengthsInGraph]
    layout: Layout
    states: Any  # what a part of the cache holds beside keys, if there is one

    @property
    def key(self) -> tuple:
        of_lengths = (lengths.key for lengths in self.lengths)
        of_states = () if self.states is None else self.states.key
        return type(self.forwards), self.forwards.key, self.layout.members, self.room, *of_lengths, of_states

    @property
    def places(self) -> tuple[int, ...]:
        return self.layout.number

    def why_not_captured(self) -> str | None:
        rows, slots = self.layout.groups[0].batch_size, self.lengths[0].sizes[0].shape[0] + self.room
        return self.mode.why_not_captured(self.module, (rows, self.room, slots), self.layout.buffers)

    def run(self, *inputs: torch.Tensor) -> Any:
        count = len(self.lengths)
        starts = [lengths.of(tensor) for lengths, tensor in zip(self.lengths, inputs[:count], strict=True)]
        if self.states is None:
            return self.forwards.run(self.forward, starts, *inputs[count:])
        more = count + len(self.states.tensors)
        forward = ForwardWithStates(self.forward, self.states.begin(), inputs[count:more])
        result = self.forwards.run(forward, starts, *inputs[more:])
        return *result, forward.states.result(self.forwards.leaves_states)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        mask: Any,
        context: Any,
        *starts: SeqLens,
        states: Any = None,
    ) -> Any:
        """Run the model on tokens `(B, N)` in the slots from `starts` on, and return logits; a [`Forward`]."""
        cache = StepCache(self.layout, starts, tokens, {} if states is None else states.layers)
        return self.mode.logits(context, self.module, tokens, positions, cache, mask)


class ForwardWithStates:
    """A [`Forward`] of a model whose layers have states. Those after a lone node are kept, except in a verification.

    `keep_root` keeps the first nodes of the last forward, and leaves the states after them to the cache.
    """

    def __init__(self, forward: Forward, states: Any, parents: Sequence[torch.Tensor]):
        self.forward, self.states, self.parents = forward, states, parents
        self.keep_root = states.keep_root

    def __call__(
        self, tokens: torch.Tensor, positions: torch.Tensor, mask: Any, *where: Any, tree: DraftTree | None = None
    ) -> torch.Tensor:
        self.states.stage(tokens, mask, self.parents, tree)
        logits: torch.Tensor = self.forward(tokens, positions, mask, *where, states=self.states)
        if tree is None and tokens.shape[1] == 1:
            self.states.keep_newest()
        return logits


@dataclass(eq=False)
class OneForward(Forwards):
    """A verification, or a step of a drafter, under a context of this kind.

    The result has logits, the input of the final norm, and data for a capture.
    """

    model: PreTrainedModel
    members: tuple[int, ...]
    kind: Any
    settings: tuple
    with_hidden: bool | tuple[int, ...]

    leaves_states: ClassVar[bool] = True

    @property
    def key(self) -> tuple:
        return self.kind, self.settings, self.with_hidden

    def run(self, forward: Forward, starts: Sequence[SeqLens], *inputs: torch.Tensor) -> Any:
        tokens, positions, mask, *more = inputs
        collected, of_layers = Collected(), [starts[group] for group in self.members]
        context = self.kind.in_graph(GraphStep(more, self.settings, mask, of_layers, collected))

        def step() -> torch.Tensor:
            return forward(tokens, positions, mask, context, *starts)

        run = with_final_norm_input(self.model, step, self.with_hidden) if self.with_hidden else (step(), None)
        return *run, collected.layers, collected.scored


class Collected:
    """Keep the data for a capture inside a graph, and pass them on to the capture after the step."""

    score_rows: Any = None
    last_node: Any = None

    def __init__(self) -> None:
        self.layers: list[tuple] = []
        self.scored: list[tuple[int, torch.Tensor]] = []

    def keep_scores(self, layer_idx: int, scores: torch.Tensor) -> None:
        """Keep the scores of one layer, one per entry."""
        self.scored.append((layer_idx, scores))

    def collect(
        self, layer_idx: int, query: torch.Tensor, key: torch.Tensor, lse: torch.Tensor, *, scaling, softcap, **where
    ) -> None:
        """Keep queries and log-sum-exp of one layer."""
        self.layers.append((layer_idx, query, lse, {"scaling": scaling, "softcap": softcap}))
