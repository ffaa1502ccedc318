"""A draft that learns from the rollouts of a trainer, while the trainer changes the target."""

import dataclasses
import os
import time
from collections import deque
from contextlib import contextmanager
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging

from ..generation.sequences import SpeculationStats
from .arguments import RANGES, DraftTrainingArguments
from .data import IGNORED, DocumentEncoder, DraftCollator
from .methods import method_of
from .trainer import check_models, check_weights

logger = logging.get_logger(__name__)

# Folder in a checkpoint of the trainer.
FOLDER = "draft"
# Texts by which tau is estimated before and after an update; a pass over them takes as long as a step on as many.
ESTIMATED = 2


class DraftAlong(TrainerCallback):
    """Train a draft on the texts that a trainer generates, so that it follows the model.

    ```python
    with hf_longspec.bind(trainer, draft) as bound:
        trainer.add_callback(DraftAlong(bound))
        trainer.train()
    ```

    After every `every` steps of the trainer it takes `steps` steps on the newest generated texts, by the loss of the
    draft's own method. The model is read without gradients. The log of the trainer gets `draft_tau`, the tokens per
    verification of the texts since the last log, `draft_loss`, `draft_seconds`, and the tau that the draft's most
    likely tokens would give on the newest texts before and after it was trained on them (`draft_estimated_tau_before`
    and `draft_estimated_tau_after`). Each checkpoint has the draft in its folder `draft`; the state of its optimizer
    is not saved.

    With several processes each of them trains its own copy of the draft on its own texts, and the first one's is saved.

    Args:
        bound ([`~hf_longspec.bind`]): The model that the trainer trains, and a draft with weights in float32.
        every (`int`, *optional*, defaults to 1): Steps of the trainer between updates.
        steps (`int`, *optional*, defaults to 1): Steps of an update.
        learning_rate (`float`, *optional*, defaults to 3e-4): Rate of AdamW, which stays as it is.
        settings (`Any`): Other settings of [`DraftTrainingArguments`] by name, such as `per_device_train_batch_size`,
            `loss`, `bf16`, `max_grad_norm` and the coefficients of AdamW.

    Raises:
        ValueError: If the draft has no weights to train, or was not made for the model.
    """

    def __init__(self, bound: Any, every: int = 1, steps: int = 1, learning_rate: float = 3e-4, **settings: Any):
        for name, value in (("every", every), ("steps", steps)):
            if value < 1:
                raise ValueError(f"{name}={value}: expected 1 or more.")
        self.bound, self.every, self.steps = bound, every, steps
        self.draft, self.target = bound.draft, bound.model
        self.args = bare_arguments(learning_rate=learning_rate, **settings)
        check_models(self.draft, self.target)
        method_of(self.draft)(self.draft, self.target, self.args)  # refuses settings that do not fit
        check_weights(self.draft)
        size = self.args.per_device_train_batch_size
        self.texts: deque[tuple[torch.Tensor, torch.Tensor]] = deque(maxlen=size * steps)
        self.weights = [weight for weight in self.draft.parameters() if weight.requires_grad]
        betas = self.args.adam_beta1, self.args.adam_beta2
        how = {"lr": self.args.learning_rate, "betas": betas, "eps": self.args.adam_epsilon}
        self.optimizer = torch.optim.AdamW(self.weights, **how, weight_decay=self.args.weight_decay)
        self.collator = DraftCollator(
            DocumentEncoder(self.args), self.draft.config.vocab_size, self.draft.config.pad_token_id or 0
        )
        self.num_steps = 0  # of the draft's optimizer
        self.metrics: dict[str, float] = {}
        self._emitted = self._verified = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin to collect what the model generates."""
        if self.add not in self.bound.listeners:
            self.bound.listeners.append(self.add)
        handler = getattr(self.bound.owner, "callback_handler", None)
        if handler is not None and self in handler.callbacks:  # before those that print and report the logs
            handler.callbacks.remove(self)
            handler.callbacks.insert(0, self)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop to collect."""
        if self.add in self.bound.listeners:
            self.bound.listeners.remove(self.add)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Train the draft, if it is time and there are texts."""
        if state.global_step % self.every == 0 and self.texts:
            # the next log comes before the next update
            self.update(is_logged=-state.global_step % max(1, state.logging_steps) < self.every)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the metrics since the last log."""
        metrics = dict(self.metrics)
        if self._verified:
            metrics["draft_tau"] = self._emitted / self._verified
        if logs is not None and metrics:
            logs.update(metrics)
            state.log_history[-1].update(metrics)
            self.metrics, self._emitted, self._verified = {}, 0, 0

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write the draft into the checkpoint."""
        if state.is_world_process_zero:
            self.draft.save_pretrained(os.path.join(args.output_dir, f"checkpoint-{state.global_step}", FOLDER))

    def add(self, arguments: dict[str, Any], result: Any) -> None:
        """Keep the rows of a call of `generate`: all tokens, of which the generated ones are trained on."""
        stats: SpeculationStats = self.draft.last_speculation
        self._emitted += stats.num_emitted_tokens
        self._verified += stats.num_spec_steps
        sequences = (result if isinstance(result, torch.Tensor) else result.sequences).cpu()
        prompts: torch.Tensor = arguments["inputs" if arguments.get("inputs") is not None else "input_ids"]
        width, copies = prompts.shape[1], len(sequences) // len(prompts)
        mask = arguments.get("attention_mask")
        mask = torch.ones_like(prompts) if mask is None else mask
        mask = mask.bool().cpu().repeat_interleave(copies, 0)
        ends = end_tokens(self.target, arguments)
        for row, is_token in zip(sequences, mask, strict=True):
            new = row[width:]
            stops = torch.isin(new, ends).nonzero()
            new = new[: int(stops[0]) + 1] if len(stops) else new
            prompt = row[:width][is_token]
            tokens = torch.cat([prompt, new])
            labels = torch.cat([torch.full_like(prompt, IGNORED), new])
            if len(new) > 1:
                self.texts.append((tokens, labels))

    def update(self, is_logged: bool = True) -> None:
        """Take the steps of an update on the newest texts; if it is logged, estimate tau before and after."""
        started, size = time.perf_counter(), self.args.per_device_train_batch_size
        rows = [{"input_ids": tokens, "labels": labels} for tokens, labels in reversed(self.texts)]
        with evaluating(self.target), torch.autocast(self.target.device.type, torch.bfloat16, enabled=self.args.bf16):
            # made anew, as a method may keep what it computes from weights of the target
            method = method_of(self.draft)(self.draft, self.target, self.args)
            newest = self._batch(rows[:ESTIMATED])
            before = self._estimated_tau(method, newest) if is_logged else None
            for step in range(self.steps):
                first = step * size % len(rows)
                loss = self._step(method, self._batch(rows[first : first + size]))
            after = self._estimated_tau(method, newest) if is_logged else None
        if method.longest_position:
            self.draft.config.trained_max_length = method.longest_position
        self.metrics |= {"draft_loss": loss}
        self.metrics |= {
            f"draft_estimated_tau_{when}": tau for when, tau in (("before", before), ("after", after)) if tau
        }
        self.metrics["draft_seconds"] = self.metrics.get("draft_seconds", 0.0) + time.perf_counter() - started

    def _batch(self, rows: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
        return {name: value.to(self.target.device) for name, value in self.collator(rows).items()}

    def _step(self, method: Any, batch: dict[str, Any]) -> float:
        """Take one step of the optimizer, and return the loss."""
        count = len(batch["input_ids"])
        inputs = method.prepare(batch, self.num_steps, count, range(count))
        self.num_steps += 1
        totals, _ = method.loss(self.draft, inputs)
        items = method.items(inputs["labels"]).to(totals.device)
        loss = (totals / items.clamp_min(1)).sum()
        if not torch.isfinite(loss):  # the run of the trainer goes on, and so does the draft as it is
            logger.warning_once(
                f"The loss of the draft is {loss.item()}, so this step leaves its weights as they are. Lower the "
                f"learning_rate of DraftAlong, which is {self.args.learning_rate}."
            )
            return float("nan")
        # not backward(), which would add to the gradients of the target
        slopes = torch.autograd.grad(loss, self.weights, allow_unused=True)
        for weight, slope in zip(self.weights, slopes, strict=True):
            weight.grad = slope
        torch.nn.utils.clip_grad_norm_(self.weights, self.args.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach().item()

    @torch.no_grad()
    def _estimated_tau(self, method: Any, batch: dict[str, Any]) -> float | None:
        _, counts = method.evaluate(self.draft, batch)
        tau: float | None = method.summary(counts.sum(0).tolist()).get("estimated_tau")
        return tau


def bare_arguments(**settings: Any) -> DraftTrainingArguments:
    """Return arguments that were not initialised, which would reset the state of accelerate that the trainer uses.

    >>> bare_arguments(loss="ce").loss
    'ce'
    """
    args = object.__new__(DraftTrainingArguments)
    known = {field.name: field for field in dataclasses.fields(DraftTrainingArguments)}
    if unknown := sorted(settings.keys() - known.keys()):
        raise TypeError(f"{', '.join(unknown)}: no such setting. Pass settings of DraftTrainingArguments.")
    for name, field in known.items():
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        setattr(args, name, settings.get(name, default))
    for name, setting in RANGES.items():
        setting.check(name, getattr(args, name))
    return args


def end_tokens(model: Any, arguments: dict[str, Any]) -> torch.Tensor:
    """Return the tokens that end a text in a call of `generate`."""
    config = arguments.get("generation_config") or model.generation_config
    ends = arguments.get("eos_token_id", config.eos_token_id)
    ends = model.generation_config.eos_token_id if ends is None else ends
    return torch.tensor([] if ends is None else ends, dtype=torch.long).flatten()


@contextmanager
def evaluating(model: torch.nn.Module) -> Any:
    """Put a model in eval mode, and each of its modules back into its own mode at the end."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
