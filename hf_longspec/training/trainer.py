"""DraftTrainer: transformers' Trainer for a draft beside its frozen target."""

from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel, Trainer

from ..modeling.base import DraftModel
from .arguments import DraftTrainingArguments
from .checks import check_data, check_models, check_weights, last_complete_checkpoint
from .collator import DraftCollator
from .documents import DocumentEncoder
from .kv_store import KVStore, digest
from .registry import method_of


class DraftTrainer(Trainer):
    """Trains a draft while its target stays as it is.

    ```python
    from hf_longspec import LongSpecDraftModel
    from hf_longspec.training import DraftTrainer, DraftTrainingArguments, TokenWindows

    draft = LongSpecDraftModel.from_target(target)
    args = DraftTrainingArguments("runs/draft", learning_rate=1e-3, per_device_train_batch_size=8, max_steps=1000)
    DraftTrainer(draft, target, args, train_dataset=TokenWindows(tokens, 1024)).train()
    ```

    The target is an attribute: checkpoints and optimizer hold the draft alone. It is put in eval mode and frozen
    (`requires_grad_(False)`), and its weights are not written to. Every process holds a copy of it.

    The draft's class decides how it is trained: [`LongSpecMethod`], [`HeadsMethod`]. Besides the loss, the log has the
    tokens seen and, for every gap or head, the share of places where the draft's most likely token is the one wanted
    (the target's most likely token, or the text's if `loss="ce"`).

    Args:
        model ([`LongSpecDraftModel`] or [`TokenSwiftDraftModel`]): The draft, or a `PeftModel` of it.
        target (`PreTrainedModel`): The causal language model it was made for.
        args ([`DraftTrainingArguments`]): Settings of the run.
        train_dataset (*optional*): Rows with `input_ids`, a text or a conversation, see [`DocumentEncoder`].
        eval_dataset (*optional*): Likewise.
        processing_class (`PreTrainedTokenizerBase`, *optional*): The target's tokenizer; not needed for `input_ids`.
        peft_config (`peft.PeftConfig`, *optional*): Train an adapter on the draft instead of the draft.
        **kwargs: As in `Trainer`.

    Raises:
        ValueError: If draft, target, data and settings do not go together.
    """

    # The loss is divided by the predicted tokens of the whole step, see compute_loss.
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
        self.draft = getattr(model, "get_base_model", lambda: model)()
        method = method_of(self.draft)
        check_models(self.draft, target, args)
        self.encoder = DocumentEncoder(args, processing_class)
        for name, dataset in (("train_dataset", train_dataset), ("eval_dataset", eval_dataset)):
            check_data(name, dataset, self.encoder)
        self.target = target.eval().requires_grad_(False)
        self.method = method(self.draft, self.target, args)
        self.encoder.max_length = self.method.max_length
        if peft_config is not None:
            from peft import get_peft_model

            model = get_peft_model(model, peft_config)
        check_weights(model)
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
        # Found by inspection in ordinary models: our forward takes no labels, and compute_loss shifts them.
        self.model_accepts_loss_kwargs = True
        self._loss_shifts_labels = True
        self._place_target()
        # since the last log
        self.counts = torch.zeros(self.method.count_shape, dtype=torch.float64, device=args.device)

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """Train, possibly from a checkpoint on.

        Args:
            resume_from_checkpoint (`str` or `bool`, *optional*): A checkpoint's folder, or `True` for the last one in
                `output_dir` that was written to its end.

        Raises:
            ValueError: If there is no such checkpoint.
            FloatingPointError: If the loss is infinite or NaN; the weights are those of the step before.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_complete_checkpoint(self.args.output_dir)
        if resume_from_checkpoint:
            self.method.resume(str(resume_from_checkpoint))
        if self.args.target_kv_dir is not None and not isinstance(self.train_dataset, KVStore):
            self.train_dataset = self._stored_rows(self.args.target_kv_dir, self.train_dataset)
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> Any:
        """The prepared batches of a step, and how many tokens all processes predict in each term of the loss."""
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
        """This process's share of the mean loss of the step, and nothing beside it."""
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
        """Mean loss of a batch, and what is counted for each of its rows."""
        with torch.no_grad():
            loss, counts = self.method.evaluate(model, self._prepare_inputs(inputs))
        return loss, counts, None

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        """As in Trainer, with the accuracy of the draft among the metrics."""
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        summary = self.method.summary(output.predictions.sum(0).tolist())
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in summary.items()})
        return output

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As in Trainer, with the accuracy of the draft since the last log."""
        if "loss" in logs:
            logs = logs | self.method.summary(self.accelerator.reduce(self.counts).tolist())
            self.counts.zero_()
        super().log(logs, *args, **kwargs)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """As in Trainer; the draft's config records what a user of it shall know of the training."""
        self.method.record(self.accelerator)
        super().save_model(*args, **kwargs)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Not here: what `Trainer` uploads has no code and no card of a draft.

        Raises:
            ValueError: With what to call instead.
        """
        raise ValueError(
            "a trainer does not upload drafts: call draft.push_to_hub('owner/name'), or hf-longspec publish."
        )

    def _prepared(self, batches: Iterator) -> Iterator[dict[str, Any]]:
        """Batches of one step with what the method adds to their rows."""
        world, size = self.accelerator.num_processes, self.args.per_device_train_batch_size
        total = world * size * self.args.gradient_accumulation_steps
        for number, batch in enumerate(batches):
            first = (number * world + self.accelerator.process_index) * size
            rows = range(first, first + len(batch["input_ids"]))
            yield self.method.prepare(batch, self.state.global_step, total, rows)

    def _stored_rows(self, folder: str, rows: Any) -> KVStore:
        """The training rows with the target's states, of which this process writes its share of what is missing."""
        if not hasattr(rows, "__len__"):
            raise ValueError(f"target_kv_dir={folder!r} needs a dataset with a length: leave out streaming=True.")
        target = {name: getattr(self.draft.config, name) for name in ("target", "target_name_or_path")}
        facts = self.method.facts() | target | {"first_row": digest(self.encoder(rows[0])[0])}

        def row(number: int) -> dict[str, torch.Tensor]:
            tokens, labels = self.encoder(rows[number])
            return {"input_ids": tokens, "labels": labels, **self.method.stored(tokens, number)}

        store = KVStore(folder, len(rows), facts)
        self.accelerator.wait_for_everyone()  # all have compared the facts
        share = self.accelerator.process_index, self.accelerator.num_processes
        store.fill(row, share, silent=self.args.disable_tqdm or not self.is_world_process_zero())
        self.accelerator.wait_for_everyone()
        return store

    def _place_target(self) -> None:
        """Move the target to this process's device, unless something else has spread it over devices.

        `accelerator.prepare_model` would not move it under FSDP, and under mixed precision would replace the forward of
        the user's model for good.
        """
        if getattr(self.target, "hf_device_map", None) is None and not getattr(self.target, "is_quantized", False):
            self.target.to(self.args.device)
