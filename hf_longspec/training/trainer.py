"""DraftTrainer: transformers' Trainer for a draft beside its frozen target."""

import os
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel, Trainer

from ..generation.target_parts import TargetParts
from ..modeling.modeling_longspec import LongSpecDraftModel
from .acceptance import acceptance, counted
from .arguments import DraftTrainingArguments
from .checks import check_data, check_models, check_weights, last_complete_checkpoint
from .collator import DraftCollator
from .documents import IGNORED, DocumentEncoder
from .kv_store import KVStore, digest
from .objective import DraftObjective
from .positions import anchor_offset_positions, position_limit
from .row_noise import RowNoise, with_noise, without_keyless
from .target_pass import TargetPass, TargetStates


class DraftTrainer(Trainer):
    """Trains a LongSpec draft while its target stays as it is.

    ```python
    from hf_longspec import LongSpecDraftModel
    from hf_longspec.training import DraftTrainer, DraftTrainingArguments, TokenWindows

    draft = LongSpecDraftModel.from_target(target)
    args = DraftTrainingArguments("runs/draft", learning_rate=1e-3, per_device_train_batch_size=8, max_steps=1000)
    DraftTrainer(draft, target, args, train_dataset=TokenWindows(tokens, 1024)).train()
    ```

    The target is an attribute: checkpoints and optimizer hold the draft alone. It is put in eval mode and frozen
    (`requires_grad_(False)`), and its weights are not written to. Every process holds a copy of it.

    Besides the loss, the log has for every gap the share of places where the draft's most likely token is the one
    wanted (the target's most likely token, or the text's if `loss="ce"`), `estimated_tau` and the tokens seen. An
    evaluation runs every row at every gap, without offsets.

    Args:
        model ([`LongSpecDraftModel`]): The draft, or a `PeftModel` of it.
        target (`PreTrainedModel`): The causal language model it was made for.
        args ([`DraftTrainingArguments`]): Settings of the run.
        train_dataset (*optional*): Rows with `input_ids`, a text or a conversation, see [`DocumentEncoder`].
        eval_dataset (*optional*): Likewise.
        processing_class (`PreTrainedTokenizerBase`, *optional*): The target's tokenizer; not needed for `input_ids`.
        peft_config (`peft.PeftConfig`, *optional*): Train an adapter on the draft instead of the draft.
        **kwargs: As in `Trainer`.

    Raises:
        ValueError: If draft, target, data and settings do not go together.

    Source: LongSpec (https://huggingface.co/papers/2502.17421), section 3.2.
    """

    # The loss is divided by the predicted tokens of the whole step, see compute_loss.
    loss_is_scaled_for_ga = True
    train_dataset: Any

    def __init__(
        self,
        model: LongSpecDraftModel | Any,
        target: PreTrainedModel,
        args: DraftTrainingArguments,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        peft_config: Any = None,
        **kwargs: Any,
    ):
        self.draft = getattr(model, "get_base_model", lambda: model)()
        check_models(self.draft, target, args)
        self.encoder = DocumentEncoder(args, processing_class)
        for name, dataset in (("train_dataset", train_dataset), ("eval_dataset", eval_dataset)):
            check_data(name, dataset, self.encoder)
        self.target = target.eval().requires_grad_(False)
        self.parts = TargetParts(target, self.draft.config.kv_layer)
        self.noise = RowNoise(args.seed, self.draft.config.noise_range, position_limit(target), args.max_offset)
        if args.max_length is not None:
            self.noise.room(args.max_length)
        else:
            self.encoder.max_length = self.noise.position_limit
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
        self.target_pass = TargetPass(self.parts, args.target_chunk_size, hidden=args.loss == "kl")
        self.objective = DraftObjective(self.parts, args.loss_chunk_size)
        levels = self.noise.gaps[1] - self.noise.gaps[0] + 1
        self.counts = torch.zeros(levels, 2, dtype=torch.float64, device=args.device)  # since the last log
        self.longest_position = self.draft.config.trained_max_length or 0

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
        if resume_from_checkpoint and os.path.isfile(os.path.join(resume_from_checkpoint, "config.json")):
            before = type(self.draft.config).from_pretrained(resume_from_checkpoint)
            self.longest_position = max(self.longest_position, before.trained_max_length or 0)
        if self.args.target_kv_dir is not None and not isinstance(self.train_dataset, KVStore):
            self.train_dataset = self._stored_rows(self.args.target_kv_dir, self.train_dataset)
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> Any:
        """The batches of a step with their gaps and positions, and how many tokens all processes predict in it."""
        return super().get_batch_samples(self._with_noise(epoch_iterator), num_batches, device)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """This process's share of the mean loss of the step, and nothing beside it."""
        states = self._target_states(inputs)
        total, hits, rows = self.objective(model, inputs, states, inputs["gaps"])
        levels = torch.tensor(inputs["gaps"], device=rows.device)[rows] - self.noise.gaps[0]
        self.counts += counted(hits, levels, len(self.counts))
        if not torch.isfinite(total):
            raise FloatingPointError(
                f"the loss at step {self.state.global_step + 1} is {total.item()}: lower learning_rate, train in "
                "float32 or bfloat16 instead of float16, or look for NaN in the weights of the draft and the target."
            )
        items = (inputs["labels"][:, 1:] != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
        loss = total / torch.as_tensor(items, device=total.device).clamp_min(1)
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            loss = loss * self.accelerator.num_processes  # the gradients of the processes are averaged
        return (loss, {}) if return_outputs else loss

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        """Mean loss of a batch over all gaps at the positions 0, 1, 2, ..., and each row's hits and places by gap."""
        inputs = self._prepare_inputs(inputs)
        tokens, labels = inputs["input_ids"], inputs["labels"]
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        first, last = self.noise.gaps
        total, counts = torch.zeros((), device=tokens.device), []
        with torch.no_grad():
            states = self.target_pass(tokens, positions)
            for gap in range(first, last + 1):
                gaps = [gap] * len(tokens)
                seen = {"input_ids": tokens, "position_ids": positions, "labels": without_keyless(labels, gaps)}
                loss, hits, rows = self.objective(model, seen, states, gaps)
                total += loss
                counts.append(counted(hits, rows, len(tokens)))
        by_row = torch.stack(counts, 1)
        return total / by_row[..., 1].sum().clamp_min(1), by_row, None

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        """As in Trainer, with the acceptance of every gap among the metrics."""
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        summary = acceptance(self.noise.gaps[0], output.predictions.sum(0).tolist())
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in summary.items()})
        return output

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As in Trainer, with the acceptance since the last log."""
        if "loss" in logs:
            logs = logs | acceptance(self.noise.gaps[0], self.accelerator.reduce(self.counts).tolist())
            self.counts.zero_()
        super().log(logs, *args, **kwargs)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """As in Trainer; the draft's config records the largest position that any process has trained at."""
        longest = self.accelerator.gather(torch.tensor([self.longest_position], device=self.args.device))
        self.draft.config.trained_max_length = int(longest.max()) or None
        super().save_model(*args, **kwargs)

    def _with_noise(self, batches: Iterator) -> Iterator[dict[str, Any]]:
        """Batches of one step with the gaps and positions of their rows."""
        world, size = self.accelerator.num_processes, self.args.per_device_train_batch_size
        total = world * size * self.args.gradient_accumulation_steps
        for number, batch in enumerate(batches):
            lengths = batch["attention_mask"].sum(1).tolist()
            first = (number * world + self.accelerator.process_index) * size
            rows = range(first, first + len(lengths))
            gaps, offsets = self.noise.draw(self.state.global_step, total, rows, lengths)
            batch = with_noise(batch, gaps, offsets, self.args.anchors)
            last = max(int(row[length - 1]) for row, length in zip(batch["position_ids"], lengths, strict=True))
            self.longest_position = max(self.longest_position, last)
            yield batch

    def _target_states(self, inputs: dict[str, Any]) -> TargetStates:
        if "keys" in inputs:
            return TargetStates(inputs["keys"], inputs["values"], inputs.get("hidden"))
        return self.target_pass(inputs["input_ids"], inputs["position_ids"])

    def _stored_rows(self, folder: str, rows: Any) -> KVStore:
        """The training rows with the target's states, of which this process writes its share of what is missing."""
        if not hasattr(rows, "__len__"):
            raise ValueError(f"target_kv_dir={folder!r} needs a dataset with a length: leave out streaming=True.")
        args, config, device = self.args, self.draft.config, self.args.device

        def row(number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            tokens, labels = self.encoder(rows[number])
            _, offsets = self.noise.draw(-1 - number, 1, [0], [len(tokens)])  # no step has a number below zero
            return tokens, labels, anchor_offset_positions(len(tokens), offsets, args.anchors)[0]

        facts = {name: getattr(config, name) for name in ("target", "target_name_or_path", "kv_layer")}
        facts |= {name: getattr(args, name) for name in ("loss", "seed", "anchors", "max_offset", "max_length")}
        store = KVStore(folder, len(rows), facts | {"first_row": digest(row(0)[0])})
        self.accelerator.wait_for_everyone()  # all have compared the facts
        store.fill(
            row,
            lambda tokens, positions: self.target_pass(tokens.to(device), positions.to(device)),
            share=(self.accelerator.process_index, self.accelerator.num_processes),
            silent=args.disable_tqdm or not self.is_world_process_zero(),
        )
        self.accelerator.wait_for_everyone()
        return store

    def _place_target(self) -> None:
        """Move the target to this process's device, unless something else has spread it over devices.

        `accelerator.prepare_model` would not move it under FSDP, and under mixed precision would replace the forward of
        the user's model for good.
        """
        if getattr(self.target, "hf_device_map", None) is None and not getattr(self.target, "is_quantized", False):
            self.target.to(self.args.device)
