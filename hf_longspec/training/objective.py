"""The loss of a batch, from what the target computed to one number."""

from typing import Any

import torch

from ..generation.target_parts import TargetParts
from .documents import IGNORED
from .liger import SAMPLED_PLACES, liger_cross_entropy
from .losses import cross_entropy, forward_kl, head_loss
from .target_pass import TargetStates


class DraftObjective:
    """Runs the draft over a batch and sums its loss over all places that predict a token.

    Place t predicts the token at t + 1. With the target's hidden states the loss is the divergence from the target's
    distribution, without them the cross-entropy of the labels, by Liger's kernel where that runs.

    Args:
        parts ([`TargetParts`]): Embedding, head and rotary embedding of the target.
        chunk_size (`int`): Places whose logits exist at once.
    """

    def __init__(self, parts: TargetParts, chunk_size: int):
        self.parts = parts
        self.chunk_size = chunk_size

    def __call__(
        self, model: Any, inputs: dict[str, Any], states: TargetStates, gaps: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The summed loss of a batch, and how often the draft is right.

        Args:
            model (`Callable`): The draft, possibly wrapped for training in several processes.
            inputs (`dict[str, Any]`): `input_ids`, `position_ids` and `labels`, `(B, L)` each.
            states ([`TargetStates`]): Of the target at the same positions.
            gaps (`list[int]`): One per row.

        Returns:
            The sum; for the places, or a sample of them, whether the draft's most likely token is the wanted one; and
            the row of each of those.
        """
        tokens, positions = inputs["input_ids"], inputs["position_ids"]
        hidden = model(
            input_ids=tokens,
            position_ids=positions,
            keys=states.keys,
            values=states.values,
            gaps=gaps,
            parts=self.parts,
        )
        labels = inputs["labels"][:, 1:]
        places = labels != IGNORED
        hidden, labels, rows = hidden[:, :-1][places], labels[places], places.nonzero()[:, 0]
        if states.hidden is not None:
            objective = forward_kl(states.hidden[:, :-1][places], self._head)
        elif torch.is_grad_enabled() and (fused := liger_cross_entropy(self.parts, hidden)) is not None:
            every = 1 + len(labels) // SAMPLED_PLACES
            hits = self._head(hidden[::every].detach()).argmax(-1) == labels[::every]
            return fused(hidden, labels), hits, rows[::every]
        else:
            objective = cross_entropy(labels)
        total, hits = head_loss(hidden, self._head, objective, self.chunk_size)
        return total, hits, rows

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's logits, in the type of its head, whatever the draft is trained in."""
        return self.parts.head(hidden.to(self.parts.model.get_output_embeddings().weight.dtype))
