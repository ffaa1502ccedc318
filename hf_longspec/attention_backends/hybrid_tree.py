"""Hybrid tree attention: what an attention layer of the target runs when it verifies a draft tree.

The N nodes see the committed prefix without any mask and each other under the N x N tree mask. Splitting the two keeps
the mask out of the long part: no (N, S + N) mask exists, and the prefix runs through a kernel that takes none.

`TreeContext` travels as a keyword of the model's forward (`model(..., tree=context)`) to the attention function, which
calls `context.attend`. It needs nothing but that method: two copies of this file, installed and from the Hub, can meet.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from .merge import AttentionState, merge_attention_states
from .registry import AttentionBackend
from .slots import shared_length
from .step_context import CallCounter, StepContext


@dataclass
class TreeContext(StepContext):
    """One verification step, as the attention layers see it. Build a new one for every forward.

    Args:
        lengths (`torch.LongTensor` of shape `(B,)`): Committed prefix per row.
        host_lengths (`tuple[int, ...]`, *optional*): The same numbers on the host; None where they are not to be read.
        depths (`torch.LongTensor` of shape `(B, N)`): Depth of each node; node n is at position `lengths + depths`.
        mask (`torch.BoolTensor` of shape `(B, N, N)`): Ancestor-or-self; a padding node sees only itself.
        capture (*optional*): Object whose `collect(layer_idx, query, key, lse, *, lengths, host_lengths, scaling,
            softcap)` sees every layer's queries, keys and log-sum-exp. If it has `score_rows` (a [`ScoreRows`] or None)
            and `last_node`, a backend that can writes the scores itself, and `keep_scores(layer_idx, scores,
            host_lengths)` is called instead.
        calls ([`CallCounter`], *optional*): Counts the layers that called.
        windows: See [`StepContext`].
    """

    depths: torch.Tensor
    mask: torch.Tensor
    capture: Any = None
    calls: CallCounter = field(default_factory=CallCounter)

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
        """Attention of the N staged nodes in one layer.

        Args:
            backend ([`AttentionBackend`]): Who computes it.
            layer_idx (`int`): Which layer asks.
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
            where = {"lengths": self.lengths, "host_lengths": self.host_lengths}
            self.capture.collect(layer_idx, query, key, lse, scaling=scaling, softcap=softcap, **where)
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
        """Attention that hands its scores to the capture; None where they are not wanted or the backend has none."""
        rows = getattr(self.capture, "score_rows", None)
        attention = getattr(backend, "scored_attention", None)  # backends of an older copy have no such field
        if rows is None or attention is None or layer_idx in rows.skipped_layers:
            return None
        last_node = self.capture.last_node
        tree = {"mask": self.windowed_mask(options["sliding_window"]), "positions": self.positions, "sinks": sinks}
        inputs = (query, key, value, self.lengths, last_node)
        state = attention(*inputs, **tree, host_lengths=self.host_lengths, per_row=rows.weights, **options)
        if state is None:
            return None
        out, lse, scores = state
        self.capture.keep_scores(layer_idx, rows.of_entries(scores, lse, last_node), self.host_lengths)
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
        if self.mask.shape[-1] == 1:  # a lone root: its own slot simply ends the prefix
            lengths, host_lengths = self._lengths_with_root()
            positions = self.positions
            state = backend.prefix_attention(
                query, key, value, lengths, positions=positions, host_lengths=host_lengths, **options
            )
            return state if sinks is None else merge_attention_states([state], sinks)
        mask, host_lengths = self.windowed_mask(options["sliding_window"]), self.host_lengths
        if backend.hybrid_attention is not None:
            step = {"lengths": self.lengths, "host_lengths": host_lengths, "memo": self._memo}
            hybrid = backend.hybrid_attention(query, key, value, mask, self.positions, sinks=sinks, **step, **options)
            if hybrid is not None:
                return hybrid
        place = {"positions": self.positions, "host_lengths": host_lengths}
        prefix = backend.prefix_attention(query, key, value, self.lengths, **place, **options)
        nodes = self.staged(key), self.staged(value)
        tree = backend.tree_attention(query, *nodes, mask, scaling=options["scaling"], softcap=options["softcap"])
        return merge_attention_states([prefix, tree], sinks)

    # not cached_property: it takes a lock, which torch.compile cannot trace
    @property
    def positions(self) -> torch.Tensor:
        """Absolute positions of the nodes, `(B, N)`."""
        if "positions" not in self._memo:
            self._memo["positions"] = self.lengths[:, None] + self.depths
        positions: torch.Tensor = self._memo["positions"]
        return positions

    def windowed_mask(self, sliding_window: int | None) -> torch.Tensor:
        """The tree mask without ancestors that lie outside the window."""
        if sliding_window is None or sliding_window >= self.mask.shape[-1]:  # no path is longer than the tree
            return self.mask
        if sliding_window not in self._memo:
            distance = self.depths[:, :, None] - self.depths[:, None, :]
            self._memo[sliding_window] = self.mask & (distance < sliding_window)
        mask: torch.Tensor = self._memo[sliding_window]
        return mask

    def staged(self, cached: torch.Tensor) -> torch.Tensor:
        """The nodes' part of a key or value buffer, `(B, K, N, D)`: a view when all rows are equally long."""
        nodes = self.mask.shape[-1]
        shared = None if self.host_lengths is None else shared_length(self.host_lengths)
        if shared is not None:
            return cached.narrow(2, shared, nodes)
        if "slots" not in self._memo:
            offsets = torch.arange(nodes, device=self.lengths.device)
            self._memo["slots"] = (self.lengths[:, None] + offsets)[:, None, :, None]
        return cached.gather(2, self._memo["slots"].expand(-1, cached.shape[1], -1, cached.shape[3]))

    def _lengths_with_root(self) -> tuple[torch.Tensor, tuple[int, ...] | None]:
        if "with_root" not in self._memo:
            host = None if self.host_lengths is None else tuple(length + 1 for length in self.host_lengths)
            self._memo["with_root"] = self.lengths + 1, host
        lengths: tuple[torch.Tensor, tuple[int, ...] | None] = self._memo["with_root"]
        return lengths
