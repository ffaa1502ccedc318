"""`--analyse`: acceptance by position, probabilities of rejected tokens, overlap of selected entries.

Source: SpecAttn (https://huggingface.co/papers/2602.07223), Figures 4, 5 and 7. A probed call is not timed.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from .calls import PLAIN, HfMethod, changed, watched_drafters
from .matrix import Cell, Matrix
from .results import of_kind
from .summaries import significant

# Bins of the probabilities of rejected tokens.
BINS = 10


class AcceptanceProbe:
    """Watch the acceptance rule of one draft, over any number of calls.

    Counts are those of the rule, so a verification at the end of a call is not cut at the token limit.

    Attributes:
        reached (`list[int]`): Verifications in which depth 1, 2, ... was reached with a drafted token there.
        accepted (`list[int]`): Those that accepted it.
        rejected (`list[tuple[float, float | None]]`): Target's and draft's probability of every token that was refused
            where a path ended; tokens after those were never checked. The draft's is known if the token was drawn
            from a distribution that the tree carries, or if the drafter runs the target (SpecAttn, Quest).
    """

    def __init__(self) -> None:
        self.reached: list[int] = []
        self.accepted: list[int] = []
        self.rejected: list[tuple[float, float | None]] = []
        self._drafted: list[torch.Tensor] = []

    def watch(self, drafter: Any, binding: Any) -> None:
        """Watch a drafter; see [`watched_drafters`]."""
        rule, inner = binding.rule, getattr(drafter, "inner", drafter)
        accept, propose = rule.accept, inner.propose

        def watched_propose(root: torch.Tensor) -> Any:
            self._drafted.clear()
            return propose(root)

        def watched_accept(tree: Any, logits: torch.Tensor, with_scores: bool = False) -> Any:
            growing = [not done for done in rule.sequences.done]
            acceptance, scores = accept(tree, logits, True)
            if tree.num_nodes > 1:
                self._count(tree, acceptance, scores, growing)
            return acceptance, scores if with_scores else None

        inner.propose, rule.accept = watched_propose, watched_accept
        if hasattr(inner, "_draft_step"):
            step = inner._draft_step

            def watched_step(token: torch.Tensor) -> torch.Tensor:
                logits = step(token)
                self._drafted.append(rule.scores_at(logits, len(self._drafted)).softmax(-1))
                return logits

            inner._draft_step = watched_step

    def _count(self, tree: Any, acceptance: Any, scores: torch.Tensor, growing: Sequence[bool]) -> None:
        nodes = torch.arange(tree.num_nodes, device=tree.tokens.device)
        for row, grows in enumerate(growing):
            if not grows:
                continue
            kept = int(acceptance.num_nodes[row])
            last = int(acceptance.path[row, kept - 1])
            refused = nodes[(tree.parents[row] == last) & tree.valid[row] & (nodes > 0)].tolist()
            for depth in range(kept if refused else kept - 1):
                if depth == len(self.reached):
                    self.reached.append(0)
                    self.accepted.append(0)
                self.reached[depth] += 1
                self.accepted[depth] += depth < kept - 1
            target = scores[row, kept - 1].softmax(-1)
            for node in refused:
                token = int(tree.tokens[row, node])
                self.rejected.append((float(target[token]), self._draft_probability(tree, row, node, token)))

    def _draft_probability(self, tree: Any, row: int, node: int, token: int) -> float | None:
        if tree.q is not None:
            return float(tree.q[row, node, token])
        if 1 <= node <= len(self._drafted):  # of a chain that the target itself drafted
            return float(self._drafted[node - 1][row, token])
        return None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        known = [(p, q) for p, q in self.rejected if q is not None]
        return {
            "reached": self.reached,
            "accepted": self.accepted,
            "rejected": {
                "p": _distribution([p for p, _ in self.rejected]),
                "q": _distribution([q for _, q in known]),
                "rate": _distribution([min(1.0, p / q) if q else 1.0 for p, q in known]),
            },
        }


class SelectionProbe:
    """Watch which entries a SpecAttn draft selects.

    Attributes:
        overlaps (`dict[int, list[float]]`): By layer, the share of a selection that the next selection contains too.
        pairs (`dict[int, list[float]]`): By distance of two nodes of one verification, the share of the entries
            selected by the scores of one node that the scores of the other node select too. Only with
            `selection="last_accepted"`, which collects the scores of single nodes.
    """

    def __init__(self) -> None:
        self.overlaps: dict[int, list[float]] = {}
        self.pairs: dict[int, list[float]] = {}
        self._before: dict[tuple[int, int, int], torch.Tensor] = {}

    def watch(self, drafter: Any, binding: Any) -> None:
        """Watch a drafter; see [`watched_drafters`]. Drafts of other kinds select nothing."""
        inner = getattr(drafter, "inner", drafter)
        if not hasattr(inner, "_select"):
            return
        select = inner._select
        self._before.clear()

        def watched(layer: int, verification: Any, counts: list[int]) -> torch.Tensor:
            capture = verification.capture
            if capture is not None and capture.rows == "each_row":
                self._pair(capture.scores[layer], capture.last_node.tolist(), counts, verification.num_nodes.host)
            chosen: torch.Tensor = select(layer, verification, counts)
            self._follow(layer, chosen, counts, verification.num_nodes.host)
            return chosen

        inner._select = watched

    def _follow(self, layer: int, chosen: torch.Tensor, counts: Sequence[int], kept: Sequence[int]) -> None:
        for row, count in enumerate(counts):
            for head in range(chosen.shape[1]):
                new, key = chosen[row, head, :count].sort().values, (layer, row, head)
                if key in self._before and kept[row]:
                    again = torch.isin(self._before[key], new).float().mean()
                    self.overlaps.setdefault(layer, []).append(float(again))
                self._before[key] = new

    def _pair(self, scores: torch.Tensor, last: Sequence[int], counts: Sequence[int], kept: Sequence[int]) -> None:
        """Record the overlap of all pairs of nodes, from `scores` `(B, 1 or K, N, S)`."""
        for row, count in enumerate(counts):
            if not kept[row] or not last[row]:
                continue
            best = scores[row, :, : last[row] + 1].topk(count, dim=-1).indices  # [K, N, count]
            for head in best:
                for first in range(len(head)):
                    for second in range(first + 1, len(head)):
                        share = torch.isin(head[first], head[second]).float().mean()
                        self.pairs.setdefault(second - first, []).append(float(share))

    def to_dict(self) -> dict[str, Any]:
        """For JSON: means, the first by layer and over all."""
        everything = [share for shares in self.overlaps.values() for share in shares]
        overlap = {"all layers": _mean(everything)} if everything else {}
        overlap |= {f"layer {layer}": _mean(shares) for layer, shares in sorted(self.overlaps.items())}
        return {"overlap": overlap, "pair_overlap": {str(k): _mean(v) for k, v in sorted(self.pairs.items())}}


def _distribution(values: Sequence[float]) -> dict[str, Any]:
    bins = np.histogram(values, BINS, (0.0, 1.0))[0].tolist()
    return {"count": len(values), "mean": _mean(values) if values else 0.0, "deciles": bins}


def _mean(values: Sequence[float]) -> float:
    return significant(sum(values) / len(values))


def analyse_cell(matrix: Matrix, cell: Cell, progress: Any) -> None:
    """Write one record per draft, from calls with probes; drafts that are in the file already are left out."""
    for method in matrix.methods:
        draft, key = method.how, cell.key() | {"method": method.name}
        own = isinstance(draft, HfMethod) or method.name == PLAIN
        if own or of_kind(matrix.results.records, "analysis", **key):
            continue
        progress.say(f"{cell}: analysing {method.name}")
        acceptance, selection, pairs = AcceptanceProbe(), SelectionProbe(), SelectionProbe()
        passes: list[tuple[dict[str, Any], tuple[Any, ...]]] = [({}, (acceptance, selection))]
        if "selection" in draft.settings:  # the only selection for which scores of single tokens are there
            passes.append(({"selection": "last_accepted"}, (pairs,)))
        for settings, probes in passes:
            with method.with_settings(), changed(draft, {"compile": "off", **settings}), ExitStack() as stack:
                for probe in probes:
                    stack.enter_context(watched_drafters(draft, probe.watch))
                for seed, prompts in enumerate(matrix.prompts_of(cell)):
                    matrix.call(cell, method, [prompt.ids for prompt in prompts], matrix.tokens, seed)
        overlaps = {"overlap": selection.to_dict()["overlap"], "pair_overlap": pairs.to_dict()["pair_overlap"]}
        matrix.results.write("analysis", **key, **acceptance.to_dict(), **overlaps)
