"""Sparse attention: what an attention layer of the target runs when it drafts on selected keys and values.

The layers listed in `dense_layers` read the target's whole cache. Every other layer is handed a compact buffer with its
own selected entries, in which a position has no meaning any more: rotary embedding happened before the entry was
stored, and a sliding window was respected by the selection.
"""

from dataclasses import dataclass, field

import torch

from .merge import merge_attention_states
from .registry import AttentionBackend
from .step_context import CallCounter, StepContext


@dataclass
class SparseContext(StepContext):
    """One drafting step, as the attention layers see it. Build a new one for every forward.

    Args:
        lengths (`torch.LongTensor` of shape `(B,)`): Used entries of the compact buffers, the query's own included.
        host_lengths (`tuple[int, ...]`, *optional*): The same numbers on the host; None where they are not to be read.
        positions (`torch.LongTensor` of shape `(B, N)`): Absolute positions of the queries.
        dense_lengths (`torch.LongTensor` of shape `(B,)`): Used slots of the whole cache, the query's own included.
        dense_host_lengths (`tuple[int, ...]`, *optional*): Likewise.
        dense_layers (`frozenset[int]`): Layers that read the whole cache.
        calls ([`CallCounter`], *optional*): Counts the layers that called.
        windows: See [`StepContext`].
    """

    positions: torch.Tensor
    dense_lengths: torch.Tensor
    dense_host_lengths: tuple[int, ...] | None
    dense_layers: frozenset[int] = frozenset()
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
        """Attention of the drafting queries in one layer.

        Args:
            backend ([`AttentionBackend`]): Who computes it.
            layer_idx (`int`): Which layer asks.
            query (`torch.Tensor` of shape `(B, H, N, D)`): Queries.
            key (`torch.Tensor` of shape `(B, K, S, D)`): The whole cache, or the compact buffer of a sparse layer.
            value (`torch.Tensor` of shape `(B, K, S, Dv)`): Likewise.
            scaling (`float`): Factor of the scores.
            sliding_window (`int`, *optional*): Window that the layer passes; it applies to dense layers only.
            softcap (`float`, *optional*): Softcap of the scores.
            sinks (`torch.Tensor` of shape `(H,)`, *optional*): Sink logits of this layer.

        Returns:
            `torch.Tensor` of shape `(B, H, N, Dv)`.
        """
        self.calls.total += 1
        sliding_window = self.window_of(layer_idx, sliding_window)
        if layer_idx in self.dense_layers:
            state = backend.prefix_attention(
                query,
                key,
                value,
                self.dense_lengths,
                scaling=scaling,
                positions=self.positions,
                sliding_window=sliding_window,
                softcap=softcap,
                host_lengths=self.dense_host_lengths,
            )
        else:
            lengths, host_lengths = self.lengths, self.host_lengths
            state = backend.prefix_attention(
                query, key, value, lengths, scaling=scaling, softcap=softcap, host_lengths=host_lengths
            )
        return state[0] if sinks is None else merge_attention_states([state], sinks)[0]
