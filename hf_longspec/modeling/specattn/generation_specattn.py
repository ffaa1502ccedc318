"""SpecAttn: the target drafts for itself on the cache entries that were important in the last verification.

SpecAttn (Vegas), https://huggingface.co/papers/2602.07223. One iteration drafts a chain with sparse attention over the
selected entries and everything since the selection, verifies it with full attention, collects scores from two of the
verification's query rows, and selects again. Positions stay the true ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...attention_backends.contexts import SparseContext
from ...attention_backends.lengths import SeqLens
from ...attention_backends.scores import ScoreCapture
from ...generation.draft_tree import DraftTree
from ...generation.drafter import Binding, Verification, drafted_tokens
from ...generation.sampling import TokenRule
from ...generation.target import FixedStep, Forward, Forwards
from ..shared.self_drafts import SelfDrafter
from ..shared.sparse_caches import SelectedCache, select_window

# Query rows whose scores the verification collects, for each selection.
CAPTURED_ROWS = {
    "two_rows": "two_rows",
    "all_rows": "all_rows",
    "accepted_rows": "each_row",
    "last_accepted": "each_row",
}
SELECTIONS = (*CAPTURED_ROWS, "window", "all")


class SpecAttnDrafter(SelfDrafter):
    """Draft chains with the target itself on selected cache entries."""

    def __init__(self, binding: Binding, draft: Any):
        super().__init__(binding, draft)
        self.selection, self.score = draft.setting("selection"), draft.setting("score")
        self.granularity = draft.setting("granularity")
        every = frozenset(range(len(binding.cache.layers)))
        shape = binding.cache, every if self.selection == "all" else binding.target.sliding_layers, self.max_depth
        self.sparse: SelectedCache = binding.part((SelectedCache, *shape), lambda: SelectedCache(*shape))

    @property
    def seed_tokens(self) -> int:
        """Number of nodes of the longest chain, so that the first phase has scores to select by."""
        return self.num_nodes

    def captured_chain(self, root: torch.Tensor, noise: torch.Tensor | None, with_q: bool) -> Any:
        rule, cache, target = self.binding.rule, self.sparse, self.stepper
        at_places = self.binding.cache.rows.offsets is None  # a graph computes positions from lengths alone
        if not at_places or not (rule is None or rule.fits_graphs):
            return None
        chain = SparseChain(rule, self.gamma, self.binding.max_length, with_q, target.windows, cache.dense_layers)
        inputs = (root, cache.dense_used.lengths.on(root.device), *(() if noise is None else (noise,)))
        return target.steps.forwards(chain, cache, self.gamma, *inputs, may_compile=True)

    def capture(self, tree: DraftTree) -> ScoreCapture | None:
        if self.selection not in CAPTURED_ROWS:
            return None
        return ScoreCapture(
            last_node=tree.last_node,
            rows=CAPTURED_ROWS[self.selection],
            score=self.score,
            granularity=self.granularity,
            skipped_layers=self.sparse.dense_layers,
            sum_ranks=self.binding.target.sum_ranks,
        )

    def take(self, row: int, other: Any, of: int = 0) -> None:
        self.sparse.take(row, other.sparse, of)

    def observe(self, verification: Verification) -> None:
        """Select the entries of the next phase: the best ones of the scored prefix, and all tokens committed since."""
        counts = [self.num_selected(length) for length in verification.prefix_lengths.host]
        selected, capture = self.sparse, verification.capture
        selected.begin(counts, verification.num_nodes.host)
        by_device = selected.layers_by_device()
        for device, layers in by_device.items():
            selected.allocate(layers)
            changing = prefix, table = verification.prefix_lengths.on(device), selected.table(device)
            if capture is None:
                selected.fill(layers, select_window(prefix, table[1], max(counts))[None], table)
                continue
            scores = [self._scores(capture, layer_idx, verification).to(device) for layer_idx in layers]
            if capture.is_replayed and len(by_device) == 1:  # scores that a graph wrote are read by another graph
                target = self.binding.target
                target.run_step(SelectTop(target.model, selected, layers, scores), *changing)
            else:
                selected.fill_top(layers, scores, *changing)

    def _scores(self, capture: ScoreCapture, layer_idx: int, verification: Verification) -> torch.Tensor:
        """Take the scores `(B, 1 or K, S)` of a layer from the capture."""
        scores = capture.scores.pop(layer_idx)
        if self.selection == "last_accepted":
            rows, node = torch.arange(len(scores), device=scores.device), verification.last_nodes.to(scores.device)
            return scores[rows, :, node]
        if self.selection == "accepted_rows":
            path, counts = verification.path.to(scores.device), verification.num_nodes.on(scores.device)
            nodes = path[:, None, :, None].expand(-1, scores.shape[1], -1, scores.shape[3])
            is_accepted = torch.arange(path.shape[1], device=path.device) < counts[:, None]
            return scores.gather(2, nodes).masked_fill(~is_accepted[:, None, :, None], 0.0).sum(2)
        return scores


@dataclass(eq=False)
class SparseChain(Forwards):
    """The drafting steps of a chain, in one graph."""

    rule: TokenRule | None
    count: int
    limit: int  # positions are clamped below it
    with_q: bool  # whether the distributions of the tokens are wanted
    windows: tuple[int | None, ...]  # of all layers
    dense_layers: frozenset[int]

    @property
    def key(self) -> tuple:
        rule = () if self.rule is None else self.rule.key
        return self.count, self.limit, self.with_q, self.windows, rule, self.dense_layers

    def run(self, forward: Forward, starts: Sequence[SeqLens], *inputs: torch.Tensor) -> Any:
        """Draft after the roots and their positions `(B,)`, which noise follows if tokens are drawn."""
        root, first, *noise = inputs
        mask = root.new_ones(len(root), 1, 1, 1, dtype=torch.bool)

        def logits_after(depth: int, token: torch.Tensor) -> torch.Tensor:
            positions = (first + depth)[:, None].clamp_max(self.limit - 1)
            here = [start.plus(depth) for start in starts]
            ends = [start.plus(1) for start in here]
            sparse, dense = (ends[-1], ends[0]) if 0 in self.dense_layers else (ends[0], ends[-1])
            context = SparseContext(sparse, positions, dense, self.dense_layers, windows=self.windows)
            return forward(token[:, None], positions, mask, context, *here)[:, 0]

        return drafted_tokens(self.rule, root, self.count, logits_after, noise[0] if noise else None, self.with_q)


@dataclass(eq=False)
class SelectTop(FixedStep):
    """[`SelectedCache.fill_top`] of scores that a graph writes."""

    holder: SelectedCache
    layers: list[int]
    scores: list[torch.Tensor]

    @property
    def key(self) -> tuple:
        return self.scores[0].data_ptr(), self.scores[0].shape

    @property
    def places(self) -> tuple[int, ...]:
        return self.holder.layout

    def run(self, *inputs: torch.Tensor) -> tuple[()]:
        prefix_lengths, table = inputs
        self.holder.fill_top(self.layers, self.scores, prefix_lengths, table, any_counts=True)
        return ()
