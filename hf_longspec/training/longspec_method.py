"""LongSpecMethod: gaps and offsets for rows of text, and one level of hidden states."""

import os
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from ..generation.target_parts import TargetParts
from .acceptance import acceptance, counted
from .arguments import DraftTrainingArguments
from .documents import IGNORED
from .method import TrainingMethod
from .objective import DraftObjective
from .positions import anchor_offset_positions
from .row_noise import RowNoise, with_noise, without_keyless
from .target_pass import TargetPass, TargetStates


class LongSpecMethod(TrainingMethod):
    """Trains every row at a gap and an offset of its own; a level of the counts is a gap.

    Source: LongSpec (https://huggingface.co/papers/2502.17421), section 3.2.
    """

    def __init__(self, draft: Any, target: PreTrainedModel, args: DraftTrainingArguments):
        super().__init__(draft, target, args)
        self.parts = TargetParts(target, draft.config.kv_layer)
        self.noise = RowNoise(args.seed, draft.config.noise_range, self.position_limit, args.max_offset)
        self.target_pass = TargetPass(self.parts, args.target_chunk_size, hidden=args.loss == "kl")
        self.objective = DraftObjective(self.parts, args.loss_chunk_size)
        self.count_shape = self.noise.gaps[1] - self.noise.gaps[0] + 1, 2
        self.longest_position = draft.config.trained_max_length or 0

    def prepare(self, batch: dict[str, Any], step: int, total: int, rows: Sequence[int]) -> dict[str, Any]:
        """A batch with the gaps and positions of its rows."""
        lengths = batch["attention_mask"].sum(1).tolist()
        gaps, offsets = self.noise.draw(step, total, rows, lengths)
        batch = with_noise(batch, gaps, offsets, self.args.anchors)
        last = max(int(row[length - 1]) for row, length in zip(batch["position_ids"], lengths, strict=True))
        self.longest_position = max(self.longest_position, last)
        return batch

    def items(self, labels: torch.Tensor) -> torch.Tensor:
        """Place t predicts the token at t + 1."""
        return (labels[:, 1:] != IGNORED).sum()[None]

    def loss(self, model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum over a prepared batch, and hits and places of every gap."""
        if "keys" in inputs:
            states = TargetStates(inputs["keys"], inputs["values"], inputs.get("hidden"))
        else:
            states = self.target_pass(inputs["input_ids"], inputs["position_ids"])
        total, hits, rows = self._run(model, inputs, states, inputs["gaps"])
        levels = torch.tensor(inputs["gaps"], device=rows.device)[rows] - self.noise.gaps[0]
        return total, counted(hits, levels, self.count_shape[0])

    def evaluate(self, model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean loss of a batch over all gaps at the positions 0, 1, 2, ..., and each row's hits and places by gap."""
        tokens, labels = inputs["input_ids"], inputs["labels"]
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        states = self.target_pass(tokens, positions)
        first, last = self.noise.gaps
        total, counts = torch.zeros(1, device=tokens.device), []
        for gap in range(first, last + 1):
            gaps = [gap] * len(tokens)
            seen = {"input_ids": tokens, "position_ids": positions, "labels": without_keyless(labels, gaps)}
            loss, hits, rows = self._run(model, seen, states, gaps)
            total += loss
            counts.append(counted(hits, rows, len(tokens)))
        by_row = torch.stack(counts, 1)
        return total[0] / by_row[..., 1].sum().clamp_min(1), by_row

    def summary(self, counts: Sequence[Sequence[float]]) -> dict[str, float]:
        """Acceptance of every gap, and what it lets expect of tau."""
        return acceptance(self.noise.gaps[0], counts)

    def facts(self) -> dict[str, Any]:
        """Layer, loss and everything that positions depend on."""
        facts = {name: getattr(self.args, name) for name in ("loss", "seed", "anchors", "max_offset", "max_length")}
        return facts | {"kv_layer": self.parts.kv_layer}

    def stored(self, tokens: torch.Tensor, number: int) -> dict[str, torch.Tensor]:
        """Keys, values and hidden states at positions that are drawn once and kept beside them."""
        _, offsets = self.noise.draw(-1 - number, 1, [0], [len(tokens)])  # no step has a number below zero
        positions = anchor_offset_positions(len(tokens), offsets, self.args.anchors)
        states = self.target_pass(tokens[None].to(self.args.device), positions.to(self.args.device))
        tensors = {"keys": states.keys[0], "values": states.values[0], "position_ids": positions[0]}
        return tensors if states.hidden is None else {**tensors, "hidden": states.hidden[0]}

    def resume(self, checkpoint: str) -> None:
        """The largest position that the earlier run has trained at."""
        if os.path.isfile(os.path.join(checkpoint, "config.json")):
            before = type(self.draft.config).from_pretrained(checkpoint)
            self.longest_position = max(self.longest_position, before.trained_max_length or 0)

    def record(self, accelerator: Any) -> None:
        """The largest position that any process has trained at."""
        longest = accelerator.gather(torch.tensor([self.longest_position], device=accelerator.device))
        self.draft.config.trained_max_length = int(longest.max()) or None

    def _run(
        self, model: Any, inputs: dict[str, Any], states: TargetStates, gaps: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The summed loss of a batch, `(1,)`; for the places, or a sample of them, whether the draft is right and the
        row of each.
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
        wanted = None if states.hidden is None else states.hidden[:, :-1][places]
        total, ranks, sample = self.objective(hidden[:, :-1][places][None], labels[places], None, wanted)
        return total, ranks[0] == 0, places.nonzero()[sample, 0]
