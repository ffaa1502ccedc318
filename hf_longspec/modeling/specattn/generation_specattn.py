"""SpecAttn: the target drafts for itself on the cache entries that were important in the last verification.

SpecAttn (Vegas), https://huggingface.co/papers/2602.07223. One iteration drafts a chain with sparse attention over the
selected entries and everything since the selection, verifies it with full attention, collects scores from two of the
verification's query rows, and selects again. Positions stay the true ones.

The speed-up bound follows from the bytes that a step reads. Each of gamma drafting steps reads all weights and a
share of the keys and values. The verification reads all weights, keys and values once, and emits gamma + 1 tokens if
every draft is accepted; plain steps would read everything once for each of these tokens. Every estimate errs in
favour of speculation, so that no measured speed-up exceeds the bound.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ...attention_backends.lengths import on_device
from ...attention_backends.scores import ScoreCapture
from ...generation.draft_tree import DraftTree
from ...generation.drafter import Binding, Drafter, TreeShape, Verification, drafted_chain, independent_draws, named
from ...generation.selection import SelectedCache, budget, select_top, select_window
from ...generation.target import TargetView

# Upper bound on the time per byte of keys and values, relative to that of weights. An attention kernel may reach only a
# small part of the bandwidth of matrix products, and weights may come from a cache of the processor.
KV_FACTOR = 16


def speedup_bound(gamma: int, share: float, weights: float, kv: float) -> float:
    """Return an upper bound on the tokens per second of speculation, relative to plain steps.

    Args:
        gamma (`int`): Number of drafted tokens.
        share (`float`): Share of the keys and values that a drafting step reads, from 0 to 1.
        weights (`float`): Bytes of weights that a plain step reads.
        kv (`float`): Bytes of keys and values that a plain step reads, all rows together.

    >>> speedup_bound(gamma=4, share=0.0, weights=1.0, kv=0.0), speedup_bound(4, 1.0, 1.0, 1e9)
    (1.0, 1.0)
    >>> speedup_bound(gamma=4, share=0.0, weights=0.0, kv=1.0)
    5.0
    """
    if not weights and not kv:
        return float(gamma + 1)
    kv *= KV_FACTOR
    return (gamma + 1) * (weights + kv) / ((gamma + 1) * weights + kv * (1 + gamma * share))


def weight_bytes(target: TargetView) -> int:
    """Return a lower bound on the bytes of weights that every step reads in this process.

    Only linear layers outside of experts count, since a step reads some of the experts only.
    """
    total = sum(
        module.weight.numel() * module.weight.element_size()
        for name, module in target.model.named_modules()
        if isinstance(module, nn.Linear) and "expert" not in name
    )
    return total // (1 if target.ranks is None else target.ranks.size)


def entry_bytes(layers: Sequence[Any]) -> int:
    """Return the bytes of the keys and values of one token in the given layers of a cache."""
    parts = [part for layer in layers for part in (layer.keys, layer.values)]
    return sum(part.shape[1] * part.shape[3] * part.element_size() for part in parts)


# Query rows whose scores the verification collects, for each selection.
CAPTURED_ROWS = {"two_rows": "two_rows", "all_rows": "all_rows", "last_accepted": "each_row", "pages": "two_rows"}
SELECTIONS = (*CAPTURED_ROWS, "window")


@dataclass(frozen=True)
class SpecAttnSettings:
    """Settings of SpecAttn for one call, which are keys of `draft.generation_config`.

    Args:
        num_assistant_tokens (`int`): Number of tokens drafted per iteration (gamma).
        sparse_ratio (`float`): Share of the prefix that drafting reads.
        sparse_min_tokens (`int`): Minimum number of entries to select. Shorter prefixes are selected as a whole.
        selection (`str`): `two_rows` (the paper's), `all_rows`, `last_accepted`, `window` or `pages`.
        score (`str`): `logits` (Eq. 3) or `weights` (attention probabilities). `pages` has its own score.
        granularity (`str`): One selection per `layer` or per `kv_head`.
        acceptance (`str`): When sampling, `rejection` or `coupled`.
    """

    num_assistant_tokens: int
    sparse_ratio: float
    sparse_min_tokens: int
    selection: str
    score: str
    granularity: str
    acceptance: str


class SpecAttnDrafter(Drafter):
    """Draft chains with the target itself on selected cache entries.

    Args:
        binding ([`Binding`]): Target, cache and rule of this call.
        settings ([`SpecAttnSettings`]): Settings of the configured chain.
        others (`Sequence[int]`, *optional*): Other numbers of drafted tokens to choose from.
    """

    def __init__(self, binding: Binding, settings: SpecAttnSettings, others: Sequence[int] = ()):
        super().__init__(binding)
        self.settings = settings
        self.gammas = [settings.num_assistant_tokens, *others]
        self.gamma = self.gammas[0]
        self.num_nodes = max(self.gammas) + 1
        self.max_depth = max(self.gammas)
        dense_layers = binding.target.sliding_layers
        shape = (binding.cache, dense_layers, self.max_depth)
        self.selected: SelectedCache = binding.part((SelectedCache, *shape), lambda: SelectedCache(*shape))

    @cached_property
    def trees(self) -> tuple[TreeShape, ...]:
        """Shapes of the chains, one for each length."""
        return named((gamma, gamma + 1, gamma) for gamma in self.gammas)

    def choose(self, tree: int) -> None:
        """Propose chains of this index from now on."""
        self.gamma = self.gammas[tree]

    def speedup_bound(self) -> float:
        """Return an upper bound on the tokens per second after the present prefixes, relative to plain steps."""
        lengths = self.binding.cache.lengths.host
        selected = [budget(length, self.settings.sparse_ratio, self.settings.sparse_min_tokens) for length in lengths]
        share = sum(selected) / max(1, sum(lengths))
        layers = [self.binding.cache.layers[index] for index in self.selected.sparse_layers]
        return speedup_bound(self.max_depth, share, self._weight_bytes, entry_bytes(layers) * sum(lengths))

    @cached_property
    def _weight_bytes(self) -> int:
        """Bytes of the target's weights, counted once per call."""
        return weight_bytes(self.binding.target)

    @property
    def seed_tokens(self) -> int:
        """Number of nodes of the longest chain, so that the first phase has scores to select by."""
        return self.num_nodes

    @property
    def state_bytes(self) -> int:
        """Bytes of the copies of selected entries."""
        return self.selected.nbytes

    def propose(self, root: torch.Tensor) -> DraftTree:
        """Return a chain of gamma tokens after `root` `(batch,)`."""
        rule, limit = self.binding.rule, self.binding.max_length
        is_drawn = self.settings.acceptance == "rejection"
        draws = independent_draws(self.binding, root, self.gamma) if is_drawn else None
        chain = self.binding.target.draft_chain(root, self.gamma, rule, self.selected, limit, draws)
        if chain is not None:
            return DraftTree.chain(chain[0], q=chain[1])
        return drafted_chain(rule, root, self.gamma, lambda _, token: self._draft_step(token), draws)

    def capture(self, tree: DraftTree) -> ScoreCapture | None:
        """Return a capture of the prefix's scores, unless the selection needs none."""
        if self.settings.selection == "window":
            return None
        return ScoreCapture(
            last_node=tree.last_node,
            rows=CAPTURED_ROWS[self.settings.selection],
            score="pages" if self.settings.selection == "pages" else self.settings.score,
            granularity=self.settings.granularity,
            skipped_layers=self.selected.dense_layers,
            sum_ranks=self.binding.target.sum_ranks,
        )

    def observe(self, verification: Verification) -> None:
        """Select the entries of the next phase: the best ones of the scored prefix, and all tokens committed since."""
        prefix, settings = verification.prefix_lengths.host, self.settings
        counts = [budget(length, settings.sparse_ratio, settings.sparse_min_tokens) for length in prefix]
        selected, capture = self.selected, verification.capture
        selected.begin(counts, verification.num_nodes.host)
        if capture is not None and capture.is_replayed and selected.sparse_layers:
            scores = [capture.scores.pop(layer_idx) for layer_idx in selected.sparse_layers]
            if len({of_layer.device for of_layer in scores}) == 1:
                self._select_all(scores, verification)
                return
            capture.scores.update(zip(selected.sparse_layers, scores, strict=True))
        for layer_idx in selected.sparse_layers:
            selected.fill(layer_idx, self._select(layer_idx, verification, counts))

    def _select_all(self, scores: list[torch.Tensor], verification: Verification) -> None:
        """Select the entries of all layers by scores that a graph wrote, in another graph."""
        selected, device = self.selected, scores[0].device
        for layer_idx in selected.sparse_layers:
            selected.allocate(layer_idx)
        changing = verification.prefix_lengths.on(device), selected.table(device)
        settings = (scores[0].data_ptr(), tuple(scores[0].shape), selected.layout)
        self.binding.target.replayed(_fill_all, changing, (selected, scores), selected, settings)

    def _select(self, layer_idx: int, verification: Verification, counts: list[int]) -> torch.Tensor:
        capture = verification.capture
        device = verification.path.device if capture is None else capture.scores[layer_idx].device
        prefix = verification.prefix_lengths.on(device)
        if capture is None:
            return select_window(prefix, on_device(counts, device), max(counts))
        scores = capture.scores.pop(layer_idx)
        if capture.rows == "each_row":
            node = verification.last_nodes.to(device)
            scores = scores[torch.arange(len(counts), device=device), :, node]
        return select_top(scores, prefix, max(counts))

    def _draft_step(self, token: torch.Tensor) -> torch.Tensor:
        """Run the target on one token per row over the selected entries, and return logits `(batch, vocab)`."""
        logits, _ = self.selected.step(self.binding.target, token, self.binding.max_length)
        self.selected.advance()
        return logits


def _fill_all(changing, selected, scores, *settings):
    """Run [`SelectedCache.fill_all`], maybe inside a graph."""
    selected.fill_all(scores, *changing)
    return ()
