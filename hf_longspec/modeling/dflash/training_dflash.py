"""Training of DFlash drafts: blocks at random places of a row, each filled in from the entries before it.

Source: DFlash (https://huggingface.co/papers/2602.06036), whose loss gives later slots less weight.
"""

from collections.abc import Sequence
from math import exp
from typing import Any

import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import PreTrainedModel

from ...training.arguments import DraftTrainingArguments
from ...training.data import IGNORED
from ...training.methods import counted
from ...training.row_noise import mixed
from ..shared.training_aux import AuxMethod


class DFlashMethod(AuxMethod):
    """Trains `config.training_blocks` blocks of every row. Each drafted token of a block is a level.

    A block begins at a token e of the row, its anchor, and sees the entries before it. Level k (from 0) predicts token
    e + 1 + k. With `loss="kl"` the wanted distribution is the target's, over the draft's vocabulary; with `loss="ce"`
    the wanted token is that of the text, if the draft has it. A Markov head reads the tokens of the text. A confidence
    head learns whether the most likely token of its slot is the wanted one, by the binary cross-entropy, which does not
    reach the layers. The weight of level k is exp(-2 k / block_size). Evaluations use anchors at equal distances.
    """

    level = "slot"

    def __init__(self, draft: Any, target: PreTrainedModel, args: DraftTrainingArguments):
        config = draft.config
        if draft.candidate_selector is not None:
            raise ValueError(
                f"selector_rank={config.selector_rank}: this part of a draft is not trained here. Train a draft "
                "without it."
            )
        super().__init__(draft, target, args, config.num_drafted)
        self.weights = [exp(-2 * level / config.block_size) for level in range(config.num_drafted)]

    def prepare(self, batch: dict[str, Any], step: int, total: int, rows: Sequence[int]) -> dict[str, Any]:
        """Add anchors `(B, A)`, and put the labels of their blocks `(B, A, levels)` in place of those of the row."""
        super().prepare(batch, step, total, rows)
        # a row draws by its own index, so that the draws do not depend on how a step is divided
        generators = [torch.Generator().manual_seed(mixed(self.args.seed, step, row)) for row in rows]
        shares = [torch.rand(self.draft.config.training_blocks, generator=generator) for generator in generators]
        return self._with_blocks(batch, torch.stack(shares))

    def _with_blocks(self, batch: dict[str, Any], shares: torch.Tensor) -> dict[str, Any]:
        """Place anchors at these shares `(B, A)` of the rows, with an entry before them and a token after them."""
        labels = batch["labels"]
        room = (batch["attention_mask"].sum(1) - 2).clamp_min(1)[:, None]
        anchors = 1 + (shares.to(room.device) * room).long().clamp_max(room - 1)
        anchors = anchors.clamp_max(labels.shape[1] - 1)
        places = anchors[..., None] + 1 + torch.arange(self.levels, device=labels.device)
        padded = torch.nn.functional.pad(labels, (0, self.levels + 1), value=IGNORED)
        return {**batch, "anchors": anchors, "labels": padded.gather(1, places.flatten(1)).view_as(places)}

    def items(self, labels: torch.Tensor) -> torch.Tensor:
        return self.is_trained(labels).sum((0, 1))

    def evaluate(self, model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = self.draft.config.training_blocks
        shares = (torch.arange(blocks) / blocks).expand(len(inputs["input_ids"]), -1)
        inputs = self._with_blocks(inputs, shares)
        totals, counts = self.run(model, inputs, self.target_pass(inputs["input_ids"]).hidden)
        return (totals / self.items(inputs["labels"]).clamp_min(1)).sum(), counts

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return logits `(n, draft vocabulary)` of states `(n, hidden)`, which the features of a Markov head follow."""
        size, head = self.draft.config.hidden_size, self.draft.markov_head
        logits = super().logits(states[:, :size])
        return logits if head is None else logits + head.markov_w2(states[:, size:])

    def run(self, model: Any, inputs: dict[str, Any], hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the blocks; the counts are hits and predicted tokens."""
        tokens, labels, anchors, draft = inputs["input_ids"], inputs["labels"], inputs["anchors"], self.draft
        trained = self.is_trained(labels)

        def score(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            memory, totals, counts = draft.first_memory(anchors), [], []
            for level, weight in enumerate(self.weights):
                of_slot, places = states[:, :, draft.config.first_slot + level], trained[:, :, level]
                before = (anchors + level).clamp_max(tokens.shape[1] - 1)
                own, earlier = of_slot, tokens.gather(1, before)
                if draft.markov_head is not None:
                    features, memory = draft.markov_head(of_slot, earlier, memory)
                    of_slot = torch.cat([of_slot, features], -1)
                row = places.nonzero()[:, 0]
                wanted = labels[:, :, level][places]
                goals = wanted if self.args.loss == "ce" else hidden[row, before[places], self.width :]
                total, hits = self.loss_of(of_slot[places], goals)
                if draft.confidence_head is not None:
                    logits = draft.confidence_logits(own.detach()[places], earlier[places]).float()
                    total = total + binary_cross_entropy_with_logits(logits, hits.float(), reduction="sum")
                totals.append(weight * total)
                counts.append(counted(hits, row, len(tokens)))
            return torch.stack(totals), torch.stack(counts, 1)

        totals, counts = model(
            aux_hidden_states=hidden[..., : self.width],
            tokens=tokens,
            anchors=anchors,
            target=self.target,
            window=self.window,
            sinks=self.sinks,
            score=score,
        )
        return totals, counts
