"""The contexts of a step: they travel through the model's forward and compute the attention of every layer.

A context is a keyword of the model's forward (`model(..., tree=context)`). It reaches the attention function, which
calls `context.attend` and needs nothing else: a context of the installed package also works with a copy of this file
from the Hub, and the other way round.

[`TreeContext`] is hybrid tree attention, which verifies a draft tree. The N nodes see the committed prefix without any
mask and each other under the N x N tree mask. The two are separate calls, so that no (N, S + N) mask exists and a
kernel without masks can run over the prefix.

[`LevelContext`] is the same attention for one level of a draft tree whose earlier levels are staged already. A model
with a cache of its own drafts with it.

[`SparseContext`] is sparse attention, which drafts on selected keys and values. The layers in `dense_layers` read the
target's whole cache. Every other layer reads a compact buffer with its own selected entries. Positions have no meaning
in that buffer: rotary embedding was applied before an entry was stored, and the selection respected the window.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import torch

from .lengths import SeqLens
from .merge import AttentionState, merge_attention_states
from .registry import AttentionBackend


class CallCounter:
    """The number of calls by attention layers, which proves that a model runs on this attention."""

    def __init__(self) -> None:
        self.total = 0

    def __repr__(self) -> str:
        return f"CallCounter(total={self.total})"


@dataclass
class StepContext:
    """One step, as the attention layers see it. Build a new context for every forward.

    Subclasses define `attend(backend, layer_idx, query, key, value, *, scaling, sliding_window, softcap, sinks)`, and
    how a graph makes the same context for every step: `of_step` is read before the step, `in_graph` is a part of it.

    Args:
        lengths ([`SeqLens`]): Used slots per row.
        positions (`torch.LongTensor` of shape `(B, N)`): Absolute positions of the queries.
        windows (`tuple[int | None, ...]`, *optional*):
            Sliding window of every layer. By default each layer's own argument decides.
    """

    lengths: SeqLens
    positions: torch.Tensor
    windows: tuple[int | None, ...] | None = field(default=None, kw_only=True)
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
            values = {part.name: getattr(self, part.name) for part in fields(self)}
            moved: dict[str, Any] = {
                name: value.to(device, non_blocking=non_blocking)
                for name, value in values.items()
                if isinstance(value, torch.Tensor)
            }
            self._memo[device] = replace(self, **moved)
        context: Self = self._memo[device]
        return context

    def window_of(self, layer_idx: int, passed: int | None) -> int | None:
        """Return the sliding window of a layer whose own argument is `passed`."""
        return passed if self.windows is None else self.windows[layer_idx]

    def of_step(self) -> tuple[tuple[torch.Tensor, ...], tuple]:
        """Return the tensors that change with every step, and hashable settings that choose the graph."""
        raise NotImplementedError

    @classmethod
    def in_graph(
        cls,
        changing: Sequence[torch.Tensor],
        settings: tuple,
        mask: torch.Tensor,
        layers: Sequence[SeqLens],
        keep: Any,
    ) -> Self:
        """Return the context of a step inside a graph.

        Its counter of calls is new and passed by hand: a number that grows would become a constant of the graph, and
        torch.compile cannot trace the factory of a field.

        Args:
            changing (`Sequence[torch.Tensor]`): Tensors from `of_step`.
            settings (`tuple`): Settings from `of_step`.
            mask (`torch.BoolTensor` of shape `(B, 1, N, N)`): Mask of the model's forward.
            layers (`Sequence[SeqLens]`): Used slots of every layer before the step.
            keep (*optional*): Capture inside the graph. Its `score_rows` and `last_node` are set if scores are wanted.
        """
        raise NotImplementedError


def within_window(
    mask: torch.Tensor, queries: torch.Tensor, nodes: torch.Tensor, sliding_window: int | None, memo: dict[Any, Any]
) -> torch.Tensor:
    """Return a tree mask `(B, N, M)` without the nodes that are outside the window of a query.

    Args:
        mask (`torch.BoolTensor` of shape `(B, N, M)`): Which of M nodes the N queries attend to.
        queries (`torch.LongTensor` of shape `(B, N)`): Positions of the queries.
        nodes (`torch.LongTensor` of shape `(B, M)`): Positions of the nodes.
        sliding_window (`int`, *optional*): The window.
        memo (`dict`): Holds the result for the other layers of the step.
    """
    if sliding_window is None or sliding_window >= mask.shape[-1]:  # no path is longer than the tree
        return mask
    if sliding_window not in memo:
        distance = queries[:, :, None] - nodes[:, None, :]
        memo[sliding_window] = mask & (distance < sliding_window)
    found: torch.Tensor = memo[sliding_window]
    return found


@dataclass
class TreeContext(StepContext):
    """One verification step, as the attention layers see it. Build a new context for every forward.

    Args:
        lengths ([`SeqLens`]): Committed prefix per row.
        positions (`torch.LongTensor` of shape `(B, N)`): Prefix length plus depth of each node.
        mask (`torch.BoolTensor` of shape `(B, N, N)`): Ancestor-or-self; a padding node sees only itself.
        capture (*optional*): Object whose `collect(layer_idx, query, key, lse, *, lengths, scaling, softcap)` receives
            every layer's queries, keys and log-sum-exp. If it has `score_rows` (a [`ScoreRows`] or None) and
            `last_node`, a backend with `scored_attention` writes the scores itself, and
            `keep_scores(layer_idx, scores, lengths)` is called instead.
        calls ([`CallCounter`], *optional*): Counts the layers that called.
        windows: See [`StepContext`].
    """

    mask: torch.Tensor
    capture: Any = None
    calls: CallCounter = field(default_factory=CallCounter)

    def of_step(self) -> tuple[tuple[torch.Tensor, ...], tuple]:
        """Return positions, and the last nodes if a backend writes scores; the kind of capture and the windows."""
        score_rows = getattr(self.capture, "score_rows", None)
        last_node = () if score_rows is None else (self.capture.last_node,)
        return (self.positions, *last_node), (self.capture is not None, score_rows, self.windows)

    @classmethod
    def in_graph(
        cls,
        changing: Sequence[torch.Tensor],
        settings: tuple,
        mask: torch.Tensor,
        layers: Sequence[SeqLens],
        keep: Any,
    ) -> Self:
        """Return the context of a verification inside a graph; see [`StepContext`]."""
        is_captured, score_rows, windows = settings
        if score_rows is not None:
            keep.score_rows, keep.last_node = score_rows, changing[1]
        capture = keep if is_captured else None
        return cls(layers[0], changing[0], mask[:, 0], capture, CallCounter(), windows=windows)

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
        """Compute the attention of the N staged nodes in one layer.

        Args:
            backend ([`AttentionBackend`]): Backend that computes.
            layer_idx (`int`): Index of the layer.
            query (`torch.Tensor` of shape `(B, H, N, D)`): Queries of the nodes.
            key (`torch.Tensor` of shape `(B, K, S, D)`):
                The cache: the prefix in the slots below `lengths[b]`, the nodes in the N slots from there on.
            value (`torch.Tensor` of shape `(B, K, S, Dv)`): Likewise.
            scaling (`float`): Factor of the scores.
            sliding_window (`int`, *optional*): Window that the layer passes, in positions.
            softcap (`float`, *optional*): Softcap of the scores.
            sinks (`torch.Tensor` of shape `(H,)`, *optional*): Sink logits of this layer.

        Returns:
            `torch.Tensor` of shape `(B, H, N, Dv)`.
        """
        self.calls.total += 1
        sliding_window = self.window_of(layer_idx, sliding_window)
        options = {"scaling": scaling, "sliding_window": sliding_window, "softcap": softcap}
        scored = self._attend_scored(backend, layer_idx, query, key, value, sinks, options)
        if scored is not None:
            return scored
        out, lse = self._attend(backend, query, key, value, sinks, options)
        if self.capture is not None:
            where = {"lengths": self.lengths, "scaling": scaling, "softcap": softcap}
            self.capture.collect(layer_idx, query, key, lse, **where)
        return out

    def _attend_scored(
        self,
        backend: AttentionBackend,
        layer_idx: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor | None:
        """Attend and pass the scores to the capture. None if no scores are wanted or the backend writes none."""
        rows = getattr(self.capture, "score_rows", None)
        attention = getattr(backend, "scored_attention", None)  # backends of an older copy have no such field
        if rows is None or attention is None or layer_idx in rows.skipped_layers:
            return None
        last_node = self.capture.last_node
        tree = {"mask": self.windowed_mask(options["sliding_window"]), "positions": self.positions, "sinks": sinks}
        inputs = (query, key, value, self.lengths, last_node)
        state = attention(*inputs, **tree, per_row=rows.weights, **options)
        if state is None:
            return None
        out, lse, scores = state
        self.capture.keep_scores(layer_idx, rows.of_entries(scores, lse, last_node), self.lengths)
        attended: torch.Tensor = out
        return attended

    def _attend(
        self,
        backend: AttentionBackend,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        options: dict[str, Any],
    ) -> AttentionState:
        if self.mask.shape[-1] == 1:  # a lone node: its own slot is the end of the prefix
            if "with_root" not in self._memo:
                self._memo["with_root"] = self.lengths.plus(1)
            lengths = self._memo["with_root"]
            state = backend.prefix_attention(query, key, value, lengths, positions=self.positions, **options)
            return state if sinks is None else merge_attention_states([state], sinks)
        mask, where = self.windowed_mask(options["sliding_window"]), (query, key, value, self.lengths)
        if backend.hybrid_attention is not None and mask.shape[1] == mask.shape[2]:  # the nodes of whole trees
            hybrid = backend.hybrid_attention(*where, mask, self.positions, sinks=sinks, memo=self._memo, **options)
            if hybrid is not None:
                return hybrid
        prefix = backend.prefix_attention(*where, positions=self.positions, **options)
        nodes = self.staged(key), self.staged(value)
        tree = backend.tree_attention(query, *nodes, mask, scaling=options["scaling"], softcap=options["softcap"])
        return merge_attention_states([prefix, tree], sinks)

    def windowed_mask(self, sliding_window: int | None) -> torch.Tensor:
        """Return the tree mask `(B, N, N)` without the ancestors that are outside the window."""
        return within_window(self.mask, self.positions, self.positions, sliding_window, self._memo)

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
    """One level of a draft tree, as the attention layers see it. Build a new context for every forward.

    The forward runs the n nodes of the newest level. They see the prefix, and those of the N nodes after it that are
    their ancestors: the N - n nodes of earlier levels, which are staged already, and themselves.

    Args:
        lengths ([`SeqLens`]): Prefix per row, which all nodes see.
        positions (`torch.LongTensor` of shape `(B, n)`): Positions of the newest level.
        mask (`torch.BoolTensor` of shape `(B, n, N)`): Ancestor-or-self among all staged nodes.
        node_positions (`torch.LongTensor` of shape `(B, N)`): Positions of all staged nodes.
        calls ([`CallCounter`], *optional*): Counts the layers that called.
    """

    node_positions: torch.Tensor = field(kw_only=True)

    def of_step(self) -> tuple[tuple[torch.Tensor, ...], tuple]:
        """Return the positions; the number of nodes and the windows."""
        return (self.positions, self.node_positions), (self.mask.shape[-1], self.windows)

    @classmethod
    def in_graph(
        cls,
        changing: Sequence[torch.Tensor],
        settings: tuple,
        mask: torch.Tensor,
        layers: Sequence[SeqLens],
        keep: Any,
    ) -> Self:
        """Return the context of a level inside a graph; see [`StepContext`]."""
        positions, node_positions = changing
        prefix = layers[0].plus(mask.shape[2] - mask.shape[3])  # earlier levels lie between the prefix and the level
        options: dict[str, Any] = {"windows": settings[1], "node_positions": node_positions}
        return cls(prefix, positions, mask[:, 0], None, CallCounter(), **options)

    def windowed_mask(self, sliding_window: int | None) -> torch.Tensor:
        """Return the mask `(B, n, N)` without the nodes that are outside the window."""
        return within_window(self.mask, self.positions, self.node_positions, sliding_window, self._memo)


class DraftingContext(StepContext):
    """One drafting step whose layers read the whole cache or a part of it. Subclasses implement `state`."""

    calls: CallCounter

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
        """Compute the attention of the drafting queries in one layer; arguments as in [`TreeContext.attend`].

        Args:
            key (`torch.Tensor` of shape `(B, K, S, D)`): The whole cache, or the compact buffer of a sparse layer.
            value (`torch.Tensor` of shape `(B, K, S, Dv)`): Likewise.
            sliding_window (`int`, *optional*): Window of this layer; it applies to layers that read the whole cache.

        Returns:
            `torch.Tensor` of shape `(B, H, N, Dv)`.
        """
        self.calls.total += 1
        options: dict[str, Any] = {"scaling": scaling, "softcap": softcap}
        dense = {"positions": self.positions, "sliding_window": self.window_of(layer_idx, sliding_window)}
        state = self.state(backend, layer_idx, (query, key, value), options, options | dense)
        return state[0] if sinks is None else merge_attention_states([state], sinks)[0]

    def state(
        self,
        backend: AttentionBackend,
        layer_idx: int,
        where: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        sparse: dict[str, Any],
        dense: dict[str, Any],
    ) -> AttentionState:
        """Return the state of one layer.

        Args:
            where (`tuple`): Query, key and value.
            sparse (`dict`): Options of attention to a part of the cache.
            dense (`dict`): Options of attention to the whole cache.
        """
        raise NotImplementedError


@dataclass
class SparseContext(DraftingContext):
    """One drafting step, as the attention layers see it. Build a new context for every forward.

    Args:
        lengths ([`SeqLens`]): Used entries of the compact buffers, including the query's own.
        positions (`torch.LongTensor` of shape `(B, N)`): Absolute positions of the queries.
        dense_lengths ([`SeqLens`]): Used slots of the whole cache, including the query's own.
        dense_layers (`frozenset[int]`): Layers that read the whole cache.
        calls ([`CallCounter`], *optional*): Counts the layers that called.
    """

    dense_lengths: SeqLens
    dense_layers: frozenset[int] = frozenset()
    calls: CallCounter = field(default_factory=CallCounter)

    def of_step(self) -> tuple[tuple[torch.Tensor, ...], tuple]:
        """Return the positions; the dense layers and the windows."""
        return (self.positions,), (self.dense_layers, self.windows)

    @classmethod
    def in_graph(
        cls,
        changing: Sequence[torch.Tensor],
        settings: tuple,
        mask: torch.Tensor,
        layers: Sequence[SeqLens],
        keep: Any,
    ) -> Self:
        """Return the context of a drafting step inside a graph; see [`StepContext`]."""
        dense_layers, windows = settings
        sparse = next((lengths for layer, lengths in enumerate(layers) if layer not in dense_layers), layers[0])
        dense = next((layers[layer] for layer in dense_layers), sparse)
        return cls(sparse.plus(1), changing[0], dense.plus(1), dense_layers, CallCounter(), windows=windows)

    def state(
        self,
        backend: AttentionBackend,
        layer_idx: int,
        where: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        sparse: dict[str, Any],
        dense: dict[str, Any],
    ) -> AttentionState:
        """Attend to the compact buffer, or to the whole cache; see [`DraftingContext.state`]."""
        if layer_idx in self.dense_layers:
            return backend.prefix_attention(*where, self.dense_lengths, **dense)
        return backend.prefix_attention(*where, self.lengths, **sparse)
