"""What the training of drafts that read auxiliary hidden states has in common."""

from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from ...generation.target_modules import TargetEnds, final_norm_of
from ...training.arguments import DraftTrainingArguments
from ...training.trainer import LevelsMethod


class AuxMethod(LevelsMethod):
    """Base of the training of drafts that read auxiliary hidden states, with a loss at chosen states of the draft.

    A draft whose setting `window` is a number is trained with that window and its `sinks`. An embedding of the draft's
    own is a copy of the target's and stays as it is.
    """

    def __init__(self, draft: Any, target: PreTrainedModel, args: DraftTrainingArguments, levels: int):
        text = target.config.get_text_config(decoder=True)
        self.target, self.layers = target, draft.layers_of(text)
        hidden_layers = (*self.layers, text.num_hidden_layers) if args.loss == "kl" else self.layers
        super().__init__(draft, target, args, (levels, 2), hidden_layers)
        self.ends, self.norm = TargetEnds(target), final_norm_of(target)
        self.width = len(self.layers) * draft.config.target_hidden_size
        setting = getattr(draft.generation_config, "window", None)
        self.window: int | None = setting if isinstance(setting, int) else None
        self.sinks = draft.setting("sinks")
        if draft.embed_tokens is not None:
            draft.embed_tokens.requires_grad_(False)

    def facts(self) -> dict[str, Any]:
        return {"states": list(self.layers), "loss": self.args.loss, "max_length": self.args.max_length}

    def record(self, accelerator: Any) -> None:
        """Record how many positions a query saw in training: the window, or the longest row of any process."""
        super().record(accelerator)
        if self.longest_position and self.window is not None:
            self.draft.config.trained_max_length = self.window

    def is_trained(self, labels: torch.Tensor) -> torch.Tensor:
        present = super().is_trained(labels)
        if self.args.loss == "ce" and self.draft.d2t is not None:
            present = present & torch.isin(labels, self.draft.token_ids.to(labels.device))
        return present

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return logits `(n, draft vocabulary)` of states `(n, width)`."""
        return self.draft.logits(states, self.target)

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
