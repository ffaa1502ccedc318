# Published with a draft by hf_longspec, Apache-2.0.
"""LongSpec: a one-block draft grows a beam over its own window and the target's cache.

LongSpec, https://huggingface.co/papers/2502.17421. Every node of the tree sees the whole committed prefix in the
target's cache and its own ancestors, with the last `window` tokens, in the draft's own state. Keys of the target for
drafted tokens do not exist yet; the draft has been trained for that gap.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from transformers.utils import logging

from .attention_backends_registry import AttentionBackend, AttentionCall, select
from .generation_beam import Beam, as_tree
from .generation_coupling import Coupling
from .generation_draft_tree import DraftTree
from .generation_prefix import Prefix, prefix_in_graph
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
        self.coupling = Coupling(binding.rule)
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
        runner = runner if runner is not None and runner.takes(rows) else None
        inputs, known = (root, self.last_token), self.coupling.known(len(self.widths))
        if runner is None or not self.coupling.fits_graphs:
            fields = self.grow(*inputs, target, known, runner)
        else:
            changing = *inputs, target.lengths, *known
            fields = self._run_by(runner, _grow, changing, target) or self.grow(*inputs, target, known)
        tree = as_tree(fields, len(self.widths))
        self.tokens = tree.tokens
        return tree

    def grow(
        self,
        root: torch.Tensor,
        last_token: torch.Tensor,
        target: Prefix,
        known: Sequence[torch.Tensor] = (),
        runner: Any = None,
    ) -> tuple[torch.Tensor, ...]:
        """All levels: tokens, parents, depths and mask of the tree. Writes to the ring; reads nothing on the host.

        Args:
            known (sequence of `torch.Tensor`): What decides about these levels beside logits: see [`Coupling`].
            runner (*optional*): Runs the block level by level, compiled or captured; candidates are ranked in between.
        """
        # one column per depth, and one for the last committed token, whose own keys may be missing: see observe
        positions = target.lengths[:, None] + torch.arange(-1, len(self.widths), device=self.device)
        rotary = self.parts.rotary(positions, self.ring.keys)
        beam = Beam(root)
        for depth, width in enumerate(self.widths):
            changing = beam.tokens, beam.reach, last_token, positions, *rotary
            logits = None
            if runner is not None:
                inputs = *changing, target.lengths
                logits = self._run_by(runner, _level, inputs, target, depth)
            if logits is None:
                logits = self.level(changing, depth, target)
            beam.grow(self.coupling.scores(logits.to(root.device), known, depth, beam.paths), width)
        return beam.fields()

    def _run_by(self, runner: Any, function: Any, changing: Sequence[torch.Tensor], target: Prefix, *depth: int) -> Any:
        """A function of these inputs, compiled or captured; None if that is not possible."""
        rows = self.binding.cache.rows
        known = runner.knows(rows)
        sizes = runner.sizes(rows, 0, target.keys.shape[2])
        fixed = self, known, sizes, runner.buffer(target.keys), runner.buffer(target.values), *depth
        shape = len(self.root), tuple(self.widths), known, self.coupling.key, *depth
        return runner(function, shape, changing, fixed, self._owner, self)

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

    def level(self, changing: tuple[torch.Tensor, ...], depth: int, target: Prefix) -> torch.Tensor:
        """Logits `(B, n, V)` after the newest level of a beam.

        Args:
            changing (`tuple[torch.Tensor, ...]`): Tokens and reach of that level, the last committed token of each
                row, and what `grow` computes once: positions, and their rotary embedding.
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
            end = self.ring.window + reach.shape[2]
            stored = self.ring.keys[:, :, :end], self.ring.values[:, :, :end]
            return self._kernels.tree_attention(query, *stored, seen, scaling=self.scaling)[0]

        def attend_target(query: torch.Tensor) -> torch.Tensor:
            ranks = self.binding.target.ranks
            if ranks is None or target.keys.shape[1] == self.config.num_key_value_heads:
                return target.attend(self._kernels, query, self.scaling)
            # the cache holds this rank's key/value heads, and the block is whole on every rank
            return ranks.all_heads(target.attend(self._kernels, ranks.own_heads(query), self.scaling))

        here = cos[:, own], sin[:, own]
        hidden = self.block(hidden, here, self.parts, attend_self, attend_target, reach.shape[1])
        logits: torch.Tensor = self.parts.head(hidden)
        return logits

    def _visible(self, reach: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """`(B, n, window + N)`: the ring as far as the window reaches, and each node's ancestors."""
        ring = self.ring.visible(position)[:, None].expand(-1, reach.shape[1], -1)
        return torch.cat([ring, reach.to(self.device)], dim=-1)


def _grow(changing, drafter, known, sizes, keys, values):
    """[`LongSpecDrafter.grow`] as a graph is made of it."""
    root, last_token, lengths, *decides = changing
    return drafter.grow(root, last_token, prefix_in_graph(keys, values, lengths, known, sizes), decides)


def _level(changing, drafter, known, sizes, keys, values, depth):
    """[`LongSpecDrafter.level`] likewise."""
    *inputs, lengths = changing
    return drafter.level(tuple(inputs), depth, prefix_in_graph(keys, values, lengths, known, sizes))
