"""SpecAttn: the target drafts for itself, reading only the cache entries that the last verification showed to matter.

SpecAttn (Vegas), https://huggingface.co/papers/2602.07223. One iteration: draft a chain with sparse attention over the
selected entries plus everything since the selection; verify it with full attention, collecting scores from two of its
query rows; select anew. Positions stay the true ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from ...attention_backends.scores import ScoreCapture
from ..draft_tree import DraftTree
from ..selection import SelectedCache, budget, select_top, select_window
from ..verification import draw_noise, exponential_race
from ..weight_traffic import entry_bytes, speedup_bound, weight_bytes
from .base import Binding, Drafter, TreeShape, Verification, named

# What each selection asks the verification to collect.
CAPTURED_ROWS = {"two_rows": "two_rows", "all_rows": "all_rows", "last_accepted": "each_row", "quest": "two_rows"}
SELECTIONS = (*CAPTURED_ROWS, "window")


@dataclass(frozen=True)
class SpecAttnSettings:
    """How SpecAttn drafts in one call; the keys of `draft.generation_config`.

    Args:
        num_assistant_tokens (`int`): Tokens drafted per iteration (gamma).
        sparse_ratio (`float`): Share of the prefix that drafting reads.
        sparse_min_tokens (`int`): Fewest entries to select, as long as the prefix has them.
        selection (`str`): `two_rows` (the paper's), `all_rows`, `last_accepted`, `window` or `quest`.
        score (`str`): `logits` (Eq. 3) or `weights` (attention probabilities); `quest` has a score of its own.
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
    """Drafts chains with the target itself over selected cache entries.

    Args:
        binding ([`Binding`]): Target, cache and rule of this call.
        settings ([`SpecAttnSettings`]): How to draft.
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
        self.selected = SelectedCache(binding.cache, dense_layers, room=self.max_depth)

    @cached_property
    def trees(self) -> tuple[TreeShape, ...]:
        """A chain of each length."""
        return named((gamma, gamma + 1, gamma) for gamma in self.gammas)

    def choose(self, tree: int) -> None:
        """The length of the next chain."""
        self.gamma = self.gammas[tree]

    def speedup_bound(self) -> float:
        """What reading fewer entries can gain if every draft is accepted and all weights are read for each."""
        lengths = self.binding.cache.host_lengths
        selected = [budget(length, self.settings.sparse_ratio, self.settings.sparse_min_tokens) for length in lengths]
        share = sum(selected) / max(1, sum(lengths))
        layers = [self.binding.cache.layers[index] for index in self.selected.sparse_layers]
        return speedup_bound(self.max_depth, share, self._weight_bytes, entry_bytes(layers) * sum(lengths))

    @cached_property
    def _weight_bytes(self) -> int:
        """Of the target; counted once per call."""
        return weight_bytes(self.binding.target)

    @property
    def seed_tokens(self) -> int:
        """A chain of the drafts' length, so that the first phase is not blind."""
        return self.num_nodes

    @property
    def state_bytes(self) -> int:
        """Bytes of the copies of selected entries."""
        return self.selected.nbytes

    def propose(self, root: torch.Tensor) -> DraftTree:
        """A chain of gamma tokens behind `root` `(batch,)`."""
        tokens, laws = [root], [torch.empty(0)]
        for depth in range(self.gamma):
            token, law = self._choose(self._draft_step(tokens[-1]), depth)
            tokens.append(token)
            if law is not None:
                laws.append(law)
        if len(laws) == 1:
            return DraftTree.chain(torch.stack(tokens, 1))
        laws[0] = torch.zeros_like(laws[1])  # the root was not drawn
        return DraftTree.chain(torch.stack(tokens, 1), q=torch.stack(laws, 1))

    def capture(self, tree: DraftTree) -> ScoreCapture | None:
        """Scores of the prefix, unless the selection needs none."""
        if self.settings.selection == "window":
            return None
        return ScoreCapture(
            last_node=tree.valid.sum(1) - 1,
            rows=CAPTURED_ROWS[self.settings.selection],
            score="quest" if self.settings.selection == "quest" else self.settings.score,
            granularity=self.settings.granularity,
            skipped_layers=self.selected.dense_layers,
            sum_ranks=self.binding.target.sum_ranks,
        )

    def observe(self, verification: Verification) -> None:
        """Select the next phase's entries: the best of the prefix that was scored. What was committed since stays."""
        prefix = verification.prefix_lengths
        counts = [budget(p, self.settings.sparse_ratio, self.settings.sparse_min_tokens) for p in prefix]
        self.selected.begin(counts, verification.num_nodes)
        for layer_idx in self.selected.sparse_layers:
            chosen = self._select(layer_idx, verification, counts)
            self.selected.fill(layer_idx, chosen)

    def _select(self, layer_idx: int, verification: Verification, counts: list[int]) -> torch.Tensor:
        capture = verification.capture
        device = verification.path.device if capture is None else capture.scores[layer_idx].device
        prefix = torch.tensor(verification.prefix_lengths, device=device)
        if capture is None:
            return select_window(prefix, torch.tensor(counts, device=device), max(counts))
        scores = capture.scores.pop(layer_idx)
        if capture.rows == "each_row":
            node = verification.last_nodes.to(device)
            scores = scores[torch.arange(len(counts), device=device), :, node]
        return select_top(scores, prefix, max(counts))

    def _draft_step(self, token: torch.Tensor) -> torch.Tensor:
        """Run the target on one token per row over the selected entries; logits `(batch, vocab)`."""
        logits, _ = self.selected.step(self.binding.target, token, self.binding.max_length)
        self.selected.advance()
        return logits

    def _choose(self, logits: torch.Tensor, depth: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The drafted token of every row, and the law it was drawn from if that law decides the acceptance."""
        rule = self.binding.rule
        if rule is None:
            return logits.argmax(-1), None
        scores, law = rule.scores_at(logits, depth), None
        if rule.do_sample and self.settings.acceptance == "rejection":
            token = exponential_race(scores, draw_noise(*scores.shape, generator=rule.generator, device=scores.device))
            law = scores.softmax(-1)
        else:  # coupled when sampling: the very noise row that the target will use at this position
            token = rule.choose(scores, depth)
        if not rule.history_free:
            rule.sequences.try_out(depth, token)
        return token, law
