"""What the training of drafts that read auxiliary hidden states has in common."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ...generation.target_modules import PartOfHead
from ...training.arguments import DraftTrainingArguments
from ...training.methods import LevelsMethod


class AuxMethod(LevelsMethod):
    """Base of the training of drafts that read auxiliary hidden states, with a loss at chosen states of the draft.

    A draft whose setting `window` is a number is trained with that window and its `sinks`. An embedding of the draft's
    own is a copy of the target's and stays as it is.
    """

    def __init__(self, draft: Any, target: PreTrainedModel, args: DraftTrainingArguments, levels: int):
        text = target.config.get_text_config(decoder=True)
        self.layers = draft.layers_of(text)
        hidden_layers = (*self.layers, text.num_hidden_layers) if args.loss == "kl" else self.layers
        super().__init__(draft, target, args, levels, hidden_layers)
        self.width = len(self.layers) * draft.config.target_hidden_size
        setting = getattr(draft.generation_config, "window", None)
        self.window: int | None = setting if isinstance(setting, int) else None
        self.sinks = draft.setting("sinks")
        if draft.embed_tokens is not None:
            draft.embed_tokens.requires_grad_(False)

    def prepare(self, batch: dict[str, Any], step: int, total: int, rows: Sequence[int]) -> dict[str, Any]:
        self.longest_position = max(self.longest_position, int(batch["attention_mask"].sum(1).max()))
        return batch

    def record(self, accelerator: Any) -> None:
        """Record how many positions a query saw in training: the window, or the longest row of any process."""
        super().record(accelerator)
        if self.longest_position and self.window is not None:
            self.draft.config.trained_max_length = self.window

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return logits `(n, draft vocabulary)` of states `(n, width)`, where either may be in half precision."""
        if (head := self.draft.lm_head) is not None:
            return nn.functional.linear(states, head.weight.to(states.dtype))
        weight = self.target.get_output_embeddings().weight
        if weight.is_floating_point():  # not quantized
            states = states.to(weight.dtype)
        return self.draft.logits(states, self.target, self._part_of_head)

    @cached_property
    def _part_of_head(self) -> PartOfHead | None:
        """The target's head for the tokens of a draft that has not all; all rows of it take several times as long."""
        return None if self.draft.d2t is None else PartOfHead(self.ends, self.draft.token_ids)

    def loss_of(self, states: torch.Tensor, goals: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the summed loss of states `(n, width)`, and whether each most likely token is the goal."""
        totals, hits = self.objective(states[None], goals, head=self.logits)
        return totals[0], hits[0]
