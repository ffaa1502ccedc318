"""Drafters of trees that grow level by level: the draft runs once for all nodes of a level, and the best are kept.

A tree is drafted as it is, in one graph, or with one graph for each level and candidates ranked in between. The drafts
of a [`CacheReader`] also attend to the target's cache: those of LongSpec and of the assistants of Gemma 4.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch

from ...attention_backends.lengths import SeqLens
from ...attention_backends.registry import (
    AttentionBackend,
    AttentionCall,
    merge_attention_states,
    select,
    under_autocast,
)
from ...generation.draft_tree import Beam, DraftTree
from ...generation.drafter import Binding, Drafter
from ...generation.target import FixedStep, GraphKey
from ...generation.target_modules import written
from .sparse_caches import SINK_TOKENS, select_window
from .vocabulary import of_all_tokens

Tensors = tuple[torch.Tensor, ...]


class WindowRing:
    """Store keys and values of the first and the last committed tokens of every row, and those of a draft tree.

    The `sinks` first tokens of a text stay in the first slots, and all queries attend to them. The token at a later
    position p lies in slot `sinks + (p - sinks) % (window + room)`, node i of the tree in slot `size + i`. A query
    attends to `window` positions, its own included; up to `room` tokens may be stored before the query of the first of
    them runs. One spare slot takes the writes that a row does not keep, so that all rows run the same operations.
    `value_dim` is the size of the values of a head, if it differs from that of the keys.
    """

    def __init__(
        self,
        window: int,
        tree_slots: int,
        batch_size: int,
        num_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        sinks: int = 0,
        room: int = 0,
        value_dim: int | None = None,
    ):
        self.window = window
        self.sinks = sinks
        self.size = sinks + window + room
        self.spare = self.size + tree_slots
        shape = batch_size, num_heads, self.spare + 1
        self.keys = torch.zeros(*shape, head_dim, dtype=dtype, device=device)
        self.values = torch.zeros(*shape, value_dim or head_dim, dtype=dtype, device=device)
        # position of the token in each slot; a negative position marks an empty slot
        self.positions = torch.full((batch_size, self.spare + 1), -1, device=device)
        self._slots = torch.arange(self.spare, device=device)

    def clear(self) -> None:
        """Mark all slots as empty."""
        self.positions.fill_(-1)

    @property
    def row_states(self) -> tuple[torch.Tensor, ...]:
        """What is kept for each row."""
        return self.keys, self.values, self.positions

    @property
    def nbytes(self) -> int:
        return sum(states.nbytes for states in self.row_states)

    def fill(self, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor) -> None:
        """Store T tokens per row, `(B, K, T, D)`, at their positions `(B, T)`, of which a negative one marks padding.

        If there are too many, the newest are kept.
        """
        capacity = self.size - self.sinks
        if positions.shape[1] > capacity:
            newest = positions.amax(1, keepdim=True)
            positions = torch.where((positions > newest - capacity) | (positions < self.sinks), positions, -1)
        slots = (positions - self.sinks) % capacity + self.sinks
        slots = torch.where(positions < self.sinks, positions, slots) if self.sinks else slots
        slots = torch.where(positions >= 0, slots, self.spare)
        written(keys, values, self.keys, self.values, slots)
        self.positions.scatter_(1, slots, positions)

    def stage(self, keys: torch.Tensor, values: torch.Tensor, first_node: int) -> None:
        """Store keys and values `(B, K, n, D)` of n nodes of the tree, from node `first_node` on."""
        written(keys, values, self.keys, self.values, self._slots, self.size + first_node)

    def visible(self, positions: torch.Tensor) -> torch.Tensor:
        """Return which slots queries at `positions` `(B, n)` attend to, `(B, n, size)`, the tree's excluded."""
        return visible(self.positions[:, : self.size], positions, self.window, self.sinks)


def visible(stored: torch.Tensor, positions: torch.Tensor, window: int, sinks: int = 0) -> torch.Tensor:
    """Return which keys at the positions `stored` `(B, T)` queries at `positions` `(B, n)` attend to, `(B, n, T)`.

    A negative position of a key marks padding. See [`WindowRing`] for `window` and `sinks`.
    """
    stored, query = stored[:, None], positions[..., None]
    seen = stored > query - window
    if sinks:
        seen = seen | (stored < sinks)
    return (stored >= 0) & (stored <= query) & seen


@dataclass(eq=False)
class FixedPrefix(GraphKey):
    """What a [`FixedStep`] makes `prefix` from; nothing by default."""

    num_tensors: ClassVar[int] = 0

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Further inputs of the step."""
        return ()

    def of(self, inputs: Sequence[torch.Tensor]) -> Any:
        """Return the prefix in a step that gets `tensors` as inputs."""


class BeamDrafter(Drafter):
    """Draft trees with a fixed number of nodes per level, by a module that runs once for each level.

    Subclasses set `rings` and implement `inputs`, `begin`, `level_inputs`, `level` and `observe`. Those that read the
    target's cache also define `prefix` and `fixed_prefix`.
    """

    rings: list[WindowRing]  # keys and values of the committed text, for each layer of the draft
    # Whether positions are those of the target also after images. Graphs compute them from lengths alone.
    rotates_as_target: ClassVar[bool] = False

    def __init__(self, binding: Binding, draft: Any, place: Any = None):
        super().__init__(binding)
        self._owner, self.draft = draft, draft.placed_at(place or draft.place(binding.target.model))
        self.coupling = binding.coupling()
        self.largest, self.num_nodes = self.shape_of(draft)
        self.widths: Sequence[int] = self.largest
        self.max_depth = len(self.largest)
        self.device, self.dtype = self.draft.device, self.draft.dtype
        head_dim = draft.config.head_dim
        self.scaling = head_dim**-0.5
        kernels = select(AttentionCall(self.device, self.dtype, head_dim, head_dim))
        is_cast = torch.is_autocast_enabled(self.device.type)
        self._kernels: AttentionBackend = under_autocast(kernels) if is_cast else kernels
        self._grow: Callable[..., Any] = self.grow
        self.tells = binding.target.steps.runner is None and self.device.type == "cpu" and self.coupling.is_plain
        if binding.target.steps.runner is not None:
            self._grow = self._grow_at_once if self.coupling.fits_graphs else self._grow_by_levels

    @cached_property
    def level_cost(self) -> float:  # type: ignore[override]
        """Weights of the draft and of its head, as a share of those of the target."""
        config, target = self.binding.target.config, self.binding.target.model
        rows = len(self.draft.token_ids) if getattr(self.draft, "d2t", None) is not None else config.vocab_size
        own = sum(map(torch.numel, self.draft.parameters())) + rows * config.hidden_size
        return own / sum(map(torch.numel, target.parameters()))

    @property
    def state_bytes(self) -> int:
        return sum(ring.nbytes for ring in self.rings)

    @property
    def _holder(self) -> Any:
        """The object that graphs go with. They hold the addresses of weights: those of a copy are dropped with it."""
        return self.rings[0] if self.draft is self._owner else self.draft

    def make_ring(self, layer: int, *shape: Any) -> WindowRing:
        """Return an empty ring of a layer of the draft, with the arguments of [`WindowRing`]; kept for later calls."""
        ring: WindowRing = self.binding.part((WindowRing, layer, *shape), lambda: WindowRing(*shape))
        ring.clear()
        return ring

    def shape_of(self, draft: Any) -> tuple[list[int], int]:
        """Return the widths of all levels, and how many of the best nodes are verified, root included."""
        widths: list[int] = draft.setting("tree_widths")
        return widths, 1 + sum(widths)

    def inputs(self, root: torch.Tensor) -> Tensors:
        """Return the tensors that a tree is drafted from, `root` `(batch,)` first."""
        raise NotImplementedError

    def begin(self, inputs: Tensors, prefix: Any) -> Tensors:
        """Return what all levels of a tree share."""
        raise NotImplementedError

    def level_inputs(self, beam: Beam, depth: int, shared: Tensors, states: Sequence[torch.Tensor]) -> Tensors:
        """Return the inputs of `level` for the newest level of a beam.

        `states` are further results of the last level, after them those that only earlier levels have.
        """
        raise NotImplementedError

    def level(self, changing: Tensors, depth: int, prefix: Any) -> Tensors:
        """Return logits `(B, n, V)` of the draft's tokens after the newest level of a beam, and states, if any.

        The logits may be `(B, 1, V)` if they do not depend on the path.

        `changing` is the result of `level_inputs`. The root has depth 0.
        """
        raise NotImplementedError

    def of_parents(self, beam: Beam, states: torch.Tensor) -> torch.Tensor:
        """Return the states `(B, n, D)` of the parents of the newest level, from those of the level above."""
        parents = beam.parent_places[-1].to(self.device)[..., None]
        return states.gather(1, parents.expand(-1, -1, states.shape[2]))

    def with_ancestors(self, seen: torch.Tensor, ancestor_mask: torch.Tensor) -> torch.Tensor:
        """Return a mask `(B, n, slots + N)`: what is seen of a ring `(B, 1, slots)`, and ancestors `(B, n, N)`."""
        return torch.cat([seen.expand(-1, ancestor_mask.shape[1], -1), ancestor_mask.to(self.device)], -1)

    def prefix(self) -> Any:
        """Return what the draft reads of the target's cache; nothing by default."""

    def fixed_prefix(self, runner: Any, prefix: Any) -> FixedPrefix | None:
        """Return what a step makes of `prefix`; `None` if such a step cannot be compiled."""
        return FixedPrefix()

    @property
    def key(self) -> tuple:
        """Settings that graphs of this drafter depend on, hashable."""
        return *self.widths, self.coupling.key

    @property
    def is_moved(self) -> bool:
        """Whether positions differ from places, as after images, which graphs do not know."""
        return self.rotates_as_target and self.binding.cache.rows.offsets is not None

    def propose(self, root: torch.Tensor) -> DraftTree:
        self.widths = self.widths_now
        inputs, known, prefix = self.inputs(root), self.coupling.known(len(self.widths)), self.prefix()
        fields = self._grow(inputs, known, prefix)
        return DraftTree.of_fields(fields, len(self.widths), is_chain=max(self.widths) == 1)

    def grow(
        self,
        inputs: Tensors,
        known: Sequence[torch.Tensor] = (),
        prefix: Any = None,
        level: Callable[..., Tensors] | None = None,
    ) -> Tensors:
        """Draft all levels, or as many as pay, and return the [`DraftTree.fields`] of the tree.

        It writes to the rings and reads nothing on the host. The arguments are the results of `inputs`,
        [`Coupling.known`] and `prefix`, and a function in the place of `level`.
        """
        beam = Beam(inputs[0], 1 + sum(self.widths))
        shared, level = self.begin(inputs, prefix), level or self.level
        states: Sequence[torch.Tensor] = ()
        reduced = getattr(self.draft, "d2t", None) is not None
        token_ids = self.draft.token_ids.to(inputs[0].device) if reduced else None
        gate = self.asked
        for depth, width in enumerate(self.widths):
            logits, *new = level(self.level_inputs(beam, depth, shared, states), depth, prefix)
            states = (*new, *states[len(new) :])
            logits = logits.to(inputs[0].device)
            if token_ids is None or self.coupling.is_plain:
                beam.grow(self.coupling.scores(logits, known, depth, beam.paths), width, token_ids)
                if gate is not None and not gate.goes_on(beam.shares):
                    break
                continue
            # noise and processors are those of the target's tokens
            logits = of_all_tokens(logits, token_ids, self.binding.target.vocab_size)
            beam.grow(self.coupling.scores(logits, known, depth, beam.paths), width)
        if gate is not None:
            beam.cut(gate.kept())
            self.widths = self.widths[: len(beam.levels) - 1]
        return beam.fields(self.num_nodes)

    def _grow_at_once(self, inputs: tuple[torch.Tensor, ...], known: Sequence[torch.Tensor], prefix: Any) -> Any:
        """Draft a tree in one graph, if that is possible."""
        return self._run(Tree, len(inputs), prefix, *inputs, *known) or self.grow(inputs, known, prefix)

    def _grow_by_levels(self, inputs: tuple[torch.Tensor, ...], known: Sequence[torch.Tensor], prefix: Any) -> Any:
        """Draft a tree with one graph for each level, if that is possible."""

        def level(changing: tuple[torch.Tensor, ...], depth: int, prefix: Any) -> tuple[torch.Tensor, ...]:
            result: tuple[torch.Tensor, ...] | None = self._run(Level, depth, prefix, *changing)
            return result or self.level(changing, depth, prefix)

        return self.grow(inputs, known, prefix, level)

    def _run(self, kind: "type[Part]", number: int, prefix: Any, *inputs: torch.Tensor) -> Any:
        """Return the result of a part of a tree, compiled or captured; `None` if that is not possible."""
        steps = self.binding.target.steps
        if self.is_moved or (fixed := self.fixed_prefix(steps.runner, prefix)) is None:
            return None
        return steps.run(kind(self._owner, self._holder, self, fixed, number), *fixed.tensors, *inputs)

    def run(self, method: Callable[..., Any], *inputs: torch.Tensor) -> Any:
        """Return the result of a method, by a captured graph if steps are captured."""
        return method(*inputs) if self.is_moved else self.binding.target.run(method, self._holder, *inputs)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the attention output `(B, H, n, D)` of queries to the keys that a mask `(B, n, M)` leaves.

        There may be more keys `(B, K, slots, D)` than the mask has. `sinks` `(H,)` are logits in the denominator.
        """
        key, value = key[:, :, : mask.shape[2]], value[:, :, : mask.shape[2]]
        state = self._kernels.tree_attention(query, key, value, mask=mask, scaling=self.scaling)
        return state[0] if sinks is None else merge_attention_states([state], sinks)[0]


@dataclass(eq=False)
class Part(FixedStep):
    """A tree of a [`BeamDrafter`], or a level of it."""

    drafter: BeamDrafter
    prefix: FixedPrefix
    number: int  # of `inputs` of a tree, or the depth of a level

    @property
    def key(self) -> tuple:
        return self.drafter.key, self.prefix.key, self.number

    @property
    def places(self) -> tuple[int, ...]:
        return self.prefix.places

    def run(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        count = self.prefix.num_tensors
        return self.part(self.prefix.of(inputs[:count]), inputs[count:])

    def part(self, prefix: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Return the result of [`BeamDrafter.grow`] or [`BeamDrafter.level`]."""
        raise NotImplementedError


class Tree(Part):
    """All levels."""

    def part(self, prefix: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return self.drafter.grow(inputs[: self.number], inputs[self.number :], prefix)


class Level(Part):
    """One level."""

    def part(self, prefix: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return self.drafter.level(inputs, self.number, prefix)


class PrefixStates(NamedTuple):
    """The committed tokens in the layers of the target that are read."""

    lengths: SeqLens  # number of tokens of each row
    layers: tuple[tuple[torch.Tensor, torch.Tensor], ...]  # keys and values `(B, K, capacity, D)` of each layer


class CacheReader(BeamDrafter):
    """Base of these drafters. Subclasses set `read_layers`."""

    read_layers: Sequence[int]
    """Layers of the target that are read."""
    read_window: int | None = None
    """Number of last entries of a prefix that are read besides the sinks. All by default."""

    def prefix(self) -> PrefixStates:
        cache = self.binding.cache
        layers = (cache.layers[index] for index in self.read_layers)
        return PrefixStates(cache.lengths, tuple((layer.keys, layer.values) for layer in layers))

    def attend_prefix(self, prefix: PrefixStates, query: torch.Tensor) -> torch.Tensor:
        """Return the attention output `(B, H, N, D)` of queries to the committed tokens in the first layer."""
        keys, ranks = prefix.layers[0][0], self.binding.target.ranks
        if ranks is None or keys.shape[1] == self.draft.config.num_key_value_heads:
            return self._attend_heads(prefix, query)
        # the cache holds the key/value heads of this rank, while every rank has the whole draft
        return ranks.all_heads(self._attend_heads(prefix, ranks.own_heads(query)))

    def _attend_heads(self, prefix: PrefixStates, query: torch.Tensor) -> torch.Tensor:
        """Likewise, of the heads that are in the cache."""
        (keys, values), kernels = prefix.layers[0], self._kernels
        if self.read_window is not None:
            lengths, size = prefix.lengths.on(keys.device), SINK_TOKENS + self.read_window
            counts = lengths.clamp_max(size)
            slots = select_window(lengths, counts, size).clamp_max(keys.shape[2] - 1)
            return kernels.sparse_attention(query, keys, values, slots, counts=counts, scaling=self.scaling)[0]
        keys, values = (states[:, :, : prefix.lengths.longest] for states in (keys, values))
        return kernels.prefix_attention(query, keys, values, lengths=prefix.lengths, scaling=self.scaling)[0]

    @property
    def key(self) -> tuple:
        return *super().key, self.read_window

    def fixed_prefix(self, runner: Any, prefix: PrefixStates) -> "CachePrefix | None":
        lengths = runner.lengths(prefix.lengths, 0, prefix.layers[0][0].shape[2])
        if lengths is None:
            return None
        layers = tuple((runner.buffer(keys), runner.buffer(values)) for keys, values in prefix.layers)
        return CachePrefix(prefix.lengths, self.device, lengths, layers, self.binding.cache.layout)


@dataclass(eq=False)
class CachePrefix(FixedPrefix):
    """A [`PrefixStates`], which a graph gets as buffers and lengths."""

    committed: SeqLens
    device: torch.device
    lengths: Any  # how the graph gets them
    layers: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    layout: tuple[int, ...]

    num_tensors = 1

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.committed.on(self.device),)

    @property
    def key(self) -> tuple:
        key: tuple = self.lengths.key
        return key

    @property
    def places(self) -> tuple[int, ...]:
        return self.layout

    def of(self, inputs: Sequence[torch.Tensor]) -> PrefixStates:
        return PrefixStates(self.lengths.of(inputs[0]), self.layers)
