"""Drafters of trees that grow level by level: the draft runs once for all nodes of a level, and the best are kept.

A tree is drafted as it is, in one graph, or with one graph for each level and candidates ranked in between.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch

from ...attention_backends.registry import AttentionBackend, AttentionCall, select, under_autocast
from ...generation.draft_tree import Beam, DraftTree
from ...generation.drafter import Binding, Drafter
from ...generation.sparse_caches import WindowRing


class PrefixInGraph(NamedTuple):
    """What a graph makes the prefix of a step from."""

    changing: tuple[torch.Tensor, ...] = ()  # tensors of the step
    fixed: tuple = ()  # objects that are the same in all steps of a graph
    settings: tuple = ()  # hashable, what distinguishes graphs


class BeamDrafter(Drafter):
    """Draft trees with a fixed number of nodes per level, by a module that runs once for each level.

    Subclasses set `rings` and implement `inputs`, `begin`, `level_inputs`, `level` and `observe`. Those that read the
    target's cache also define `prefix`, `prefix_of_graph` and `prefix_in_graph`.
    """

    rings: list[WindowRing]  # keys and values of the committed text, for each layer of the draft
    # Whether positions are those of the target also after images. Graphs compute them from lengths alone.
    rotates_as_target: ClassVar[bool] = False

    def __init__(self, binding: Binding, draft: Any):
        super().__init__(binding)
        self._owner, self.draft = draft, draft.beside(binding.target.model)
        self.coupling = binding.coupling()
        self.widths, self.num_nodes = self.shape_of(draft)
        self.max_depth = len(self.widths)
        self.device, self.dtype = self.draft.device, self.draft.dtype
        head_dim = draft.config.head_dim
        self.scaling = head_dim**-0.5
        kernels = select(AttentionCall(self.device, self.dtype, head_dim, head_dim))
        self._kernels: AttentionBackend = under_autocast(kernels, self.device.type)
        self._grow: Callable[..., Any] = self.grow
        if binding.target.runner is not None:
            self._grow = self._grow_in_graph if self.coupling.fits_graphs else self._grow_by_levels

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

    def inputs(self, root: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the tensors that a tree is drafted from, `root` `(batch,)` first."""
        raise NotImplementedError

    def begin(self, inputs: tuple[torch.Tensor, ...], prefix: Any) -> tuple[torch.Tensor, ...]:
        """Return what all levels of a tree share."""
        raise NotImplementedError

    def level_inputs(
        self, beam: Beam, depth: int, shared: tuple[torch.Tensor, ...], states: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Return the inputs of `level` for the newest level of a beam; `states` are further results of the last one."""
        raise NotImplementedError

    def level(self, changing: tuple[torch.Tensor, ...], depth: int, prefix: Any) -> tuple[torch.Tensor, ...]:
        """Return logits `(B, n, V)` after the newest level of a beam, and states if there are any.

        The logits may be `(B, 1, V)` if they do not depend on the path.

        `changing` is the result of `level_inputs`. The root has depth 0.
        """
        raise NotImplementedError

    def spread(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits `(B, n, vocab)` of the target's tokens."""
        return logits

    def prefix(self) -> Any:
        """Return what the draft reads of the target's cache; nothing by default."""

    def prefix_of_graph(self, runner: Any, prefix: Any) -> PrefixInGraph:
        """Return what a graph makes `prefix` from; nothing by default."""
        return PrefixInGraph()

    def prefix_in_graph(self, changing: tuple[torch.Tensor, ...], *fixed: Any) -> Any:
        """Return `prefix` inside a graph, from `changing` and `fixed` of [`PrefixInGraph`]."""

    @property
    def is_moved(self) -> bool:
        """Whether positions differ from places, as after images, which graphs do not know."""
        return self.rotates_as_target and self.binding.cache.rows.offsets is not None

    def propose(self, root: torch.Tensor) -> DraftTree:
        """Return a beam of the chosen widths after `root` `(batch,)`."""
        inputs, known, prefix = self.inputs(root), self.coupling.known(len(self.widths)), self.prefix()
        fields = self._grow(inputs, known, prefix)
        return DraftTree.of_fields(fields, len(self.widths), is_chain=max(self.widths) == 1)

    def grow(
        self,
        inputs: tuple[torch.Tensor, ...],
        known: Sequence[torch.Tensor] = (),
        prefix: Any = None,
        level: Callable[..., tuple[torch.Tensor, ...]] | None = None,
    ) -> tuple[torch.Tensor, ...]:
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

    def _grow_in_graph(self, inputs: tuple[torch.Tensor, ...], known: Sequence[torch.Tensor], prefix: Any) -> Any:
        """Draft a tree in one graph, if that is possible."""
        return self._run(_grow, (*inputs, *known), prefix, len(inputs)) or self.grow(inputs, known, prefix)

    def _grow_by_levels(self, inputs: tuple[torch.Tensor, ...], known: Sequence[torch.Tensor], prefix: Any) -> Any:
        """Draft a tree with one graph for each level, if that is possible."""

        def level(changing: tuple[torch.Tensor, ...], depth: int, prefix: Any) -> tuple[torch.Tensor, ...]:
            result: tuple[torch.Tensor, ...] | None = self._run(_level, changing, prefix, depth)
            return result or self.level(changing, depth, prefix)

        return self.grow(inputs, known, prefix, level)

    def cut(self, fields: tuple[torch.Tensor, ...], states: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return the fields of a tree, maybe with some nodes made padding; `states` are results of the last level."""
        return fields

    def _run(self, function: Any, changing: tuple[torch.Tensor, ...], prefix: Any, number: int) -> Any:
        """Return the result of `_grow` or `_level`, compiled or captured; `None` if that is not possible."""
        runner = self.binding.target.runner
        if self.is_moved or not runner.takes(self.binding.cache.lengths):
            return None
        parts = self.prefix_of_graph(runner, prefix)
        shape = len(changing[0]), tuple(self.widths), *parts.settings, self.coupling.key, number
        inputs, fixed = (*changing, *parts.changing), (self, len(changing), number, parts.fixed)
        return runner(function, shape, inputs, fixed, self._owner, self._holder)

    def replayed(self, method: str, *changing: torch.Tensor) -> Any:
        """Return the result of a method with these tensors, by a captured graph if steps are captured.

        The graph is that of an earlier call with tensors of the same shapes.
        """
        if self.is_moved:
            return getattr(self, method)(*changing)
        return self.binding.target.replayed(_call, changing, (self,), self._holder, (method,))

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the attention output `(B, H, n, D)` of queries to the keys that a mask `(B, n, M)` leaves.

        There may be more keys `(B, K, slots, D)` than the mask has.
        """
        key, value = key[:, :, : mask.shape[2]], value[:, :, : mask.shape[2]]
        out: torch.Tensor = self._kernels.tree_attention(query, key, value, mask=mask, scaling=self.scaling)[0]
        return out


def _grow(changing, drafter, count, num_inputs, fixed):
    """Run [`BeamDrafter.grow`] inside a graph."""
    prefix = drafter.prefix_in_graph(changing[count:], *fixed)
    return drafter.grow(tuple(changing[:num_inputs]), changing[num_inputs:count], prefix)


def _level(changing, drafter, count, depth, fixed):
    """Run [`BeamDrafter.level`] inside a graph."""
    return drafter.level(tuple(changing[:count]), depth, drafter.prefix_in_graph(changing[count:], *fixed))


def _call(changing, drafter, method):
    """Run a method of a drafter inside a graph."""
    return getattr(drafter, method)(*changing)
