"""LongSpec: a one-block draft grows a beam over its own window and the target's cache.

LongSpec, https://huggingface.co/papers/2502.17421. Every node of the tree attends to the whole committed prefix in
the target's cache, and to its own ancestors and the last `window` tokens in the draft's own state, whose size does
not depend on the context length. The target has no keys for drafted tokens yet; the draft was trained for that gap.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils import logging

from ...attention_backends.lengths import SeqLens
from ...attention_backends.registry import AttentionBackend
from ...generation.draft_tree import Beam
from ...generation.drafter import BeamDrafter, Binding, Verification, last_of
from ...generation.sparse_caches import WindowRing
from ...generation.target_modules import TargetParts

# The first entries of a text, which keep their positions in training and attract attention (section 3.2).
ANCHORS = 4


@dataclass
class Prefix:
    """
    The prefix in one layer of the target, for a block that is not part of the target.
    """

    keys: torch.Tensor  # `(B, K, capacity, D)`, of the target's cache
    values: torch.Tensor  # `(B, K, capacity, D)`, likewise
    lengths: SeqLens  # committed tokens per row
    window: int | None = None  # read only the first `ANCHORS` entries and so many of the newest. Default: all.

    def attend(self, kernels: AttentionBackend, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """Return the attention output `(B, H, N, D)` of queries `(B, H, N, D)` over the entries of the prefix."""
        if self.window is None:
            keys, values = (states[:, :, : self.lengths.longest] for states in (self.keys, self.values))
            return kernels.prefix_attention(query, keys, values, lengths=self.lengths, scaling=scaling)[0]
        slots, counts = self._slots(self.window)
        return kernels.sparse_attention(query, self.keys, self.values, slots, counts=counts, scaling=scaling)[0]

    def _slots(self, window: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the slots `(B, 1, T)` of the first `ANCHORS` entries and the last `window`, and how many are used."""
        lengths = self.lengths.on(self.keys.device)
        first = (lengths - window).clamp_min(ANCHORS)[:, None]
        slots = first + torch.arange(-ANCHORS, window, device=first.device)
        slots[:, :ANCHORS] -= first - ANCHORS
        return slots.clamp_max(self.keys.shape[2] - 1)[:, None], lengths.clamp_max(ANCHORS + window)


logger = logging.get_logger(__name__)


class LongSpecDrafter(BeamDrafter):
    """Draft a tree of fixed size with one block."""

    rotates_as_target = True  # its queries attend to the target's keys

    def __init__(self, binding: Binding, draft: Any):
        super().__init__(binding, draft)
        config = self.config = draft.config
        self.block = self.draft.block
        self.cross_attention_window: int | None = draft.setting("cross_attention_window")
        self.parts = TargetParts(binding.target.model, config.kv_layer)
        sizes = (config.num_key_value_heads, config.head_dim)
        shape = (config.window, self.num_nodes, binding.cache.batch_size, *sizes, self.dtype, self.device)
        self.ring: WindowRing = binding.part((WindowRing, *shape), lambda: WindowRing(*shape))
        self.ring.clear()
        self.rings = [self.ring]

    def start(self, texts: Sequence[torch.Tensor], verification: Verification) -> None:
        """Fill the ring with the last tokens of the texts, which is the only prefill of this draft."""
        self._warn_of_length(max(map(len, texts)))
        self.resume(texts, verification)

    def resume(self, texts: Sequence[torch.Tensor], verification: Verification) -> None:
        """Fill the ring again with the last tokens of the texts."""
        last = [text[-self.config.window :] for text in texts]
        width = max(map(len, last))
        tokens = torch.stack([torch.nn.functional.pad(text, (width - len(text), 0)) for text in last])
        ends = torch.tensor([len(text) for text in texts], device=self.device)
        positions = ends[:, None] - width + torch.arange(width, device=self.device)
        self._remember(tokens, positions, positions >= 0)
        # with the stride that observe gives it, also for one row; another stride would need another graph
        self.last_token = tokens[:, -1].clone(memory_format=torch.contiguous_format)

    def inputs(self, root: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the last emitted and the last committed token of every row, `(B,)` each."""
        return root, self.last_token

    def prefix(self) -> Prefix:
        cache = self.binding.cache
        layer = cache.layers[self.parts.kv_layer]
        return Prefix(layer.keys, layer.values, cache.lengths, self.cross_attention_window)

    def graph_of(self, runner: Any, prefix: Prefix) -> tuple[tuple[torch.Tensor, ...], tuple, tuple]:
        """Return the lengths, the keys and values of the target, and what distinguishes graphs over them."""
        known = runner.knows(prefix.lengths)
        sizes = runner.sizes(prefix.lengths, 0, prefix.keys.shape[2])
        fixed = known, sizes, runner.buffer(prefix.keys), runner.buffer(prefix.values)
        graph = runner.key_of(sizes, *self.binding.cache.layout)
        return (prefix.lengths.on(self.device),), fixed, (prefix.window, known, graph)

    def prefix_in_graph(self, changing: tuple[torch.Tensor, ...], *fixed: Any) -> Prefix:
        known, sizes, keys, values = fixed
        return Prefix(keys, values, SeqLens.in_graph(changing[0], sizes, known), self.cross_attention_window)

    def begin(self, inputs: tuple[torch.Tensor, ...], prefix: Prefix) -> tuple[torch.Tensor, ...]:
        """Return the last committed tokens `(B,)`, and positions, cosines and sines of all levels."""
        # one column per depth, and one for the last committed token, whose keys may be missing, see observe
        positions = prefix.lengths.on(self.device)[:, None] + torch.arange(-1, len(self.widths), device=self.device)
        return inputs[1], positions, *self._rotary(positions, self.ring.keys)

    def level_inputs(
        self, beam: Beam, depth: int, shared: tuple[torch.Tensor, ...], states: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Return tokens and ancestors of the level, and what all levels share."""
        return beam.tokens, beam.ancestor_mask, *shared

    def observe(self, verification: Verification) -> None:
        """Keep the keys of the accepted nodes. Nodes of the deepest level have none until the next draft."""
        assert verification.tree is not None
        device, counts = verification.path.device, verification.num_nodes
        changing = (
            *(verification.tree.tokens, verification.path),
            *(counts.on(device), verification.prefix_lengths.on(device)),
        )
        function = _compute_again if self.ngram_depth else _keep
        if self.binding.cache.rows.offsets is None:
            self.last_token = self.binding.target.replayed(function, changing, (self,), self._holder)
        else:  # a graph would keep these offsets
            self.last_token = function(changing, self)

    def compute_again(self, tokens: torch.Tensor, counts: torch.Tensor, lengths: torch.Tensor) -> None:
        """Compute the keys of the committed tokens `(B, M)`, as nodes of other drafters have none in the ring."""
        counts, lengths = counts[:, None].to(self.device), lengths[:, None].to(self.device)
        places = torch.arange(tokens.shape[1], device=self.device)
        # a path may be longer than the window, which then keeps its last tokens
        mask = (places < counts) & (places >= counts - self.config.window)
        self._remember(tokens, lengths + places, mask)

    def _remember(self, tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> None:
        """Store keys and values of `tokens` `(B, T)` in the ring where `mask` `(B, T)` is True."""
        hidden = self.parts.embed(tokens).to(self.device, self.dtype)
        keys, values = self.block.keys(hidden, self._rotary(positions, hidden), self.parts)
        self.ring.fill(keys, values, torch.where(mask, positions, -1))

    def _rotary(self, positions: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines of `positions` `(B, N)` of the texts, where the target has them."""
        return self.parts.rotary(self.binding.cache.position_ids(positions), like)

    def _warn_of_length(self, length: int) -> None:
        trained = self.config.trained_max_length
        if trained and length > trained:
            logger.warning_once(
                f"the prompt has {length} tokens, but this draft was trained up to trained_max_length={trained}: the "
                "output is still exact, but fewer drafted tokens may be accepted. Train the draft further with larger "
                "offsets."
            )

    def level(self, changing: tuple[torch.Tensor, ...], depth: int, prefix: Prefix) -> tuple[torch.Tensor, ...]:
        level, ancestor_mask, last_token, positions, cos, sin = changing
        first = 0 if depth == 0 else depth + 1
        columns = slice(first, depth + 2)
        tokens = level if depth else torch.stack([last_token, level[:, 0]], 1)
        hidden = self.parts.embed(tokens).to(self.device, self.dtype)
        mask = self._visible(ancestor_mask, positions[:, depth + 1 : depth + 2])

        def attend_self(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            if depth == 0:
                self.ring.fill(key[:, :, :1], value[:, :, :1], positions[:, :1])
                key, value = key[:, :, 1:], value[:, :, 1:]
            self.ring.stage(key, value, ancestor_mask.shape[2] - ancestor_mask.shape[1])
            return self.attend(query, self.ring.keys, self.ring.values, mask)

        def attend_target(query: torch.Tensor) -> torch.Tensor:
            ranks = self.binding.target.ranks
            if ranks is None or prefix.keys.shape[1] == self.config.num_key_value_heads:
                return prefix.attend(self._kernels, query, self.scaling)
            # the cache holds the key/value heads of this rank, while every rank has the whole block
            return ranks.all_heads(prefix.attend(self._kernels, ranks.own_heads(query), self.scaling))

        here = cos[:, columns], sin[:, columns]
        hidden = self.block(hidden, here, self.parts, attend_self, attend_target, ancestor_mask.shape[1])
        return (self.parts.head(hidden),)

    def _visible(self, ancestor_mask: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Return the mask `(B, n, window + N)` of the tokens in the window and of each node's ancestors."""
        ring = self.ring.visible(position).expand(-1, ancestor_mask.shape[1], -1)
        return torch.cat([ring, ancestor_mask.to(self.device)], dim=-1)


def _keep(changing, drafter):
    """Keep the keys of the accepted nodes, maybe inside a graph, and return the last committed token of every row."""
    tokens, path, counts, lengths = changing
    drafter.ring.keep(*(x.to(drafter.device) for x in (path, counts, lengths)))
    return last_of(tokens.gather(1, path), counts)


def _compute_again(changing, drafter):
    """Run [`LongSpecDrafter.compute_again`], maybe inside a graph, and return the last committed tokens."""
    tokens, path, counts, lengths = changing
    committed = tokens.gather(1, path)
    drafter.compute_again(committed, counts, lengths)
    return last_of(committed, counts)
