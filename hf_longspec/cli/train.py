"""Train a draft as a recipe says.

    hf-longspec train --config examples/longspec_pretrain.yaml --target Qwen/Qwen3-8B

Exit status: 0; 1 if the loss stopped being a number; 2 for what cannot be run; 130 after Ctrl-C.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel, set_seed

from ..training import DraftTrainer, DraftTrainingArguments, TokenWindows, pack
from ..training.method import trained_drafts
from ..training.trainer import last_complete_checkpoint
from . import CommandError, first_line
from .models import load_tokenizer, loading
from .recipes import Recipe, check_names, read_recipe
from .training_facts import write_facts


def main(config: Path, overrides: dict[str, Any], resume: bool = False, debug: bool = False) -> int:
    """Train; returns the exit status.

    Args:
        config (`Path`): The recipe.
        overrides (`dict[str, Any]`): Keys of the recipe with other values, `{"training.max_steps": 10}`.
        resume (`bool`): Go on from the last complete checkpoint in `output_dir`.
        debug (`bool`): Let errors end the process with their traceback.
    """
    try:
        train(read_recipe(config, overrides), resume)
    except KeyboardInterrupt:
        print("\nInterrupted. --resume goes on from the last checkpoint.", file=sys.stderr)
        return 130
    except (CommandError, ValueError, OSError, ImportError, FloatingPointError) as error:
        if debug:
            raise
        print(f"error: {first_line(error)}", file=sys.stderr)
        return 1 if isinstance(error, FloatingPointError) else 2
    return 0


def train(recipe: Recipe, resume: bool) -> None:
    """Everything from the recipe to the saved draft.

    Raises:
        CommandError: If something named in the recipe cannot be found.
        ValueError: If draft, target, data and settings do not go together.
        FloatingPointError: If the loss stops being a number.
    """
    check_names("training", recipe.training, {field.name for field in dataclasses.fields(DraftTrainingArguments)})
    if recipe.training.get("output_dir") is None:
        raise CommandError("training has no output_dir: name a folder there, or pass --output-dir.")
    args = DraftTrainingArguments(**recipe.training)
    checkpoint = last_complete_checkpoint(args.output_dir) if resume else None
    sources = [recipe.dataset, recipe.eval_dataset]
    has_text = any(source is not None and "tokens" not in source for source in sources)
    tokenizer = load_tokenizer(recipe.target) if has_text else None
    with args.main_process_first(desc="loading of the dataset"):  # the others find it in the cache
        train_rows, eval_rows = (load_rows(source, recipe.pack, tokenizer, args) for source in sources)
    target = load_target(recipe)
    set_seed(args.seed)  # a new draft is drawn: the same in every run and every process
    trainer = DraftTrainer(
        make_draft(recipe, target),
        target,
        args,
        train_dataset=train_rows,
        eval_dataset=eval_rows,
        processing_class=tokenizer,
        peft_config=lora_config(recipe.lora),
    )
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()
    if trainer.is_world_process_zero():
        write_facts(recipe, Path(str(args.output_dir)), trainer.state)
        print(f"Saved in {args.output_dir} after {trainer.state.global_step} steps.")


def load_rows(data: dict[str, Any] | None, length: int | None, tokenizer: Any, args: DraftTrainingArguments) -> Any:
    """A dataset of a recipe, with rows as the trainer takes them.

    Raises:
        CommandError: If it cannot be loaded.
    """
    if data is None:
        return None
    if "tokens" in data:
        return _windows(data, length)
    try:
        from datasets import DatasetDict, IterableDatasetDict, load_dataset
    except ImportError as error:
        raise CommandError("this needs datasets, which is not installed: pip install 'hf_longspec[train]'") from error

    name = str(data.get("path"))
    with loading(name, "dataset"):
        dataset = load_dataset(**data)
    if isinstance(dataset, DatasetDict | IterableDatasetDict):
        raise CommandError(f"{name!r} has the splits {', '.join(dataset)}: add split to the dataset of the recipe.")
    return dataset if length is None else pack(dataset, tokenizer, args, length)


def _windows(data: dict[str, Any], length: int | None) -> Any:
    """Rows of `pack` tokens from the files below `tokens`."""
    import numpy as np

    check_names("dataset with tokens", data, {"tokens"})
    if length is None:
        raise CommandError("a dataset of tokens has no documents: say with pack how many tokens a row has.")
    files = [data["tokens"]] if isinstance(data["tokens"], str) else data["tokens"]
    windows = []
    for file in files:
        with loading(file, "tokens"):
            windows.append(TokenWindows(np.load(file, mmap_mode="r"), length))
    return torch.utils.data.ConcatDataset(windows)


def load_target(recipe: Recipe) -> PreTrainedModel:
    """The target, which nothing will change.

    Raises:
        CommandError: If it cannot be loaded.
    """
    extra = {"attn_implementation": recipe.attn_implementation} if recipe.attn_implementation else {}
    with loading(recipe.target, "model"):
        return AutoModelForCausalLM.from_pretrained(recipe.target, dtype=recipe.dtype, **extra)


def make_draft(recipe: Recipe, target: PreTrainedModel) -> PreTrainedModel:
    """The draft to train, in float32: a new one or a saved one.

    Raises:
        CommandError: If it cannot be loaded, or is of no known kind.
        ValueError: If its settings do not exist.
    """
    if isinstance(recipe.draft, str):
        with loading(recipe.draft, "draft"):
            return AutoModel.from_pretrained(recipe.draft, dtype=torch.float32)
    settings = {"kind": "longspec"} | (recipe.draft or {})
    kinds = trained_drafts()
    if (kind := settings.pop("kind")) not in kinds:
        raise CommandError(f"draft.kind={kind!r}: expected one of {', '.join(kinds)}.")
    return kinds[kind].from_target(target, **settings).float()


def lora_config(settings: dict[str, Any] | None) -> Any:
    """A `peft.LoraConfig`, or `None`.

    Raises:
        CommandError: If peft is missing or does not know a setting.
    """
    if settings is None:
        return None
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise CommandError("lora needs peft, which is not installed: pip install peft") from error
    check_names("lora", settings, {field.name for field in dataclasses.fields(LoraConfig)})
    return LoraConfig(**settings)
