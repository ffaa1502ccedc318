"""Recurrent states in captured steps: at places that do not change, read by a verification, written by one commit.

Graphs hold addresses, and run several times before they are captured. A verification therefore only reads the states;
the terms of those after its nodes are its results. A commit computes the states of all layers from these terms alone,
so running it again changes nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..draft_tree import DraftTree
from ..target import FixedStep
from .recurrences import Kept, StagedNodes, Terms


@dataclass(eq=False)
class FixedStates:
    """States of all layers at places that do not change, which graphs read and a commit writes.

    Layers whose states have the same shapes are a group. Its states lie side by side, as those of one layer with all
    of their heads.

    Attributes:
        numbers (`list[int]`): Index of each layer in the cache.
        groups (`list[tuple[list[int], list[torch.Tensor]]]`): Places of the layers among these, and their states.
        views (`list[dict[str, torch.Tensor]]`): The states of each layer.
        rows (`torch.LongTensor` of shape `(B,)`): Numbers of the rows.
        part ([`RecurrentStates`]): The part of a cache that these are the states of.
    """

    numbers: list[int]
    groups: list[tuple[list[int], list[torch.Tensor]]]
    views: list[dict[str, torch.Tensor]]
    rows: torch.Tensor
    part: Any  # the states of a cache

    @classmethod
    def of(cls, part: Any) -> "FixedStates":
        """Return empty places for the states of all layers."""
        alike: dict[Any, list[int]] = {}
        for place, layer in enumerate(part.layers):
            states = layer.states().items()
            alike.setdefault(tuple((name, x.shape, x.dtype, x.device) for name, x in states), []).append(place)
        groups, views = [], [dict[str, torch.Tensor]() for _ in part.layers]
        with torch.inference_mode(False):  # they outlive the call
            for shapes, places in alike.items():
                buffers = []
                for name, (rows, heads, *rest), dtype, device in shapes:
                    buffers.append(torch.zeros(rows, len(places) * heads, *rest, dtype=dtype, device=device))
                    for place, view in zip(places, buffers[-1].split(heads, 1), strict=True):
                        views[place][name] = view
                groups.append((places, buffers))
            rows = torch.arange(len(buffers[0]), device=buffers[0].device)
        numbers = [number for number, layer in enumerate(part.cache.layers) if layer in part.layers]
        return cls(numbers, groups, views, rows, part)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Inputs of a step: the parents of a tree that branches."""
        tree = None if self.part.nodes is None else self.part.nodes.tree
        return () if tree is None or tree.is_chain else (tree.parents,)

    @property
    def key(self) -> tuple:
        """What tells graphs apart."""
        return self.part.nodes is not None, len(self.tensors)

    @property
    def buffers(self) -> list[torch.Tensor]:
        return [buffer for _, buffers in self.groups for buffer in buffers]

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self.buffers)

    def place(self, layers: Sequence[Any]) -> bool:
        """Copy states of layers that lie elsewhere to their places; return whether all layers have such states."""
        moved: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for layer, views in zip(layers, self.views, strict=True):
            states = layer.states()
            for name, view in views.items():
                state = states.get(name)
                if state is view:
                    continue
                if state is None or (state.shape, state.dtype, state.device) != (view.shape, view.dtype, view.device):
                    return False
                for pair, tensor in zip(moved.setdefault(view.dtype, ([], [])), (view, state), strict=True):
                    pair.append(tensor)
        for pairs in moved.values():
            torch._foreach_copy_(*pairs)
        for layer, views in zip(layers, self.views, strict=True) if moved else ():
            layer.put(views)
        return True

    def copy(self, other: "FixedStates", layers: Sequence[Any]) -> None:
        """Copy the states of another cache of the same target."""
        torch._foreach_copy_(self.buffers, other.buffers)
        for layer, views in zip(layers, self.views, strict=True):
            layer.put(views)

    def begin(self) -> "StatesInGraph":
        """Return the states inside a graph."""
        return StatesInGraph(self)


class StatesInGraph:
    """States inside a graph. They begin with the committed ones, which are only read.

    Attributes:
        layers (`dict[int, StateLayer]`): A layer for the mixers of transformers, by its index in the cache.
    """

    is_text: torch.Tensor | None = None  # prompts do not run in graphs

    def __init__(self, fixed: FixedStates):
        self.fixed = fixed
        self.nodes: StagedNodes | None = None
        self.layers: dict[int, Any] = {}
        self._is_staged = fixed.key[0]  # a verification, whose nodes a later commit keeps
        self._root: list[list[torch.Tensor]] = []
        for number, views in zip(fixed.numbers, fixed.views, strict=True):
            layer = self.layers[number] = fixed.part.new_layer(len(fixed.rows))
            layer.part = self
            layer.put(views)

    def stage(self, tokens: torch.Tensor, mask: torch.Tensor, parents: Sequence[torch.Tensor], tree: Any) -> None:
        """Let the next forward be that of these nodes, a chain unless there are parents or a tree."""
        if tree is None:
            above = parents[0] if parents else tokens
            tree = DraftTree(tokens, above, tokens, is_chain=not parents, max_depth=tokens.shape[1] - 1)
            tree.__dict__["mask"] = mask[:, 0]  # fills the cached property
        self.nodes = StagedNodes(tree)
        for layer in self.layers.values():
            layer.drop()

    def keep_newest(self) -> None:
        """Keep the only node of the last forward in every row, unless a commit will."""
        for layer in () if self._is_staged else self.layers.values():
            layer.put(layer.newest())

    def keep_root(self, counts: torch.Tensor) -> None:
        """Keep the first `counts[b]` nodes, and remember the states after them as those of the root."""
        kept = Kept(None, counts)
        for layer in self.layers.values():
            layer.put(layer.after(kept))
        self._root = self._states()

    def _states(self) -> list[list[torch.Tensor]]:
        return [list(layer.states().values()) for layer in self.layers.values()]

    def result(self, leaves_states: bool) -> list[Any]:
        """Return the joined terms of a verification, by group, as classes and tensors; else states for the cache.

        These are the states of the root, those after the last forward, or none.
        """
        if not self._is_staged:
            return self._states() if leaves_states else self._root
        layers, found = list(self.layers.values()), []
        for places, _ in self.fixed.groups:
            for name in self.fixed.views[places[0]]:
                terms = [layers[place].terms(name) for place in places]
                found.append((type(terms[0]), type(terms[0]).joined(terms).tensors))
        return found


@dataclass(eq=False)
class CommitStates(FixedStep):
    """The commit of all layers, from counts `(B,)` and a path `(B, M)` unless a chain was verified."""

    states: FixedStates
    terms: list[Terms]

    @property
    def key(self) -> tuple:
        return tuple(one.tensors[0].data_ptr() for one in self.terms)

    def run(self, *inputs: torch.Tensor) -> tuple[()]:
        counts, *path = inputs
        kept = Kept(path[0] if path else None, counts, rows=self.states.rows)
        for terms, buffer in zip(self.terms, self.states.buffers, strict=True):
            terms.after(kept, buffer, out=buffer)
        return ()
