"""LongSpec: a one-block draft grows a beam over its own window and the target's cache.

LongSpec, https://huggingface.co/papers/2502.17421. Every node of the tree attends to the whole committed prefix in
the target's cache, and to its own ancestors and the last `window` tokens in the draft's own state, whose size does
not depend on the context length. The target has no keys for drafted tokens yet; the draft was trained for that gap.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers.utils import logging

from ...attention_backends.lengths import SeqLens
from ...attention_backends.registry import AttentionBackend, outside_autocast
from ...generation.beam import Beam
from ...generation.beam_drafter import BeamDrafter
from ...generation.draft_tree import DraftTree
from ...generation.drafter import Binding, Verification, last_of
from ...generation.sparse_caches import WindowRing
from ...generation.target_modules import TargetParts

# The first entries of a text, which keep their positions in training and attract attention (section 3.2).
ANCHORS = 4


@dataclass
class Prefix:
    """
    The prefix in one layer of the target, for a block that is not part of the target.

    Args:
        keys (`torch.Tensor` of shape `(B, K, capacity, D)`): Keys of the target's cache.
        values (`torch.Tensor` of shape `(B, K, capacity, D)`): Values of the target's cache.
        lengths ([`SeqLens`]): Number of committed tokens per row.
        window (`int`, *optional*): Read only the first `ANCHORS` entries and so many of the newest. Default: all.
    """

    keys: torch.Tensor
    values: torch.Tensor
    lengths: SeqLens
    window: int | None = None

    def attend(self, kernels: AttentionBackend, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """Return the attention output `(B, H, N, D)` of queries `(B, H, N, D)` over the entries of the prefix."""
        if self.window is None:
            keys, values = (states[:, :, : self.lengths.longest] for states in (self.keys, self.values))
            attention = partial(kernels.prefix_attention, lengths=self.lengths, scaling=scaling)
        else:
            keys, values = self.keys, self.values
            indices, counts = self._chosen(self.window)
            attention = partial(kernels.sparse_attention, indices=indices, counts=counts, scaling=scaling)
        out: torch.Tensor = outside_autocast(attention, query, keys, values)[0]
        return out

    def _chosen(self, window: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the slots `(B, 1, T)` of the first `ANCHORS` entries and the last `window`, and how many are used."""
        lengths = self.lengths.on(self.keys.device)
        first = (lengths - window).clamp_min(ANCHORS)[:, None]
        slots = first + torch.arange(-ANCHORS, window, device=first.device)
        slots[:, :ANCHORS] -= first - ANCHORS
        return slots.clamp_max(self.keys.shape[2] - 1)[:, None], lengths.clamp_max(ANCHORS + window)


logger = logging.get_logger(__name__)


class LongSpecDrafter(BeamDrafter):
    """Draft a tree of fixed size with one block.

    Args:
        binding ([`Binding`]): Target, cache and rule of this call.
        draft (`LongSpecDraftModel`): The draft. It owns the compiled functions, which later calls use again.
    """

    def __init__(self, binding: Binding, draft: Any):
        config, here = draft.config, draft.beside(binding.target.model)
        super().__init__(binding, here.block.input_layernorm.weight, config.head_dim, draft.setting("tree_widths"))
        self._owner = draft
        self.block = here.block
        self.config = config
        self.cross_attention_window: int | None = draft.setting("cross_attention_window")
        self.parts = TargetParts(binding.target.model, config.kv_layer)
        sizes = (config.num_key_value_heads, config.head_dim)
        shape = (config.window, self.num_nodes, binding.cache.batch_size, *sizes, self.dtype, self.device)
        self.ring: WindowRing = binding.part((WindowRing, *shape), lambda: WindowRing(*shape))
        self.ring.clear()
        # Graphs hold the addresses of the block's weights: those of a copy are dropped with it.
        self._holder: Any = self.ring if here is draft else here

    @property
    def state_bytes(self) -> int:
        """Bytes of the ring, the same at every context length."""
        return self.ring.nbytes

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

    def propose(self, root: torch.Tensor) -> DraftTree:
        """Return a beam of the chosen widths after `root` `(batch,)`."""
        cache = self.binding.cache
        layer = cache.layers[self.parts.kv_layer]
        target = Prefix(layer.keys, layer.values, cache.lengths, self.cross_attention_window)
        runner = self.runner()
        inputs, known = (root, self.last_token), self.coupling.known(len(self.widths))
        if runner is None or not self.coupling.fits_graphs:
            fields = self.grow(*inputs, target, known, runner)
        else:
            changing = *inputs, cache.lengths.on(self.device), *known
            fields = self._run_by(runner, _grow, changing, target) or self.grow(*inputs, target, known)
        return DraftTree.of_fields(fields, len(self.widths))

    def grow(
        self,
        root: torch.Tensor,
        last_token: torch.Tensor,
        target: Prefix,
        known: Sequence[torch.Tensor] = (),
        runner: Any = None,
    ) -> tuple[torch.Tensor, ...]:
        """Draft all levels, and return the [`DraftTree.fields`] of the tree.

        It writes to the ring and reads nothing on the host.

        Args:
            root (`torch.LongTensor` of shape `(B,)`): Last emitted token of every row.
            last_token (`torch.LongTensor` of shape `(B,)`): Last committed token of every row.
            target ([`Prefix`]): Keys and values of the target.
            known (sequence of `torch.Tensor`, *optional*): Result of [`Coupling.known`].
            runner (*optional*): Runs the block level by level, compiled or captured. Candidates are ranked in between.
        """
        # one column per depth, and one for the last committed token, whose keys may be missing, see observe
        positions = target.lengths.on(self.device)[:, None] + torch.arange(-1, len(self.widths), device=self.device)
        rotary = self.parts.rotary(positions, self.ring.keys)
        beam = Beam(root)
        for depth, width in enumerate(self.widths):
            changing = beam.tokens, beam.reach, last_token, positions, *rotary
            logits = None
            if runner is not None:
                inputs = *changing, target.lengths.on(self.device)
                logits = self._run_by(runner, _level, inputs, target, depth)
            if logits is None:
                logits = self.level(changing, depth, target)
            beam.grow(self.coupling.scores(logits.to(root.device), known, depth, beam.paths), width)
        return beam.fields()

    def _run_by(self, runner: Any, function: Any, changing: Sequence[torch.Tensor], target: Prefix, *depth: int) -> Any:
        """Return the result of a function of these inputs, compiled or captured; `None` if that is not possible."""
        known = runner.knows(target.lengths)
        sizes = runner.sizes(target.lengths, 0, target.keys.shape[2])
        fixed = self, known, sizes, runner.buffer(target.keys), runner.buffer(target.values), *depth
        graph = runner.key_of(sizes, *self.binding.cache.layout)
        shape = len(changing[0]), tuple(self.widths), target.window, known, self.coupling.key, *depth, graph
        return runner(function, shape, changing, fixed, self._owner, self._holder)

    def observe(self, verification: Verification) -> None:
        """Keep the keys of the accepted nodes. Nodes of the deepest level have none until the next draft."""
        assert verification.tree is not None
        device, counts = verification.path.device, verification.num_nodes
        changing = (
            *(verification.tree.tokens, verification.path),
            *(counts.on(device), verification.prefix_lengths.on(device)),
        )
        function = _compute_again if self.foreign_depth else _keep
        self.last_token = self.binding.target.replayed(function, changing, (self,), self._holder)

    def compute_again(self, tokens: torch.Tensor, counts: torch.Tensor, lengths: torch.Tensor) -> None:
        """Compute the keys of the committed tokens `(B, M)`, as nodes of other drafters have none in the ring."""
        counts, lengths = counts[:, None].to(self.device), lengths[:, None].to(self.device)
        places = torch.arange(tokens.shape[1], device=self.device)
        # a path may be longer than the window, which then keeps its last tokens
        kept = (places < counts) & (places >= counts - self.config.window)
        self._remember(tokens, lengths + places, kept)

    def _remember(self, tokens: torch.Tensor, positions: torch.Tensor, kept: torch.Tensor) -> None:
        """Store keys and values of those `tokens` `(B, T)` in the ring that are `kept` `(B, T)`."""
        hidden = self.parts.embed(tokens).to(self.device, self.dtype)
        keys, values = self.block.keys(hidden, self.parts.rotary(positions, hidden), self.parts)
        self.ring.fill(keys, values, torch.where(kept, positions, -1))

    def _warn_of_length(self, length: int) -> None:
        trained = self.config.trained_max_length
        if trained and length > trained:
            logger.warning_once(
                f"the prompt has {length} tokens, and this draft was trained up to trained_max_length={trained}: the "
                "text stays exact, but fewer drafts may be accepted. Train it further with larger offsets."
            )

    def level(self, changing: tuple[torch.Tensor, ...], depth: int, target: Prefix) -> torch.Tensor:
        """Return the logits `(B, n, V)` after the newest level of a beam.

        Args:
            changing (`tuple[torch.Tensor, ...]`): Tokens and reach of that level, the last committed token of each
                row, positions, and cosines and sines of the positions.
            depth (`int`): Depth of the level, 0 for the root.
            target ([`Prefix`]): Keys and values of the target.
        """
        level, reach, last_token, positions, cos, sin = changing
        first = 0 if depth == 0 else depth + 1
        own = slice(first, depth + 2)
        tokens = level if depth else torch.stack([last_token, level[:, 0]], 1)
        hidden = self.parts.embed(tokens).to(self.device, self.dtype)
        seen = self._visible(reach, positions[:, depth + 1 : depth + 2])

        def attend_self(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            if depth == 0:
                self.ring.fill(key[:, :, :1], value[:, :, :1], positions[:, :1])
                key, value = key[:, :, 1:], value[:, :, 1:]
            self.ring.stage(key, value, reach.shape[2] - reach.shape[1])
            end = self.ring.size + reach.shape[2]
            return self.attend(query, self.ring.keys[:, :, :end], self.ring.values[:, :, :end], seen)

        def attend_target(query: torch.Tensor) -> torch.Tensor:
            ranks = self.binding.target.ranks
            if ranks is None or target.keys.shape[1] == self.config.num_key_value_heads:
                return target.attend(self._kernels, query, self.scaling)
            # the cache holds the key/value heads of this rank, while every rank has the whole block
            return ranks.all_heads(target.attend(self._kernels, ranks.own_heads(query), self.scaling))

        here = cos[:, own], sin[:, own]
        hidden = self.block(hidden, here, self.parts, attend_self, attend_target, reach.shape[1])
        logits: torch.Tensor = self.parts.head(hidden)
        return logits

    def _visible(self, reach: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Return the mask `(B, n, window + N)` of the tokens in the window and of each node's ancestors."""
        ring = self.ring.visible(position).expand(-1, reach.shape[1], -1)
        return torch.cat([ring, reach.to(self.device)], dim=-1)


def _grow(changing, drafter, known, sizes, keys, values):
    """Run [`LongSpecDrafter.grow`] inside a graph."""
    root, last_token, lengths, *decides = changing
    target = Prefix(keys, values, SeqLens.in_graph(lengths, sizes, known), drafter.cross_attention_window)
    return drafter.grow(root, last_token, target, decides)


def _level(changing, drafter, known, sizes, keys, values, depth):
    """Run [`LongSpecDrafter.level`] inside a graph."""
    *inputs, lengths = changing
    target = Prefix(keys, values, SeqLens.in_graph(lengths, sizes, known), drafter.cross_attention_window)
    return drafter.level(tuple(inputs), depth, target)


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
