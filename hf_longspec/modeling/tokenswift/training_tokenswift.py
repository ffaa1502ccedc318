"""Training of TokenSwift heads: every head predicts the token at its own distance.

Source: TokenSwift (https://huggingface.co/papers/2502.18890), section 3.1 and appendix B.1.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from ...training.arguments import DraftTrainingArguments
from ...training.data import IGNORED
from ...training.losses import rank
from ...training.methods import FinalStateMethod

TOP = 3  # number of children that a tree usually gives to a node of a head


class TokenSwiftMethod(FinalStateMethod):
    """Trains heads on rows at the positions 0, 1, 2, ... Each head is a level.

    Head i (from 1) at index t predicts token t + 1 + i. With `loss="ce"` the wanted token is that of the text; with
    `loss="kl"` the wanted distribution is the target's at index t + i. A head has no loss where the row has no such
    token, or no label for it.
    """

    ranking = staticmethod(rank)

    def __init__(self, draft: Any, target: PreTrainedModel, args: DraftTrainingArguments):
        super().__init__(draft, target, args, (draft.config.num_heads, 3))

    def summary(self, counts: Sequence[Sequence[float]]) -> dict[str, float]:
        """Compute the share of hits of every head, by its most likely token and by its three most likely tokens."""
        logs: dict[str, float] = {}
        for head, (first, top, places) in enumerate(counts, start=1):
            if places:
                logs |= {f"head_{head}_top1": first / places, f"head_{head}_top{TOP}": top / places}
        return logs

    def run(self, model: Any, inputs: dict[str, Any], hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the heads; the counts are hits, hits among the first three, and predicted tokens."""
        tokens, labels = inputs["input_ids"], inputs["labels"][:, 1:]
        rows, places = (labels != IGNORED).nonzero(as_tuple=True)  # the target predicts these tokens here
        heads = torch.arange(1, 1 + self.draft.config.num_heads, device=tokens.device)[:, None]
        counts = places >= heads  # head i predicts them i tokens earlier
        embedded = {"embedded": self.ends.embed(tokens)} if self.draft.config.sequential else {}
        states = model(hidden=hidden, **embedded)[heads - 1, rows, (places - heads).clamp_min(0)]
        goals = labels if self.args.loss == "ce" else hidden
        totals, ranks = self.objective(states, goals[rows, places], counts)
        return totals, self._counted(ranks, counts, rows, len(tokens))

    @staticmethod
    def _counted(ranks: torch.Tensor, counts: torch.Tensor, rows: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Count hits, top-3 hits and predicted tokens, `(B, heads, 3)`, by ranks `(heads, m)` of the wanted tokens."""
        numbers = torch.stack([(ranks < 1) & counts, (ranks < TOP) & counts, counts], -1).to(torch.float64)
        total = torch.zeros(num_rows, *numbers.shape[::2], dtype=torch.float64, device=ranks.device)
        return total.index_add_(0, rows, numbers.transpose(0, 1))
