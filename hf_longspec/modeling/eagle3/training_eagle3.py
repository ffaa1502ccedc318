"""Training of EAGLE-3 drafts: chained steps, in which the draft continues from its own states as it does when drafting.

Source: EAGLE-3 (https://huggingface.co/papers/2503.01840), section 3.2, "training-time test".
"""

from typing import Any

import torch
from transformers import PreTrainedModel

from ...training.arguments import DraftTrainingArguments
from ...training.methods import STEP_WEIGHT, counted
from ..shared.training_aux import AuxMethod


class Eagle3Method(AuxMethod):
    """Trains `config.training_steps` chained steps on whole rows. Each step is a level.

    Entry p joins the target's states at token p with token p + 1. Its step s (from 0) predicts token p + s + 2. With
    `loss="kl"` the wanted distribution is the target's at token p + s + 1, over the draft's vocabulary; with
    `loss="ce"` the wanted token is that of the text, if the draft has it. Steps of a P-EAGLE draft after the first read
    masks, and none reads the result of another.
    """

    def __init__(self, draft: Any, target: PreTrainedModel, args: DraftTrainingArguments):
        self.steps = draft.config.training_steps
        super().__init__(draft, target, args, self.steps)

    def run(self, model: Any, inputs: dict[str, Any], hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the chained steps; the counts are hits and predicted tokens."""
        tokens, labels = inputs["input_ids"], inputs["labels"]
        trained = self.is_trained(labels)

        def score(step: int, outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            places = trained[:, step + 2 :]
            states = outputs[:, : places.shape[1]][places]
            final = hidden[:, step + 1 : step + 1 + places.shape[1], self.width :]
            goals = labels[:, step + 2 :][places] if self.args.loss == "ce" else final[places]
            total, hits = self.loss_of(states, goals)
            return STEP_WEIGHT**step * total, counted(hits, places.nonzero()[:, 0], len(tokens))

        results = model(
            aux_hidden_states=hidden[:, :-1, : self.width],
            tokens=tokens[:, 1:],
            steps=min(self.steps, tokens.shape[1] - 1),
            target=self.target,
            window=self.window,
            sinks=self.sinks,
            score=score,
        )
        return self.of_all_levels(results)  # a row of few tokens has fewer steps
