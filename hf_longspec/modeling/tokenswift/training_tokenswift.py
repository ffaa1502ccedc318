"""Training of TokenSwift heads: every head predicts the token at its own distance.

Source: TokenSwift (https://huggingface.co/papers/2502.18890), section 3.1 and appendix B.1.
"""

from typing import Any

import torch
from transformers import PreTrainedModel

from ...training.arguments import DraftTrainingArguments
from ...training.methods import LevelsMethod, counted


class TokenSwiftMethod(LevelsMethod):
    """Trains heads on rows at the positions 0, 1, 2, ... Each head is a level.

    Head i (from 1) at index t predicts token t + 1 + i. With `loss="ce"` the wanted token is that of the text; with
    `loss="kl"` the wanted distribution is the target's at index t + i. A head has no loss where the row has no such
    token, or no label for it.
    """

    level = "head"

    def __init__(self, draft: Any, target: PreTrainedModel, args: DraftTrainingArguments):
        super().__init__(draft, target, args, draft.config.num_heads)

    def run(self, model: Any, inputs: dict[str, Any], hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the heads; the counts are hits and predicted tokens."""
        tokens, labels = inputs["input_ids"], inputs["labels"][:, 1:]
        rows, places = self.is_trained(labels).nonzero(as_tuple=True)  # the target predicts these tokens here
        heads = torch.arange(1, 1 + self.draft.config.num_heads, device=tokens.device)[:, None]
        counts = places >= heads  # head i predicts them i tokens earlier
        embedded = {"embedded": self.ends.embed(tokens)} if self.draft.config.sequential else {}
        states = model(hidden=hidden, **embedded)[heads - 1, rows, (places - heads).clamp_min(0)]
        goals = labels if self.args.loss == "ce" else hidden
        totals, hits = self.objective(states, goals[rows, places], counts)
        by_head = [counted(hit[own], rows[own], len(tokens)) for hit, own in zip(hits, counts, strict=True)]
        return totals, torch.stack(by_head, 1)
