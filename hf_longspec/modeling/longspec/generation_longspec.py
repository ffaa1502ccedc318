"""LongSpec: a one-block draft grows a beam over its own window and the target's cache.

LongSpec, https://huggingface.co/papers/2502.17421. Every node of the tree attends to the whole committed prefix in
the target's cache, and to its own ancestors and the last `window` tokens in the draft's own state, whose size does
not depend on the context length. The target has no keys for drafted tokens yet; the draft was trained for that gap.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from transformers.utils import logging

from ...generation.draft_tree import Beam
from ...generation.drafter import Binding, Verification
from ...generation.target_modules import TargetParts
from ..shared.beams import CacheReader, PrefixStates, Tensors
from ..shared.vocabulary import part_of_head

logger = logging.get_logger(__name__)


class LongSpecDrafter(CacheReader):
    """Draft a tree of fixed size with one block."""

    rotates_as_target = True  # its queries attend to the target's keys

    def __init__(self, binding: Binding, draft: Any):
        config = self.config = draft.config
        self.parts = TargetParts(binding.target.model, config.kv_layer)
        super().__init__(binding, draft, self.parts.place)
        self.block = self.draft.block
        self.head: Any = self.parts.head
        if self.draft.d2t is not None:
            self.head = part_of_head(self.draft, self.parts, binding)
        self.read_layers, self.read_window = (self.parts.kv_layer,), draft.setting("cross_attention_window")
        sizes = (config.num_key_value_heads, config.head_dim)
        shape = (config.window, self.num_nodes, binding.cache.batch_size, *sizes, self.dtype, self.device)
        self.ring = self.make_ring(0, *shape)
        self.rings = [self.ring]

    def start(self, texts: Sequence[torch.Tensor], verification: Verification) -> None:
        """Fill the ring with the last tokens of the texts, which is the only prefill of this draft."""
        trained = self.config.trained_max_length
        if trained and (length := max(map(len, texts))) > trained:
            logger.warning_once(
                f"the prompt has {length} tokens, but this draft was trained up to trained_max_length={trained}: the "
                "output is still exact, but fewer drafted tokens may be accepted. Train the draft further with larger "
                "offsets."
            )
        self.resume(texts, verification)

    def resume(self, texts: Sequence[torch.Tensor], verification: Verification) -> None:
        """Fill the ring again with the last tokens of the texts."""
        last = [text[-self.config.window :] for text in texts]
        width = max(map(len, last))
        tokens = torch.stack([torch.nn.functional.pad(text, (width - len(text), 0)) for text in last])
        ends = torch.tensor([len(text) for text in texts], device=self.device)
        positions = ends[:, None] - width + torch.arange(width, device=self.device)
        self._remember(tokens, positions, positions >= 0)

    def inputs(self, root: torch.Tensor) -> Tensors:
        return (root,)

    def begin(self, inputs: Tensors, prefix: PrefixStates) -> Tensors:
        """Return slots of the window `(B, levels, slots)`, cosines and sines `(B, levels, D)` of all levels."""
        positions = prefix.lengths.on(self.device)[:, None] + torch.arange(len(self.widths), device=self.device)
        return self.ring.visible(positions), *self._rotary(positions, self.ring.keys)

    def level_inputs(self, beam: Beam, depth: int, shared: Tensors, states: Sequence[torch.Tensor]) -> Tensors:
        return beam.tokens, beam.ancestor_mask, *(part[:, depth : depth + 1] for part in shared)

    def level(self, changing: Tensors, depth: int, prefix: PrefixStates) -> Tensors:
        """Return logits `(B, n, V)` after the newest level."""
        tokens, ancestor_mask, seen, *rotary = changing
        mask = self.with_ancestors(seen, ancestor_mask)

        def attend_self(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            self.ring.stage(key, value, ancestor_mask.shape[2] - ancestor_mask.shape[1])
            return self.attend(query, self.ring.keys, self.ring.values, mask)

        hidden = self.parts.embed(tokens).to(self.device, self.dtype)
        hidden = self.block(hidden, rotary, self.parts, attend_self, partial(self.attend_prefix, prefix))
        return (self.head(hidden),)

    def row_states(self) -> Sequence[torch.Tensor]:
        return self.ring.row_states

    def observe(self, verification: Verification) -> None:
        """Keep the keys of the accepted nodes."""
        assert verification.tree is not None
        path, counts, lengths = verification.path, verification.num_nodes, verification.prefix_lengths
        self.run(self.keep_nodes, verification.tree.tokens, path, counts.on(path.device), lengths.on(path.device))

    def keep_nodes(
        self, tokens: torch.Tensor, path: torch.Tensor, counts: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[()]:
        """Compute the keys of the accepted nodes from their tokens.

        Those of drafting are not kept: nodes of the deepest level have none, nor have nodes of other drafters.

        Args:
            tokens (`torch.LongTensor` of shape `(B, N)`): Tokens of all nodes.
            path (`torch.LongTensor` of shape `(B, M)`): Accepted nodes.
            counts (`torch.LongTensor` of shape `(B,)`): Number of accepted nodes.
            lengths (`torch.LongTensor` of shape `(B,)`): Number of tokens before them.
        """
        committed, places = tokens.gather(1, path), torch.arange(path.shape[1], device=self.device)
        count, length = counts[:, None].to(self.device), lengths[:, None].to(self.device)
        # a path may be longer than the window, which then keeps its last tokens
        mask = (places < count) & (places >= count - self.config.window)
        self._remember(committed, length + places, mask)
        return ()

    def _remember(self, tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> None:
        """Store keys and values of `tokens` `(B, T)` in the ring where `mask` `(B, T)` is True."""
        hidden = self.parts.embed(tokens).to(self.device, self.dtype)
        keys, values = self.block.keys(hidden, self._rotary(positions, hidden), self.parts)
        self.ring.fill(keys, values, torch.where(mask, positions, -1))

    def _rotary(self, positions: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines of `positions` `(B, N)` of the texts, where the target has them."""
        return self.parts.rotary(self.binding.cache.position_ids(positions), like)
