"""The contexts of a step: they travel through the model's forward and compute the attention of every layer.

A context is a keyword of the model's forward (`model(..., tree=context)`). It reaches the attention function, which
calls `context.attend` and needs nothing else.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch

from .lengths import SeqLens
from .registry import AttentionBackend, AttentionState, merge_attention_states


class LayerAttention(NamedTuple):
    """The attention that one layer of a step asks for."""

    backend: AttentionBackend
    layer_idx: int
    query: torch.Tensor  # `(B, H, N, D)`
    key: torch.Tensor  # `(B, K, S, D)`: buffer of the layer's cache, with the keys of the step
    value: torch.Tensor  # `(B, K, S, Dv)`, likewise
    sliding_window: int | None  # window of the layer, in positions
    sinks: torch.Tensor | None  # `(H,)`, logits
    options: dict[str, Any]  # the keywords `scaling`, a factor of the scores, and `softcap` of every attention function

    def attend_to_prefix(self, lengths: SeqLens, positions: torch.Tensor | None = None) -> AttentionState:
        """Attend to the slots below `lengths[b]`, with the window if given `positions` `(B, N)`, without the sinks."""
        window = {"positions": positions, "sliding_window": None if positions is None else self.sliding_window}
        return self.backend.prefix_attention(self.query, self.key, self.value, lengths, **window, **self.options)

    def with_sinks(self, *parts: AttentionState) -> AttentionState:
        """Merge attention to different keys, and the sinks."""
        return parts[0] if len(parts) == 1 and self.sinks is None else merge_attention_states(parts, self.sinks)


class GraphStep(NamedTuple):
    """What a context is made of inside a graph, where the lengths are those of the step."""

    changing: Sequence[torch.Tensor]  # tensors from `of_step`
    settings: tuple  # settings from `of_step`
    mask: torch.Tensor  # `(B, 1, N, M)`: mask of the model's forward
    layers: Sequence[SeqLens]  # used slots of every layer before the step
    keep: Any  # capture inside the graph. Its `score_rows` and `last_node` are set if scores are wanted.


@dataclass
class StepContext:
    """One step, as the attention layers see it. Build a new context for every forward.

    Subclasses define `state`, and how a graph makes the same context for every step: `of_step` is read before the step,
    `in_graph` is a part of it.
    """

    lengths: SeqLens
    positions: torch.Tensor
    windows: tuple[int | None, ...] | None = field(default=None, kw_only=True)
    calls: list[int] = field(default_factory=list, init=False, repr=False, compare=False)
    # values that depend on the step but not on the layer; the first layer that needs one computes it
    _memo: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def to(self, device: torch.device | str | int | None, non_blocking: bool = False) -> Self:
        """Return this context on another device, or itself if it is there. Only tensors are copied."""
        if device is None:  # accelerate passes None for a module without a device of its own, as it does for tensors
            return self
        device = torch.device(device)
        here = self.positions.device
        if device == here or (device.index is None and device.type == here.type):
            return self
        if device not in self._memo:  # accelerate moves the arguments of every layer; one copy per device is enough
            moved = copy(self)
            moved._memo = {}
            for name, value in vars(self).items():
                if isinstance(value, torch.Tensor):
                    setattr(moved, name, value.to(device, non_blocking=non_blocking))
            self._memo[device] = moved
        context: Self = self._memo[device]
        return context

    def attend(
        self,
        backend: AttentionBackend,
        layer_idx: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the attention of one layer, `(B, H, N, Dv)`; arguments as in [`LayerAttention`]."""
        self.calls.append(layer_idx)
        window, options = sliding_window, {"scaling": scaling, "softcap": softcap}
        if self.windows is not None:
            window = self.windows[layer_idx]
        return self.state(LayerAttention(backend, layer_idx, query, key, value, window, sinks, options))[0]

    def state(self, layer: LayerAttention) -> AttentionState:
        """Return output and log-sum-exp of one layer, with the sinks."""
        raise NotImplementedError

    def of_step(self) -> tuple[tuple[torch.Tensor, ...], tuple]:
        """Return the tensors that change with every step, and hashable settings that choose the graph."""
        raise NotImplementedError

    @classmethod
    def in_graph(cls, step: GraphStep) -> Self:
        """Return the context of a step inside a graph."""
        raise NotImplementedError


@dataclass
class TreeContext(StepContext):
    """One verification step by hybrid tree attention.

    The N nodes see the committed prefix without any mask and each other under the N x N tree mask. The two are separate
    calls, so that no (N, S + N) mask exists and a kernel without masks can run over the prefix.

    Args:
        lengths ([`SeqLens`]): Committed prefix per row: the slots of the cache below `lengths[b]`. The nodes are staged
            in the N slots from there on.
        positions (`torch.LongTensor` of shape `(B, N)`): Prefix length plus depth of each node.
        mask (`torch.BoolTensor` of shape `(B, N, N)`): Ancestor-or-self; a padding node sees only itself.
        capture (*optional*): Object whose `collect(layer_idx, query, key, lse, *, lengths, scaling, softcap)` receives
            every layer's queries, keys and log-sum-exp. If it has `score_rows` (a [`ScoreRows`] or None) and
            `last_node`, a backend with `attention_with_scores` computes the scores itself. Then `keep_scores(layer_idx,
            scores)` is called instead.
        windows: See [`StepContext`].
    """

    mask: torch.Tensor
    capture: Any = None

    def of_step(self) -> tuple[tuple[torch.Tensor, ...], tuple]:
        """Return positions, and the last nodes if a backend writes scores; the kind of capture and the windows."""
        score_rows = getattr(self.capture, "score_rows", None)
        last_node = () if score_rows is None else (self.capture.last_node,)
        return (self.positions, *last_node), (self.capture is not None, score_rows, self.windows)

    @classmethod
    def in_graph(cls, step: GraphStep) -> Self:
        is_captured, score_rows, windows = step.settings
        if score_rows is not None:
            step.keep.score_rows, step.keep.last_node = score_rows, step.changing[1]
        capture = step.keep if is_captured else None
        return cls(step.layers[0], step.changing[0], step.mask[:, 0], capture, windows=windows)

    def state(self, layer: LayerAttention) -> AttentionState:
        """Attend from the nodes, and pass scores, or what they are computed from, to the capture."""
        if self.capture is None:
            return self.hybrid(layer)
        if (state := self._scored(layer)) is None:
            state = self.hybrid(layer)
            inputs = (layer.layer_idx, layer.query, layer.key, state[1])
            self.capture.collect(*inputs, lengths=self.lengths, **layer.options)
        return state

    def hybrid(self, layer: LayerAttention) -> AttentionState:
        """Attend from the nodes to the prefix, and to each other."""
        if (state := self.at_once(layer)) is not None:
            return state
        prefix = layer.attend_to_prefix(self.lengths, self.positions)
        nodes = layer.query, self.staged(layer.key), self.staged(layer.value)
        tree = layer.backend.tree_attention(*nodes, self.windowed_mask(layer.sliding_window), **layer.options)
        return layer.with_sinks(prefix, tree)

    def at_once(self, layer: LayerAttention) -> AttentionState | None:
        """Attend as above in one call: from a lone root, or by a backend that can. `None` if there are two."""
        if self.mask.shape[-1] == 1:  # its own slot is the end of the prefix
            return layer.with_sinks(layer.attend_to_prefix(self.lengths.plus(1), self.positions))
        if layer.backend.hybrid_attention is None:
            return None
        inputs = layer.query, layer.key, layer.value, self.lengths, self.windowed_mask(layer.sliding_window)
        options = {"sliding_window": layer.sliding_window, "sinks": layer.sinks, "memo": self._memo}
        return layer.backend.hybrid_attention(*inputs, self.positions, **options, **layer.options)

    def _scored(self, layer: LayerAttention) -> AttentionState | None:
        """Return the state, with the scores in the capture. None if it wants no scores or the backend writes none."""
        rows, attention = getattr(self.capture, "score_rows", None), layer.backend.attention_with_scores
        if rows is None or attention is None or layer.layer_idx in rows.skipped_layers:
            return None
        window = {"positions": self.positions, "sliding_window": layer.sliding_window}
        tree = {"mask": self.windowed_mask(layer.sliding_window), "sinks": layer.sinks}
        kind = {"weights": rows.weights, "per_layer": rows.per_layer}
        inputs = (layer.query, layer.key, layer.value, self.lengths, self.capture.last_node)
        state = attention(*inputs, **tree, **kind, **window, **layer.options)
        if state is None:
            return None
        out, lse, scores = state
        self.capture.keep_scores(layer.layer_idx, scores)
        return out, lse

    def windowed_mask(self, sliding_window: int | None) -> torch.Tensor:
        """Return the tree mask without the ancestors that are outside the window of a node."""
        if sliding_window is None or sliding_window >= self.mask.shape[-1]:  # no path is longer than the tree
            return self.mask
        if sliding_window not in self._memo:
            self._memo[sliding_window] = self.mask & (self._distances() < sliding_window)
        mask: torch.Tensor = self._memo[sliding_window]
        return mask

    def _distances(self) -> torch.Tensor:
        """Return how far the nodes of the mask are apart, in the places that windows count."""
        return self.positions[:, :, None] - self.positions[:, None]

    def staged(self, cached: torch.Tensor) -> torch.Tensor:
        """Return the nodes' part of a key or value buffer, `(B, K, N, D)`: a view if all rows are equally long."""
        nodes = self.mask.shape[-1]
        if self.lengths.shared is not None:
            return cached.narrow(2, self.lengths.shared, nodes)
        if "slots" not in self._memo:
            self._memo["slots"] = self.lengths.slots(nodes, self.positions.device)[1][:, None, :, None]
        return cached.gather(2, self._memo["slots"].expand(-1, cached.shape[1], -1, cached.shape[3]))


@dataclass
class LevelContext(TreeContext):
    """The n nodes of the newest level of a draft tree.

    They see the prefix, and those of the N nodes after it that are their ancestors: the N - n nodes of earlier levels,
    which are staged already, and themselves. `mask` is `(B, n, N)`.
    """

    node_positions: torch.Tensor = field(kw_only=True)

    def of_step(self) -> tuple[tuple[torch.Tensor, ...], tuple]:
        return (self.positions, self.node_positions), (self.mask.shape[-1], self.windows)

    @classmethod
    def in_graph(cls, step: GraphStep) -> Self:
        mask, (positions, node_positions), (_, windows) = step.mask[:, 0], step.changing, step.settings
        # earlier levels lie between the prefix and the level
        prefix = step.layers[0].plus(mask.shape[1] - mask.shape[2])
        return cls(prefix, positions, mask, windows=windows, node_positions=node_positions)

    def at_once(self, layer: LayerAttention) -> AttentionState | None:
        """Attend in one call to a first level, which is a whole tree."""
        return super().at_once(layer) if self.mask.shape[1] == self.mask.shape[2] else None

    def _distances(self) -> torch.Tensor:
        return self.positions[:, :, None] - self.node_positions[:, None]


@dataclass
class SparseContext(StepContext):
    """One drafting step on selected keys and values.

    The layers in `dense_layers` read the target's whole cache, with their windows. Every other layer reads a compact
    buffer with its own selected entries. Positions have no meaning in that buffer: rotary embedding was applied before
    an entry was stored, and the selection respected the window. Both lengths include the query's own slot.
    """

    dense_lengths: SeqLens
    dense_layers: frozenset[int] = frozenset()

    def of_step(self) -> tuple[tuple[torch.Tensor, ...], tuple]:
        return (self.positions,), (self.dense_layers, self.windows)

    @classmethod
    def in_graph(cls, step: GraphStep) -> Self:
        dense_layers, windows = step.settings
        sparse = next(
            (lengths for layer, lengths in enumerate(step.layers) if layer not in dense_layers), step.layers[0]
        )
        dense = next((step.layers[layer] for layer in dense_layers), sparse)
        return cls(sparse.plus(1), step.changing[0], dense.plus(1), dense_layers, windows=windows)

    def state(self, layer: LayerAttention) -> AttentionState:
        if layer.layer_idx in self.dense_layers:
            return layer.with_sinks(layer.attend_to_prefix(self.dense_lengths, self.positions))
        return layer.with_sinks(layer.attend_to_prefix(self.lengths))
