"""Training of MTP layers: chained steps, in which the draft continues from its own outputs as it does when drafting.

Source: DeepSeek-V3 (https://huggingface.co/papers/2412.19437), section 2.2. A layer that drafts all levels is trained
on its own outputs as in EAGLE-3 (https://huggingface.co/papers/2503.01840), section 3.2.
"""

from typing import Any

import torch
from transformers import PreTrainedModel

from ...training.arguments import DraftTrainingArguments
from ...training.methods import STEP_WEIGHT, LevelsMethod, counted


class MtpMethod(LevelsMethod):
    """Trains `config.training_steps` chained steps on whole rows.

    Entry p joins the output of the target's final norm at token p with token p + 1. Step s (from 0) continues from the
    output of the step before with token p + s + 1, and predicts token p + s + 2. With `loss="kl"` the wanted
    distribution is the target's at token p + s + 1; with `loss="ce"` the wanted token is that of the text. Step s has
    the weight 0.8 ** s. Rows are trained with the draft's `window` and `sinks`.
    """

    def __init__(self, draft: Any, target: PreTrainedModel, args: DraftTrainingArguments):
        self.steps = draft.config.training_steps
        super().__init__(draft, target, args, self.steps)
        window = draft.setting("window")
        self.span = {"window": None if window == "all" else window, "sinks": draft.setting("sinks")}

    def run(self, model: Any, inputs: dict[str, Any], hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the chained steps; the counts are hits and predicted tokens."""
        tokens, labels = inputs["input_ids"], inputs["labels"]
        trained = self.is_trained(labels)

        def score(step: int, outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            places = trained[:, step + 2 :]
            states = outputs[:, : places.shape[1]][places]
            goals = labels[:, step + 2 :] if self.args.loss == "ce" else hidden[:, step + 1 : -1]
            totals, hits = self.objective(states[None], goals[places])
            return STEP_WEIGHT**step * totals[0], counted(hits[0], places.nonzero()[:, 0], len(tokens))

        results = model(
            hidden_states=self.norm(hidden[:, :-1]),
            tokens=tokens[:, 1:],
            steps=min(self.steps, tokens.shape[1] - 1),
            target=self.target,
            score=score,
            **self.span,
        )
        return self.of_all_levels(results)
