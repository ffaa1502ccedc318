"""Training of LongSpec drafts by Flash Noisy Training, at the positions of Anchor-Offset Indices.

Source: LongSpec (https://huggingface.co/papers/2502.17421), section 3.2.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from ...generation.target_modules import TargetParts
from ...training.arguments import DraftTrainingArguments
from ...training.data import IGNORED
from ...training.losses import DraftLoss
from ...training.methods import TrainingMethod, acceptance, counted
from ...training.row_noise import RowNoise, anchor_offset_positions
from ...training.target_states import TargetPass, TargetStates


class LongSpecMethod(TrainingMethod):
    """Trains every row at its own gap and offset. The counts have one level per gap.

    The gap is the distance between a query and the newest key of the target that it sees; the offset shifts the
    positions after the anchors. The loss has one term.
    """

    def __init__(self, draft: Any, target: PreTrainedModel, args: DraftTrainingArguments):
        super().__init__(draft, target, args)
        self.parts = TargetParts(target, draft.config.kv_layer)
        noise_range, distribution = draft.config.noise_range, args.noise_distribution
        self.noise = RowNoise(args.seed, noise_range, self.position_limit, args.max_offset, distribution)
        self.target_pass = TargetPass(target, args.target_chunk_size, None, self.parts.kv_layer)
        token_ids = None if draft.d2t is None else draft.token_ids
        self.objective = DraftLoss(args.loss, self.parts, args.loss_chunk_size, token_ids=token_ids)
        self.levels = self.noise.gaps[1] - self.noise.gaps[0] + 1
        self.longest_position = draft.config.trained_max_length or 0

    def prepare(self, batch: dict[str, Any], step: int, total: int, rows: Sequence[int]) -> dict[str, Any]:
        """Add the gaps and the positions of the rows, and remove labels that are not trained."""
        lengths = batch["attention_mask"].sum(1).tolist()
        gaps, offsets = self.noise.draw(step, total, rows, lengths)
        positions = batch.get("position_ids")  # the stored keys of a KVStore are rotated by their positions
        if positions is None:
            positions = anchor_offset_positions(batch["input_ids"].shape[1], offsets, self.args.anchors)
        last = max(int(row[length - 1]) for row, length in zip(positions, lengths, strict=True))
        self.longest_position = max(self.longest_position, last)
        return {**batch, "gaps": gaps, "position_ids": positions, "labels": self.trained(batch["labels"], gaps)}

    def trained(self, labels: torch.Tensor, gaps: list[int]) -> torch.Tensor:
        """Remove the labels `(B, L)` of queries that see no key, and those that are not trained on."""
        return without_keyless(labels, gaps).where(self.is_trained(labels), IGNORED)

    def items(self, labels: torch.Tensor) -> torch.Tensor:
        """Count the labels. Query t predicts token t + 1."""
        return (labels[:, 1:] != IGNORED).sum()[None]

    def loss(self, model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        if "keys" in inputs:
            states = TargetStates(inputs.get("hidden"), inputs["keys"], inputs["values"])
        else:
            states = self.target_pass(inputs["input_ids"], inputs["position_ids"])
        total, hits, rows = self._run(model, inputs, states, inputs["gaps"])
        levels = torch.tensor(inputs["gaps"], device=rows.device)[rows] - self.noise.gaps[0]
        return total, counted(hits, levels, self.levels)

    def evaluate(self, model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mean loss of a batch over all gaps at the positions 0, 1, 2, ..., and each row's counts by gap."""
        tokens, labels = inputs["input_ids"], inputs["labels"]
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        states = self.target_pass(tokens, positions)
        first, last = self.noise.gaps
        total, counts = torch.zeros(1, device=tokens.device), []
        for gap in range(first, last + 1):
            gaps = [gap] * len(tokens)
            row = {"input_ids": tokens, "position_ids": positions, "labels": self.trained(labels, gaps)}
            loss, hits, rows = self._run(model, row, states, gaps)
            total += loss
            counts.append(counted(hits, rows, len(tokens)))
        by_row = torch.stack(counts, 1)
        return total[0] / by_row[..., 1].sum().clamp_min(1), by_row

    def summary(self, counts: Sequence[Sequence[float]]) -> dict[str, float]:
        return acceptance(counts, "gap", self.noise.gaps[0])

    def facts(self) -> dict[str, Any]:
        facts = {name: getattr(self.args, name) for name in ("loss", "seed", "anchors", "max_offset", "max_length")}
        return facts | {"kv_layer": self.parts.kv_layer}

    def stored(self, tokens: torch.Tensor, number: int) -> dict[str, torch.Tensor]:
        """Compute keys, values and hidden states of a row at positions that are drawn once and stored with them."""
        _, offsets = self.noise.draw(-1 - number, 1, [0], [len(tokens)])  # negative: no step has such a number
        positions = anchor_offset_positions(len(tokens), offsets, self.args.anchors)
        states = self.target_pass(tokens[None].to(self.args.device), positions.to(self.args.device))
        kept = ("keys", "values", "hidden") if self.args.loss == "kl" else ("keys", "values")
        return {"position_ids": positions[0], **{name: getattr(states, name)[0] for name in kept}}

    def _run(
        self, model: Any, inputs: dict[str, Any], states: TargetStates, gaps: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the summed loss `(1,)` of a batch, and the hits and the rows of the predicted tokens."""
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
        goals = labels[places] if self.args.loss == "ce" else states.hidden[:, :-1][places]
        total, hits = self.objective(hidden[:, :-1][places][None], goals)
        return total, hits[0], places.nonzero()[:, 0]


def without_keyless(labels: torch.Tensor, gaps: list[int]) -> torch.Tensor:
    """Remove the labels `(B, L)` of queries that see no key of the target: the first `gap` queries of a row.

    >>> without_keyless(torch.tensor([[5, 6, 7, 8]]), [2]).tolist()
    [[-100, -100, -100, 8]]
    """
    places = torch.arange(labels.shape[1], device=labels.device)
    # query t predicts the label at t + 1
    return labels.masked_fill(places <= torch.tensor(gaps, device=labels.device)[:, None], IGNORED)
