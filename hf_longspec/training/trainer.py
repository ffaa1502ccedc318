"""DraftTrainer: transformers' Trainer for a draft and its frozen target."""

from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel, Trainer

from ..generation.special_cases.forward_check import is_quantized
from ..generation.target import TargetView
from ..modeling.base import DraftModel
from .arguments import DraftTrainingArguments
from .checkpoints import last_complete_checkpoint
from .data import DocumentEncoder, DraftCollator
from .loss_growth import LossGrowth
from .methods import check_length, method_of
from .stored_states import KVStore, digest

# Arguments of `Trainer` that get logits and labels, or replace the loss.
UNUSED = ("compute_metrics", "preprocess_logits_for_metrics", "compute_loss_func")


class DraftTrainer(Trainer):
    """Trains a draft for a target that is not changed.

    ```python
    from hf_longspec import LongSpecDraftModel
    from hf_longspec.training import DraftTrainer, DraftTrainingArguments, TokenWindows

    draft = LongSpecDraftModel.from_target(target)
    args = DraftTrainingArguments("runs/draft", learning_rate=1e-3, per_device_train_batch_size=8, max_steps=1000)
    DraftTrainer(draft, target, args, train_dataset=TokenWindows(tokens, 1024)).train()
    ```

    The target is an attribute, so checkpoints and optimizer hold only the draft. The target is put in eval mode and
    frozen (`requires_grad_(False)`), and its weights are never written to. Every process holds a copy of it.

    The draft's `config.model_type` selects its [`TrainingMethod`]. Besides the loss, the log has the number of tokens
    seen and, for every gap or head, the share of tokens for which the draft's most likely token is correct: the
    target's most likely token, or the token of the text with `loss="ce"`.

    Args:
        model ([`DraftModel`]): A draft of a kind that is trained, or a `PeftModel` of it.
        target (`PreTrainedModel`): The causal language model that the draft was created for.
        args ([`DraftTrainingArguments`]): Settings of the run.
        train_dataset, eval_dataset (*optional*): See [`DocumentEncoder`]: `input_ids`, a text or a conversation.
        processing_class (`PreTrainedTokenizerBase`, *optional*): The target's tokenizer; not needed for `input_ids`.
        peft_config (`peft.PeftConfig`, *optional*): Train an adapter on the draft instead of the draft.
        **kwargs: Passed to `Trainer`.
    """

    # compute_loss divides the loss by the predicted tokens of the whole step
    loss_is_scaled_for_ga = True
    train_dataset: Any

    def __init__(
        self,
        model: DraftModel | Any,
        target: PreTrainedModel,
        args: DraftTrainingArguments,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        peft_config: Any = None,
        **kwargs: Any,
    ):
        for name in UNUSED:
            if kwargs.get(name) is not None:
                raise ValueError(
                    f"{name}={kwargs[name]!r} would not be called: the kind of draft defines its loss and metrics, and "
                    "logits of all tokens are never in memory. Leave it out, and read the metrics in on_evaluate of a "
                    "TrainerCallback."
                )
        self.draft = getattr(model, "get_base_model", lambda: model)()
        method = method_of(self.draft)
        check_models(self.draft, target)
        if args.n_gpu > 1:
            raise ValueError(f"{args.n_gpu} GPUs in one process: start one process per GPU with accelerate launch.")
        self.encoder = DocumentEncoder(args, processing_class)
        check_data("train_dataset", train_dataset, self.encoder)
        check_data("eval_dataset", eval_dataset, self.encoder)
        self.method = method(self.draft, target, args)
        self.encoder.max_length = self.method.max_length
        if peft_config is not None:
            from peft import get_peft_model

            model = get_peft_model(model, peft_config)
        check_weights(model)
        self.target = target.eval().requires_grad_(False)  # after the checks: a refusal leaves the target as it was
        kwargs.setdefault(
            "data_collator",
            DraftCollator(self.encoder, self.draft.config.vocab_size, self.draft.config.pad_token_id or 0),
        )
        super().__init__(
            model,
            args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            **kwargs,
        )
        # Trainer inspects a model's forward for these; a draft's forward takes no labels, and compute_loss shifts them.
        self.model_accepts_loss_kwargs = True
        self._loss_shifts_labels = True
        # accelerator.prepare_model does not move it under FSDP, and under mixed precision it replaces the forward of
        # the user's model for good
        if getattr(target, "hf_device_map", None) is None and not is_quantized(target):
            target.to(args.device)
        self.add_callback(LossGrowth)
        # counted since the last log
        self.counts = torch.zeros(self.method.levels, 2, dtype=torch.float64, device=args.device)
        self.latest = torch.zeros_like(self.counts)

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """Train, optionally from a checkpoint's folder; `True` stands for the last complete one in `output_dir`.

        Raises:
            FloatingPointError: If the loss is infinite or NaN; the weights are those before the step. Or if it has
                grown, see [`LossGrowth`].
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_complete_checkpoint(self.args.output_dir)
        if resume_from_checkpoint:
            self.method.resume(str(resume_from_checkpoint))
        self.store_states()
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    def store_states(self) -> None:
        """Write the states of the target that are missing in `target_kv_dir`, if it is set, and train on them."""
        if self.args.target_kv_dir is not None and not isinstance(self.train_dataset, KVStore):
            self.train_dataset = self._stored_rows(self.args.target_kv_dir, self.train_dataset)

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> Any:
        """Return the prepared batches of a step, and the number of tokens that all processes predict per loss term."""
        batches, _ = super().get_batch_samples(self._prepared(epoch_iterator), num_batches, device)
        if not batches:
            return batches, None
        items = torch.stack([self.method.items(batch["labels"]) for batch in batches]).sum(0).to(device)
        if self.args.average_tokens_across_devices:
            items = self.accelerator.reduce(items)
        return batches, items

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute this process's share of the mean loss of the step."""
        totals, counts = self.method.loss(model, inputs)
        self.counts += counts
        if not torch.isfinite(totals).all():
            raise FloatingPointError(
                f"the loss at step {self.state.global_step + 1} is {totals.sum().item()}: lower learning_rate, train "
                "in float32 or bfloat16 instead of float16, or look for NaN in the weights of the draft and the target."
            )
        items = self.method.items(inputs["labels"]) if num_items_in_batch is None else num_items_in_batch
        loss = (totals / items.to(totals.device).clamp_min(1)).sum()
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            loss = loss * self.accelerator.num_processes  # the gradients of the processes are averaged
        return (loss, {}) if return_outputs else loss

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        with torch.no_grad():
            loss, counts = self.method.evaluate(model, self._prepare_inputs(inputs))
        return loss, counts, None

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        """Evaluate as `Trainer` does, and add the draft's accuracy to the metrics."""
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        summary = self.method.summary(output.predictions.sum(0).tolist())
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in summary.items()})
        return output

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as `Trainer` does, and add the draft's accuracy since the last log."""
        if "loss" in logs:
            counts = self.accelerator.reduce(self.counts)
            # few rows may have no token at some gap, whose last counts are then used for tau
            self.latest = counts.where(counts[:, 1:] > 0, self.latest)
            tau = {name: value for name, value in self.method.summary(self.latest.tolist()).items() if "tau" in name}
            logs = logs | self.method.summary(counts.tolist()) | tau
            self.counts.zero_()
        super().log(logs, *args, **kwargs)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Save as `Trainer` does, after the method has recorded its facts in the draft's config."""
        self.method.record(self.accelerator)
        super().save_model(*args, **kwargs)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: `Trainer` would upload the draft without its code and its model card."""
        raise ValueError(
            "a trainer cannot upload drafts: call draft.push_to_hub('owner/name'), or run hf-longspec publish."
        )

    def _prepared(self, batches: Iterator) -> Iterator[dict[str, Any]]:
        """Yield the batches of one step after the method has prepared them."""
        world, size = self.accelerator.num_processes, self.args.per_device_train_batch_size
        total = world * size * self.args.gradient_accumulation_steps
        for number, batch in enumerate(batches):
            first = (number * world + self.accelerator.process_index) * size
            count, length = batch["input_ids"].shape
            check_length(length, self.method.position_limit)
            rows = range(first, first + count)
            yield self.method.prepare(batch, self.state.global_step, total, rows)

    def _stored_rows(self, folder: str, rows: Any) -> KVStore:
        """Return the training rows with the target's states. This process writes its share of the missing ones."""
        if not hasattr(rows, "__len__"):
            raise ValueError(f"target_kv_dir={folder!r} needs a dataset with a length: leave out streaming=True.")
        target = {name: getattr(self.draft.config, name) for name in ("target", "target_name_or_path")}
        facts = self.method.facts() | target | {"first_row": digest(self.encoder(rows[0])[0])}

        def row(number: int) -> dict[str, torch.Tensor]:
            tokens, labels = self.encoder(rows[number])
            check_length(len(tokens), self.method.position_limit)
            return {"input_ids": tokens, "labels": labels, **self.method.stored(tokens, number)}

        store = KVStore(folder, len(rows), facts)
        self.accelerator.wait_for_everyone()  # until all processes have compared the facts
        share = self.accelerator.process_index, self.accelerator.num_processes
        store.fill(row, share, silent=self.args.disable_tqdm or not self.is_world_process_zero())
        self.accelerator.wait_for_everyone()
        return store


def check_models(draft: Any, target: PreTrainedModel) -> None:
    """Refuse a target that the draft was not created for, or that cannot be decoded speculatively."""
    view = TargetView(target)
    if reasons := view.why_not():
        raise ValueError(f"{type(target).__name__} cannot be decoded speculatively: {'; '.join(reasons)}.")
    draft.check(view)


def check_weights(model: Any) -> None:
    """Refuse a draft without trainable weights, or with trainable weights in half precision."""
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not weights:
        raise ValueError("no weight of the draft requires a gradient: call draft.requires_grad_(True).")
    if halves := {parameter.dtype for parameter in weights} & {torch.float16, torch.bfloat16}:
        raise ValueError(
            f"the draft's weights are {', '.join(map(str, halves))}, in which small updates are rounded away: pass "
            "draft.float(), and bf16=True for speed."
        )


def check_data(name: str, dataset: Any, encoder: DocumentEncoder) -> None:
    """Refuse a dataset without rows, or whose first row cannot be trained on."""
    if dataset is None or isinstance(dataset, dict):
        return
    first = next(iter(dataset), None) if not hasattr(dataset, "__len__") or len(dataset) else None
    if first is None:
        raise ValueError(f"{name} has no rows: check its path, split and filters.")
    encoder(first)
