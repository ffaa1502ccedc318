"""Training of EAGLE-3 drafts: chained steps, in which the draft continues from its own states as it does when drafting.

Source: EAGLE-3 (https://huggingface.co/papers/2503.01840), section 3.2, "training-time test".
"""

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from ...generation.target_modules import TargetEnds, final_norm_of
from ...training.arguments import DraftTrainingArguments
from ...training.data import IGNORED
from ...training.method import TrainingMethod, check_length
from ...training.target_states import HiddenPass
from ..longspec.training_longspec import RowNoise, anchor_offset_positions, counted

# Weight of the loss of step s is this to the power of s, as in the authors' training.
STEP_WEIGHT = 0.8


class Eagle3Method(TrainingMethod):
    """Trains `config.training_steps` chained steps on whole rows. Loss and counts have one term and one level per step.

    Entry p joins the target's states at token p with token p + 1. Its step s (from 0) predicts token p + s + 2. With
    `loss="kl"` the wanted distribution is the target's at token p + s + 1, over the draft's vocabulary; with
    `loss="ce"` the wanted token is that of the text, if the draft has it.

    A draft whose setting `window` is a number is trained with that window and its `sinks`. `max_offset` shifts the
    draft's own positions after the anchors (Anchor-Offset Indices of LongSpec), and is 0 by default. An embedding of
    the draft's own is a copy of the target's and stays as it is.
    """

    def __init__(self, draft: Any, target: PreTrainedModel, args: DraftTrainingArguments):
        super().__init__(draft, target, args)
        self.target = target
        self.steps = draft.config.training_steps
        if self.steps < 1:
            raise ValueError(f"training_steps={self.steps} in the draft's config: expected at least 1, and 3 is usual.")
        if draft.embed_tokens is not None:
            draft.embed_tokens.requires_grad_(False)
        text = target.config.get_text_config(decoder=True)
        self.layers = draft.layers_of(text)
        wanted = (*self.layers, text.num_hidden_layers) if args.loss == "kl" else self.layers
        self.hidden_pass = HiddenPass(target, args.target_chunk_size, wanted)
        self.ends, self.norm = TargetEnds(target), final_norm_of(target)
        self.noise = RowNoise(args.seed, (1, 1), self.position_limit, args.max_offset or 0)
        setting = getattr(draft.generation_config, "window", None)
        self.window: int | None = setting if isinstance(setting, int) else None
        self.sinks = draft.setting("sinks")
        self.longest = 0
        self.count_shape = self.steps, 2

    def prepare(self, batch: dict[str, Any], step: int, total: int, rows: Sequence[int]) -> dict[str, Any]:
        """Add the draft's positions."""
        length = batch["input_ids"].shape[1]
        check_length(length, self.position_limit)
        lengths = batch["attention_mask"].sum(1).tolist()
        _, offsets = self.noise.draw(step, total, rows, lengths)
        self.longest = max(self.longest, *lengths)
        return {**batch, "position_ids": anchor_offset_positions(length, offsets, self.args.anchors)}

    def items(self, labels: torch.Tensor) -> torch.Tensor:
        """Count the labels that each step predicts. Step s predicts those from index s + 2 on."""
        present = self._trained(labels)
        return torch.stack([present[:, step + 2 :].sum() for step in range(self.steps)])

    def loss(self, model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each step's weighted summed loss, and its hits and predicted tokens."""
        totals, counts = self._run(model, inputs, inputs["position_ids"])
        return totals, counts.sum(0)

    def evaluate(self, model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of the steps' weighted mean losses at the positions 0, 1, 2, ..., and each row's counts."""
        tokens = inputs["input_ids"]
        totals, counts = self._run(model, inputs, torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens))
        return (totals / self.items(inputs["labels"]).clamp_min(1)).sum(), counts

    def summary(self, counts: Sequence[Sequence[float]]) -> dict[str, float]:
        """Compute the share of hits of every step, and the tau of a chain of so many tokens if they are independent.

        >>> Eagle3Method.summary(None, [(3, 4), (2, 4)])
        {'acceptance_step_1': 0.75, 'acceptance_step_2': 0.5, 'estimated_tau': 2.125}
        """
        shares = [hits / places for hits, places in counts if places]
        logs = {f"acceptance_step_{step}": share for step, share in enumerate(shares, start=1)}
        if len(shares) == len(counts):
            tau = chain = 1.0
            for share in shares:
                chain *= share
                tau += chain
            logs["estimated_tau"] = tau
        return logs

    def facts(self) -> dict[str, Any]:
        """Return the layers whose states are stored, the loss, and the length at which rows are cut."""
        return {"states": list(self.layers), "loss": self.args.loss, "max_length": self.args.max_length}

    def stored(self, tokens: torch.Tensor, number: int) -> dict[str, torch.Tensor]:
        """Compute the target's states for a row."""
        check_length(len(tokens), self.position_limit)
        return {"hidden": self.hidden_pass(tokens[None].to(self.args.device))[0]}

    def resume(self, checkpoint: str) -> None:
        """Restore the length of the longest row of the earlier run."""
        if os.path.isfile(os.path.join(checkpoint, "config.json")):
            before = type(self.draft.config).from_pretrained(checkpoint)
            self.longest = max(self.longest, before.trained_max_length)

    def record(self, accelerator: Any) -> None:
        """Record how many positions a query saw in training: the window, or the longest row of any process."""
        longest = accelerator.gather(torch.tensor([self.longest], device=accelerator.device))
        if int(longest.max()):
            self.draft.config.trained_max_length = self.window or int(longest.max())

    def _trained(self, labels: torch.Tensor) -> torch.Tensor:
        """Return which labels are trained on, `(B, L)`."""
        present = labels != IGNORED
        if self.args.loss == "ce" and self.draft.d2t is not None:
            present = present & torch.isin(labels, self.draft.token_ids.to(labels.device))
        return present

    def _run(self, model: Any, inputs: dict[str, Any], positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the chained steps over a batch. Returns the sums of their losses, and the counts of each row."""
        tokens, labels = inputs["input_ids"], inputs["labels"]
        hidden = inputs["hidden"] if "hidden" in inputs else self.hidden_pass(tokens)
        width = len(self.layers) * self.draft.config.target_hidden_size
        trained = self._trained(labels)

        def score(step: int, outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            places = trained[:, step + 2 :]
            states = outputs[:, : places.shape[1]][places]
            final = hidden[:, step + 1 : step + 1 + places.shape[1], width:]
            wanted = labels[:, step + 2 :][places] if self.args.loss == "ce" else final[places]
            total, hits = self._loss_of(states, wanted)
            return STEP_WEIGHT**step * total, counted(hits, places.nonzero()[:, 0], len(tokens))

        results = model(
            taps=hidden[:, :-1, :width],
            tokens=tokens[:, 1:],
            steps=min(self.steps, tokens.shape[1] - 1),
            target=self.target,
            position_ids=positions[:, :-1],
            window=self.window,
            sinks=self.sinks,
            score=score,
        )
        missing = self.steps - len(results)  # a row of few tokens has fewer steps
        zero = hidden.new_zeros(missing, dtype=torch.float32)
        totals = torch.cat([torch.stack([total for total, _ in results]), zero])
        counts = torch.stack([count for _, count in results], 1)
        return totals, torch.nn.functional.pad(counts, (0, 0, 0, missing))

    def _loss_of(self, states: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the summed loss of states `(n, hidden)`, and whether each most likely token is the wanted one.

        Logits are in memory for `loss_chunk_size` tokens at a time, and are computed again for the gradient.
        """
        total, hits = states.new_zeros((), dtype=torch.float32) + 0 * states.sum(), []
        chunks = zip(states.split(self.args.loss_chunk_size), wanted.split(self.args.loss_chunk_size), strict=True)
        for own, target in chunks:
            loss, hit = checkpoint(self._chunk, own, target, use_reentrant=False)
            total = total + loss
            hits.append(hit)
        return total, torch.cat(hits)

    def _chunk(self, states: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        log_draft = self.draft.logits(states, self.target).float().log_softmax(-1)
        best = log_draft.argmax(-1)
        ids = self.draft.token_ids.to(best.device)
        if self.args.loss == "ce":
            own = (wanted[:, None] == ids).int().argmax(-1) if self.draft.d2t is not None else wanted
            return -log_draft.gather(1, own[:, None]).sum(), best == own
        with torch.no_grad():
            logits = self.ends.head(self.norm(wanted)).float()
            hits = ids[best] == logits.argmax(-1)  # in all of the vocabulary, as in verification
            log_target = (logits if self.draft.d2t is None else logits[:, ids]).log_softmax(-1)
        return (log_target.exp() * (log_target - log_draft)).sum(), hits
