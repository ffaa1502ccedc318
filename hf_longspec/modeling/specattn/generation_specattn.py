"""SpecAttn: the target drafts for itself on the cache entries that were important in the last verification.

SpecAttn (Vegas), https://huggingface.co/papers/2602.07223. One iteration drafts a chain with sparse attention over the
selected entries and everything since the selection, verifies it with full attention, collects scores from two of the
verification's query rows, and selects again. Positions stay the true ones.
"""

from collections.abc import Sequence
from typing import Any

import torch

from ...attention_backends.contexts import SparseContext
from ...attention_backends.lengths import on_device
from ...attention_backends.scores import ScoreCapture
from ...generation.draft_tree import DraftTree
from ...generation.drafted_chain import drafted_chain
from ...generation.drafter import Binding, Verification
from ...generation.self_drafter import SelfDrafter
from ...generation.sparse_caches import SelectedCache, budget, select_top, select_window

# Query rows whose scores the verification collects, for each selection.
CAPTURED_ROWS = {
    "two_rows": "two_rows",
    "all_rows": "all_rows",
    "accepted_rows": "each_row",
    "last_accepted": "each_row",
}
SELECTIONS = (*CAPTURED_ROWS, "window")


class SpecAttnDrafter(SelfDrafter):
    """Draft chains with the target itself on selected cache entries.

    Args:
        binding ([`Binding`]): Target, cache and rule of this call.
        draft (`SpecAttnDraftModel`): The draft, whose settings are read.
    """

    def __init__(self, binding: Binding, draft: Any):
        super().__init__(binding, draft.setting("num_assistant_tokens"), draft.setting("acceptance"))
        self.sparse_ratio, self.sparse_min_tokens = draft.setting("sparse_ratio"), draft.setting("sparse_min_tokens")
        self.selection, self.score = draft.setting("selection"), draft.setting("score")
        self.granularity = draft.setting("granularity")
        dense_layers = binding.target.sliding_layers
        shape = (binding.cache, dense_layers, self.max_depth)
        self.selected: SelectedCache = binding.part((SelectedCache, *shape), lambda: SelectedCache(*shape))

    @property
    def sparse_layers(self) -> Sequence[int]:
        """Indices of the layers whose entries are selected."""
        return self.selected.sparse_layers

    def num_selected(self, length: int) -> int:
        """Return how many entries are selected of a prefix."""
        return budget(length, self.sparse_ratio, self.sparse_min_tokens)

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
        draws, selected = self.draws(root), self.selected
        tensors, dense = (root, selected.dense_used.lengths.on(root.device)), selected.dense_layers
        if chain := self.captured(_context, selected, tensors, draws, (dense,), (dense,), is_compiled=True):
            return chain
        return drafted_chain(self.binding.rule, root, self.gamma, lambda _, token: self._draft_step(token), draws)

    def capture(self, tree: DraftTree) -> ScoreCapture | None:
        """Return a capture of the prefix's scores, unless the selection needs none."""
        if self.selection == "window":
            return None
        return ScoreCapture(
            last_node=tree.last_node,
            rows=CAPTURED_ROWS[self.selection],
            score=self.score,
            granularity=self.granularity,
            skipped_layers=self.selected.dense_layers,
            sum_ranks=self.binding.target.sum_ranks,
        )

    def observe(self, verification: Verification) -> None:
        """Select the entries of the next phase: the best ones of the scored prefix, and all tokens committed since."""
        counts = [self.num_selected(length) for length in verification.prefix_lengths.host]
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
        if self.selection == "last_accepted":
            node = verification.last_nodes.to(device)
            scores = scores[torch.arange(len(counts), device=device), :, node]
        elif self.selection == "accepted_rows":
            scores = _sum_of_path(scores, verification.path.to(device), verification.num_nodes.on(device))
        return select_top(scores, prefix, max(counts))

    def _draft_step(self, token: torch.Tensor) -> torch.Tensor:
        """Run the target on one token per row over the selected entries, and return logits `(batch, vocab)`."""
        logits, _ = self.selected.step(self.binding.target, token, self.binding.max_length)
        self.selected.advance()
        return logits


def _sum_of_path(scores: torch.Tensor, path: torch.Tensor, num_nodes: torch.Tensor) -> torch.Tensor:
    """Return `(B, K, S)`, sums of the scores `(B, K, N, S)` of each row's accepted nodes, its first `num_nodes`."""
    nodes = path[:, None, :, None].expand(-1, scores.shape[1], -1, scores.shape[3])
    kept = torch.arange(path.shape[1], device=path.device) < num_nodes[:, None]
    return scores.gather(2, nodes).masked_fill(~kept[:, None, :, None], 0.0).sum(2)


def _context(ends, positions, windows, dense_layers):
    """Return the context of a drafting step inside a graph."""
    used, dense = (ends[-1], ends[0]) if 0 in dense_layers else (ends[0], ends[-1])
    return SparseContext(used, positions, dense, dense_layers, windows=windows)


def _fill_all(changing, selected, scores, *settings):
    """Run [`SelectedCache.fill_all`], maybe inside a graph."""
    selected.fill_all(scores, *changing)
    return ()
