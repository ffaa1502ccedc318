"""Drafters of trees that grow level by level: the draft runs once for all nodes of a level, and the best are kept.

A tree is drafted as it is, in one graph, or with one graph for each level and candidates ranked in between.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ...attention_backends.registry import AttentionBackend, AttentionCall, select, under_autocast
from ...generation.draft_tree import Beam, DraftTree
from ...generation.drafter import Binding, Drafter
from ...generation.sparse_caches import WindowRing
from ...generation.target import FixedStep

Tensors = tuple[torch.Tensor, ...]


@dataclass(eq=False)
class FixedPrefix:
    """What a [`FixedStep`] makes `prefix` from; nothing by default. See there for `key` and `places`."""

    num_tensors: ClassVar[int] = 0

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Further inputs of the step."""
        return ()

    @property
    def key(self) -> tuple:
        return ()

    @property
    def places(self) -> tuple[int, ...]:
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

    def __init__(self, binding: Binding, draft: Any):
        super().__init__(binding)
        self._owner, self.draft = draft, draft.placed_for(binding.target.model)
        self.coupling = binding.coupling()
        self.widths, self.num_nodes = self.shape_of(draft)
        self.max_depth = len(self.widths)
        self.device, self.dtype = self.draft.device, self.draft.dtype
        head_dim = draft.config.head_dim
        self.scaling = head_dim**-0.5
        kernels = select(AttentionCall(self.device, self.dtype, head_dim, head_dim))
        self._kernels: AttentionBackend = under_autocast(kernels, self.device.type)
        self._grow: Callable[..., Any] = self.grow
        if binding.target.steps.runner is not None:
            self._grow = self._grow_at_once if self.coupling.fits_graphs else self._grow_by_levels

    @property
    def state_bytes(self) -> int:
        return sum(ring.nbytes for ring in self.rings)

    @property
    def _holder(self) -> Any:
        """The object that graphs go with. They hold the addresses of weights: those of a copy are dropped with it."""
        return self.rings[0] if self.draft is self._owner else self.draft

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
        """Return the inputs of `level` for the newest level of a beam; `states` are further results of the last one."""
        raise NotImplementedError

    def level(self, changing: Tensors, depth: int, prefix: Any) -> Tensors:
        """Return logits `(B, n, V)` after the newest level of a beam, and states if there are any.

        The logits may be `(B, 1, V)` if they do not depend on the path.

        `changing` is the result of `level_inputs`. The root has depth 0.
        """
        raise NotImplementedError

    def of_parents(self, beam: Beam, states: torch.Tensor) -> torch.Tensor:
        """Return the states `(B, n, D)` of the parents of the newest level, from those of the level above."""
        parents = beam.parent_places.to(self.device)[..., None]
        return states.gather(1, parents.expand(-1, -1, states.shape[2]))

    def spread(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits `(B, n, vocab)` of the target's tokens."""
        return logits

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
        """Draft all levels, and return the [`DraftTree.fields`] of the tree.

        It writes to the rings and reads nothing on the host. The arguments are the results of `inputs`,
        [`Coupling.known`] and `prefix`, and a function in the place of `level`.
        """
        beam, shared, level = Beam(inputs[0]), self.begin(inputs, prefix), level or self.level
        states: Sequence[torch.Tensor] = ()
        for depth, width in enumerate(self.widths):
            logits, *states = level(self.level_inputs(beam, depth, shared, states), depth, prefix)
            scores = self.coupling.scores(self.spread(logits.to(inputs[0].device)), known, depth, beam.paths)
            beam.grow(scores, width)
        return self.cut(beam.fields(self.num_nodes), states)

    def _grow_at_once(self, inputs: tuple[torch.Tensor, ...], known: Sequence[torch.Tensor], prefix: Any) -> Any:
        """Draft a tree in one graph, if that is possible."""
        return self._run(Tree, len(inputs), prefix, *inputs, *known) or self.grow(inputs, known, prefix)

    def _grow_by_levels(self, inputs: tuple[torch.Tensor, ...], known: Sequence[torch.Tensor], prefix: Any) -> Any:
        """Draft a tree with one graph for each level, if that is possible."""

        def level(changing: tuple[torch.Tensor, ...], depth: int, prefix: Any) -> tuple[torch.Tensor, ...]:
            result: tuple[torch.Tensor, ...] | None = self._run(Level, depth, prefix, *changing)
            return result or self.level(changing, depth, prefix)

        return self.grow(inputs, known, prefix, level)

    def cut(self, fields: Tensors, states: Sequence[torch.Tensor]) -> Tensors:
        """Return the fields of a tree, maybe with some nodes made padding; `states` are results of the last level."""
        return fields

    def _run(self, kind: "type[Part]", number: int, prefix: Any, *inputs: torch.Tensor) -> Any:
        """Return the result of a part of a tree, compiled or captured; `None` if that is not possible."""
        steps = self.binding.target.steps
        if self.is_moved or (fixed := self.fixed_prefix(steps.runner, prefix)) is None:
            return None
        return steps.run(kind(self._owner, self._holder, self, fixed, number), *fixed.tensors, *inputs)

    def run(self, method: Callable[..., Any], *inputs: torch.Tensor) -> Any:
        """Return the result of a method, by a captured graph if steps are captured."""
        return method(*inputs) if self.is_moved else self.binding.target.run(method, self._holder, *inputs)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the attention output `(B, H, n, D)` of queries to the keys that a mask `(B, n, M)` leaves.

        There may be more keys `(B, K, slots, D)` than the mask has.
        """
        key, value = key[:, :, : mask.shape[2]], value[:, :, : mask.shape[2]]
        return self._kernels.tree_attention(query, key, value, mask=mask, scaling=self.scaling)[0]


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
