# Published with a draft by hf_longspec, Apache-2.0.
"""LongSpec: a one-block draft grows a beam over its own window and the target's cache.

LongSpec, https://huggingface.co/papers/2502.17421. Every node of the tree sees the whole committed prefix in the
target's cache and its own ancestors, with the last `window` tokens, in the draft's own state. Keys of the target for
drafted tokens do not exist yet; the draft has been trained for that gap.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from transformers.utils import logging

from .attention_backends_registry import AttentionBackend, AttentionCall, select
from .generation_beam import Beam, as_tree
from .generation_compiled import end_of_prefixes, known_lengths
from .generation_draft_tree import DraftTree
from .generation_row_lengths import RowLengths
from .generation_target_parts import TargetParts
from .generation_window_ring import WindowRing
from .generation_drafters_base import Binding, Drafter, TreeShape, Verification, named

logger = logging.get_logger(__name__)


class LongSpecDrafter(Drafter):
    """Drafts a tree of fixed size with one block.

    Args:
        binding ([`Binding`]): Target, cache and rule of this call.
        block (`LongSpecBlock`): The trained block, on device and in dtype of the keys it reads.
        config (`LongSpecConfig`): Its configuration.
        parts ([`TargetParts`]): Embedding, head and rotary embedding of the target.
        trees (`Sequence[list[int]]`): Nodes of each level of the tree, root excluded; for each tree to choose from.
        owner (`torch.nn.Module`, *optional*): Keeps what is compiled for later calls; by default the block.
    """

    def __init__(
        self,
        binding: Binding,
        block: Any,
        config: Any,
        parts: TargetParts,
        trees: Sequence[list[int]],
        owner: torch.nn.Module | None = None,
    ):
        super().__init__(binding)
        self._owner = block if owner is None else owner
        self.block = block
        self.config = config
        self.parts = parts
        self._trees = trees
        self.widths = trees[0]
        self.num_nodes = 1 + max(map(sum, trees))
        self.max_depth = max(map(len, trees))
        weight = block.input_layernorm.weight
        self.device, self.dtype = weight.device, weight.dtype
        sizes = (config.num_key_value_heads, config.head_dim)
        self.ring = WindowRing(
            config.window, self.num_nodes, binding.cache.batch_size, *sizes, dtype=self.dtype, device=self.device
        )
        self.scaling = config.head_dim**-0.5
        self._kernels: AttentionBackend = select(
            AttentionCall(self.device, self.dtype, config.head_dim, config.head_dim)
        )

    @cached_property
    def trees(self) -> tuple[TreeShape, ...]:
        """One for each list of widths."""
        return named((widths, 1 + sum(widths), len(widths)) for widths in self._trees)

    def choose(self, tree: int) -> None:
        """The widths of the next tree."""
        self.widths = self._trees[tree]

    @property
    def state_bytes(self) -> int:
        """Bytes of the ring: the same at every context length."""
        return self.ring.nbytes

    def start(self, texts: Sequence[torch.Tensor], verification: Verification) -> None:
        """Fill the ring with the last tokens of the texts: the only prefill that this draft needs."""
        self._warn_of_length(max(map(len, texts)))
        self.resume(texts, verification)

    def resume(self, texts: Sequence[torch.Tensor], verification: Verification) -> None:
        """Fill the ring anew."""
        last = [text[-self.config.window :] for text in texts]
        width = max(map(len, last))
        tokens = torch.stack([torch.nn.functional.pad(text, (width - len(text), 0)) for text in last])
        ends = torch.tensor([len(text) for text in texts], device=self.device)
        positions = ends[:, None] - width + torch.arange(width, device=self.device)
        self._remember(tokens, positions, positions >= 0)
        self.last_token = tokens[:, -1].clone()  # contiguous, as observe leaves it: another stride is another graph

    def propose(self, root: torch.Tensor) -> DraftTree:
        """A beam of the configured widths behind `root` `(batch,)`."""
        self.root = root
        cache = self.binding.cache
        layer = cache.layers[self.parts.kv_layer]
        rows = cache.rows
        target = Prefix(layer.keys, layer.values, rows.on(self.device), cache.host_lengths, rows.longest)
        runner = self.binding.target.runner
        fields = None if runner is None or not runner.takes(rows) else self._run_by(runner, root, target, rows)
        tree = as_tree(fields or self.grow(root, self.last_token, target), len(self.widths))
        self.tokens = tree.tokens
        return tree

    def grow(self, root: torch.Tensor, last_token: torch.Tensor, target: "Prefix") -> tuple[torch.Tensor, ...]:
        """All levels: tokens, parents, depths and mask of the tree. Writes to the ring; reads nothing on the host."""
        # one column per depth, and one for the last committed token, whose own keys may be missing: see observe
        positions = target.lengths[:, None] + torch.arange(-1, len(self.widths), device=self.device)
        rotary = self.parts.rotary(positions, self.ring.keys)
        beam = Beam(root)
        for depth, width in enumerate(self.widths):
            hidden = self._run(beam, depth, positions, rotary, last_token, target)
            beam.grow(self.parts.head(hidden).to(root.device), width)
        return beam.fields()

    def _run_by(
        self, runner: Any, root: torch.Tensor, target: "Prefix", rows: RowLengths
    ) -> tuple[torch.Tensor, ...] | None:
        """The same, compiled or captured; None if that is not possible."""
        known = runner.knows(rows)
        sizes = runner.sizes(rows, 0, target.keys.shape[2])
        changing = root, self.last_token, target.lengths
        fixed = self, known, sizes, runner.buffer(target.keys), runner.buffer(target.values)
        shape = len(root), tuple(self.widths), known
        fields: tuple[torch.Tensor, ...] | None = runner(_grow, shape, changing, fixed, self._owner, self)
        return fields

    def observe(self, verification: Verification) -> None:
        """Keep the accepted nodes' keys. A node of the deepest level has none yet: the next draft makes them."""
        if self.foreign_depth:
            return self._observe_tokens(verification)
        numbers = torch.tensor([verification.num_nodes, verification.prefix_lengths], device=self.device)
        path = verification.path.to(self.device)
        self.ring.keep(path, numbers[0], numbers[1])
        last = verification.path.gather(1, (numbers[0] - 1).clamp_min(0)[:, None].to(verification.path.device))
        self.last_token = self.tokens.gather(1, last).squeeze(1)

    def _observe_tokens(self, verification: Verification) -> None:
        """Make the keys of everything that was committed anew: nodes of others have none in the ring."""
        width = verification.path.shape[1]
        rows = [[*row[:-1], *[0] * (width - len(row))][: width - 1] for row in verification.tokens]
        drafted = torch.tensor(rows, device=self.root.device, dtype=torch.long)
        tokens = torch.cat([self.root[:, None], drafted], dim=1)
        counts, lengths = torch.tensor([verification.num_nodes, verification.prefix_lengths], device=self.device)
        places = torch.arange(width, device=self.device)
        # a path may be longer than the window, whose slots take its last tokens then
        kept = (places < counts[:, None]) & (places >= counts[:, None] - self.config.window)
        self._remember(tokens, lengths[:, None] + places, kept)
        last = (counts - 1).clamp_min(0)[:, None].to(tokens.device)
        self.last_token = tokens.gather(1, last).squeeze(1)

    def _remember(self, tokens: torch.Tensor, positions: torch.Tensor, kept: torch.Tensor) -> None:
        """Put the keys of those `tokens` that are `kept` into the ring; all `(B, T)`."""
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

    def _run(
        self,
        beam: Beam,
        depth: int,
        positions: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        last_token: torch.Tensor,
        target: "Prefix",
    ) -> torch.Tensor:
        """The block on the newest level: hidden states `(B, n, hidden)`."""
        first = 0 if depth == 0 else depth + 1
        own = slice(first, depth + 2)
        tokens = beam.tokens if depth else torch.stack([last_token, beam.tokens[:, 0]], 1)
        hidden = self.parts.embed(tokens).to(self.device, self.dtype)
        seen = self._visible(beam, positions[:, depth + 1 : depth + 2])

        def attend_self(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            if depth == 0:
                self.ring.fill(key[:, :, :1], value[:, :, :1], positions[:, :1])
                key, value = key[:, :, 1:], value[:, :, 1:]
            self.ring.stage(key, value, beam.first_node)
            end = self.ring.window + beam.num_nodes
            stored = self.ring.keys[:, :, :end], self.ring.values[:, :, :end]
            return self._kernels.tree_attention(query, *stored, seen, scaling=self.scaling)[0]

        def attend_target(query: torch.Tensor) -> torch.Tensor:
            ranks = self.binding.target.ranks
            if ranks is None or target.keys.shape[1] == self.config.num_key_value_heads:
                return target.attend(self._kernels, query, self.scaling)
            # the cache holds this rank's key/value heads, and the block is whole on every rank
            return ranks.all_heads(target.attend(self._kernels, ranks.own_heads(query), self.scaling))

        here = rotary[0][:, own], rotary[1][:, own]
        width = beam.tokens.shape[1]
        hidden_states: torch.Tensor = self.block(hidden, here, self.parts, attend_self, attend_target, width)
        return hidden_states

    def _visible(self, beam: Beam, position: torch.Tensor) -> torch.Tensor:
        """`(B, n, window + N)`: the ring as far as the window reaches, and each node's ancestors."""
        ring = self.ring.visible(position)[:, None].expand(-1, beam.tokens.shape[1], -1)
        return torch.cat([ring, beam.reach.to(self.device)], dim=-1)


@dataclass
class Prefix:
    """What is committed in the layer that the draft reads.

    Args:
        keys (`torch.Tensor` of shape `(B, K, capacity, D)`): Of the target.
        values (`torch.Tensor` of shape `(B, K, capacity, D)`): Likewise.
        lengths (`torch.LongTensor` of shape `(B,)`): Committed tokens per row.
        host_lengths (`tuple[int, ...]`, *optional*): The same on the host; None where they are not to be read.
        end (`int`, *optional*): Where the longest of them ends; None for all of the buffer.
    """

    keys: torch.Tensor
    values: torch.Tensor
    lengths: torch.Tensor
    host_lengths: tuple[int, ...] | None
    end: int | None

    def attend(self, kernels: AttentionBackend, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """Attention of queries `(B, H, N, D)` to all of it."""
        used = self.keys[:, :, : self.end], self.values[:, :, : self.end]
        where = {"host_lengths": self.host_lengths}
        return kernels.prefix_attention(query, *used, self.lengths, scaling=scaling, **where)[0]


def _grow(changing, drafter, known, sizes, keys, values):
    """[`LongSpecDrafter.grow`] as a graph is made of it."""
    root, last_token, lengths = changing
    host = known_lengths(sizes, known, root.shape[0])
    target = Prefix(keys, values, lengths, host, end_of_prefixes(sizes, known))
    return drafter.grow(root, last_token, target)
