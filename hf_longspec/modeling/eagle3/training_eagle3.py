"""Training of EAGLE-3 drafts: chained steps, in which the draft continues from its own states as it does when drafting.

Source: EAGLE-3 (https://huggingface.co/papers/2503.01840), section 3.2, "training-time test".
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from ...generation.target_modules import TargetEnds, final_norm_of
from ...training.arguments import DraftTrainingArguments
from ...training.trainer import LevelsMethod, check_length, counted
from ..longspec.training_longspec import RowNoise, anchor_offset_positions

# Weight of the loss of step s is this to the power of s, as in the authors' training.
STEP_WEIGHT = 0.8


class AuxMethod(LevelsMethod):
    """Base of the training of drafts that read auxiliary hidden states, with a loss at chosen states of the draft.

    A draft whose setting `window` is a number is trained with that window and its `sinks`. An embedding of the draft's
    own is a copy of the target's and stays as it is.
    """

    def __init__(self, draft: Any, target: PreTrainedModel, args: DraftTrainingArguments, levels: int):
        text = target.config.get_text_config(decoder=True)
        self.target, self.layers = target, draft.layers_of(text)
        if draft.embed_tokens is not None:
            draft.embed_tokens.requires_grad_(False)
        hidden_layers = (*self.layers, text.num_hidden_layers) if args.loss == "kl" else self.layers
        super().__init__(draft, target, args, (levels, 2), hidden_layers)
        self.ends, self.norm = TargetEnds(target), final_norm_of(target)
        self.width = len(self.layers) * draft.config.target_hidden_size
        setting = getattr(draft.generation_config, "window", None)
        self.window: int | None = setting if isinstance(setting, int) else None
        self.sinks = draft.setting("sinks")

    def facts(self) -> dict[str, Any]:
        """Return the layers whose states are stored, the loss, and the length at which rows are cut."""
        return {"states": list(self.layers), "loss": self.args.loss, "max_length": self.args.max_length}

    def record(self, accelerator: Any) -> None:
        """Record how many positions a query saw in training: the window, or the longest row of any process."""
        super().record(accelerator)
        if self.longest_position and self.window is not None:
            self.draft.config.trained_max_length = self.window

    def is_trained(self, labels: torch.Tensor) -> torch.Tensor:
        """Return which labels are trained on, `(B, L)`."""
        present = super().is_trained(labels)
        if self.args.loss == "ce" and self.draft.d2t is not None:
            present = present & torch.isin(labels, self.draft.token_ids.to(labels.device))
        return present

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return logits `(n, draft vocabulary)` of states `(n, width)`."""
        logits: torch.Tensor = self.draft.logits(states, self.target)
        return logits

    def loss_of(self, states: torch.Tensor, goals: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the summed loss of states `(n, hidden)`, and whether each most likely token is the goal.

        Logits are in memory for `loss_chunk_size` tokens at a time, and are computed again for the gradient.
        """
        total, hits = states.new_zeros((), dtype=torch.float32) + 0 * states.sum(), []
        chunks = zip(states.split(self.args.loss_chunk_size), goals.split(self.args.loss_chunk_size), strict=True)
        for part, goal in chunks:
            loss, hit = checkpoint(self._chunk, part, goal, use_reentrant=False)
            total = total + loss
            hits.append(hit)
        return total, torch.cat(hits)

    def _chunk(self, states: torch.Tensor, goals: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        log_draft = self.logits(states).float().log_softmax(-1)
        best = log_draft.argmax(-1)
        ids = self.draft.token_ids.to(best.device)
        if self.args.loss == "ce":
            draft_ids = (goals[:, None] == ids).int().argmax(-1) if self.draft.d2t is not None else goals
            return -log_draft.gather(1, draft_ids[:, None]).sum(), best == draft_ids
        with torch.no_grad():
            logits = self.ends.head(self.norm(goals)).float()
            hits = ids[best] == logits.argmax(-1)  # in all of the vocabulary, as in verification
            log_target = (logits if self.draft.d2t is None else logits[:, ids]).log_softmax(-1)
        return (log_target.exp() * (log_target - log_draft)).sum(), hits


class Eagle3Method(AuxMethod):
    """Trains `config.training_steps` chained steps on whole rows. Each step is a level.

    Entry p joins the target's states at token p with token p + 1. Its step s (from 0) predicts token p + s + 2. With
    `loss="kl"` the wanted distribution is the target's at token p + s + 1, over the draft's vocabulary; with
    `loss="ce"` the wanted token is that of the text, if the draft has it. Steps of a P-EAGLE draft after the first read
    masks, and none reads the result of another.

    `max_offset` shifts the draft's own positions after the anchors (Anchor-Offset Indices of LongSpec), and is 0 by
    default.
    """

    def __init__(self, draft: Any, target: PreTrainedModel, args: DraftTrainingArguments):
        self.steps = draft.config.training_steps
        if self.steps < 1:
            raise ValueError(f"training_steps={self.steps} in the draft's config: expected at least 1; 3 is usual.")
        super().__init__(draft, target, args, self.steps)
        self.noise = RowNoise(args.seed, (1, 1), self.position_limit, args.max_offset or 0)

    def prepare(self, batch: dict[str, Any], step: int, total: int, rows: Sequence[int]) -> dict[str, Any]:
        """Add the draft's positions."""
        length = batch["input_ids"].shape[1]
        check_length(length, self.position_limit)
        lengths = batch["attention_mask"].sum(1).tolist()
        _, offsets = self.noise.draw(step, total, rows, lengths)
        self.longest_position = max(self.longest_position, *lengths)
        return {**batch, "position_ids": anchor_offset_positions(length, offsets, self.args.anchors)}

    def run(self, model: Any, inputs: dict[str, Any], hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the chained steps; the counts are hits and predicted tokens. Positions are 0, 1, 2, ... by default."""
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
            position_ids=inputs["position_ids"][:, :-1] if "position_ids" in inputs else None,
            window=self.window,
            sinks=self.sinks,
            score=score,
        )
        return self.of_all_levels(results)  # a row of few tokens has fewer steps
