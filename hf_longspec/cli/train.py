"""`hf-longspec train`: train a draft from a recipe."""

import json
import shutil
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import yaml
from transformers import AutoModel, PreTrainedModel, set_seed

from ..cli import CARD_FACTS, CommandError, one_line, options
from ..training import DraftTrainer, DraftTrainingArguments, TokenWindows, pack
from ..training.checkpoints import last_complete_checkpoint
from ..training.data import DocumentEncoder, most_frequent
from ..training.methods import trained_drafts
from .automatic import choose
from .duration import describe, limit, seconds_of_step
from .env import command, git_commit, without_folders
from .files import claim, replace_file
from .held_out import HeldOut, measure, split
from .models import check_draft, load_config, load_tokenizer, load_weights, loading
from .recipe import Recipe, recipe_of


def run(args: SimpleNamespace) -> int:
    recipe = recipe_of(args)
    claim_folder(recipe, [args.config, *(args.data or [])], args.resume, args.overwrite)
    try:
        train(recipe, args.resume, args.max_minutes)
    except FloatingPointError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted. --resume continues from the last checkpoint.", file=sys.stderr)
        return options.INTERRUPTED
    return 0


def claim_folder(recipe: Recipe, inputs: list[Any], resume: bool, overwrite: bool) -> None:
    """Refuse an output folder that holds something, unless this is to be continued or replaced."""
    if recipe.training.get("output_dir") is None:
        raise CommandError("training has no output_dir. Set it, or pass --output-dir.")
    folder = Path(recipe.training["output_dir"])
    if resume and not list(folder.glob("checkpoint-*/trainer_state.json")):
        raise CommandError(f"{str(folder)!r} has no complete checkpoint to resume from: start without --resume.")
    read = [
        *inputs,
        options.name_gguf(*options.split_gguf(recipe.target)),
        recipe.draft if isinstance(recipe.draft, str) else None,
    ]
    claim(folder, read, overwrite=overwrite, resume=resume, kept=[CARD_FACTS])


def refuse_misspelt(recipe: Recipe) -> Any:
    """Refuse names in the recipe that do not exist, and a draft of another target, before anything is loaded.

    Returns the configuration of the target.
    """
    options.check_names("training", recipe.training, {field.name for field in fields(DraftTrainingArguments)})
    config = load_config(recipe.target)
    sources = [data["path"] for data in (recipe.dataset, recipe.eval_dataset) if data is not None and "path" in data]
    options.require_sources(map(str, sources))
    if isinstance(recipe.draft, str):
        check_draft(recipe.draft, config)
    else:
        kind, settings = find_kind(recipe)
        options.check_names("draft", settings, {*kind.settings, *vars(kind.config_class())})
    return config


def train(recipe: Recipe, resume: bool, max_minutes: float | None) -> None:
    config = refuse_misspelt(recipe)
    chosen = choose(recipe, config.get_text_config(decoder=True))
    lora = lora_config(recipe.lora)
    args = DraftTrainingArguments(**recipe.training)
    if chosen is not None and args.process_index == 0:
        print(chosen)
    checkpoint = last_complete_checkpoint(args.output_dir) if resume else None
    sources = [recipe.dataset, recipe.eval_dataset]
    has_text = any(source is not None and "tokens" not in source for source in sources)
    tokenizer = load_tokenizer(recipe.target) if has_text else None
    with args.main_process_first(desc="loading of the dataset"):  # the others find it in the cache
        train_rows, eval_rows = (load_rows(source, recipe.pack, tokenizer, args) for source in sources)
    train_rows, held_out = split(train_rows) if eval_rows is None else (train_rows, eval_rows)
    with loading(recipe.target, "model of"):
        how = {"dtype": recipe.dtype, "attn_implementation": recipe.attn_implementation}
        target = load_weights(recipe.target, **how)
    set_seed(args.seed)  # a new draft is drawn: the same in every run and every process
    draft = make_draft(recipe, target)
    size = None if isinstance(recipe.draft, str) else getattr(draft.config, "draft_vocab_size", None)
    if size:
        encoder = DocumentEncoder(args, tokenizer)
        draft.set_vocabulary(most_frequent(train_rows, encoder, draft.config.vocab_size, size), target)
    trainer = DraftTrainer(
        draft,
        target,
        args,
        train_dataset=train_rows,
        eval_dataset=eval_rows,
        processing_class=tokenizer,
        peft_config=lora,
    )
    if checkpoint is None and trainer.is_world_process_zero():
        remove_checkpoints(Path(str(args.output_dir)))
    trainer.store_states()
    seconds = seconds_of_step(trainer)
    if max_minutes is not None:
        limit(trainer, seconds, max_minutes, checkpoint)
        recipe.training["max_steps"] = trainer.args.max_steps
    if trainer.is_world_process_zero():
        print(describe(trainer, seconds))
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()
    if trainer.is_world_process_zero():
        print(f"Saved in {args.output_dir} after {trainer.state.global_step} steps.")
        measured = measure_tau(trainer, held_out)
        write_facts(recipe, Path(str(args.output_dir)), trainer.state, measured)
        print("To measure the draft on this machine:")
        print(f"  hf-longspec bench --target {recipe.target} --draft {args.output_dir} --data TEXT")


def measure_tau(trainer: DraftTrainer, rows: Any) -> HeldOut | None:
    """Measure tau on the rows that were held out, and print it; `None` if there is none, or it cannot be measured."""
    measured, reason = None, "there are fewer than 20 rows, and the recipe has no eval_dataset"
    if rows is not None:
        try:
            draft = trainer.draft
            if trainer.model is draft:  # what users will load; an adapter stays as it is
                with loading(str(trainer.args.output_dir), "draft"):
                    draft = AutoModel.from_pretrained(trainer.args.output_dir, dtype=trainer.target.dtype)
            measured = measure(draft, trainer.target, rows, trainer.encoder)
            if measured is not None and trainer.model is trainer.draft:
                trainer.draft.config.mean_acceptance_length = round(measured.tau, 2)  # the gate begins with it
                trainer.draft.config.save_pretrained(trainer.args.output_dir)
            reason = "the held-out rows are too short, or the target ends them at once"
        except Exception as error:  # the draft is saved, whatever keeps this target from decoding here
            reason = one_line(error)
    if measured is None:
        print(f"tau was not measured: {reason}")
    else:
        print(measured)
        if measured.warning is not None:
            print(f"warning: {measured.warning}", file=sys.stderr)
    return measured


def remove_checkpoints(folder: Path) -> None:
    """Remove the checkpoints of a run that is replaced: `--resume` would continue from the last one by its number."""
    for checkpoint in folder.glob("checkpoint-*"):
        if checkpoint.name.removeprefix("checkpoint-").isdigit():
            checkpoint.unlink() if checkpoint.is_symlink() else shutil.rmtree(checkpoint)


def load_rows(data: dict[str, Any] | None, length: Any, tokenizer: Any, args: Any) -> Any:
    if data is None:
        return None
    if "tokens" in data:
        import numpy as np

        assert length is not None  # checked with the recipe
        windows = []
        for file in [data["tokens"]] if isinstance(data["tokens"], str) else data["tokens"]:
            with loading(file, "tokens of"):
                windows.append(TokenWindows(np.load(file, mmap_mode="r"), length))
        return torch.utils.data.ConcatDataset(windows)
    from datasets import DatasetDict, IterableDatasetDict, load_dataset

    name = str(data.get("path"))
    with loading(name, "dataset"):
        dataset = load_dataset(**data)
    if isinstance(dataset, DatasetDict | IterableDatasetDict):
        raise CommandError(f"{name!r} has the splits {', '.join(dataset)}: add split to the dataset of the recipe.")
    return dataset if length is None else pack(dataset, tokenizer, args, length)


def make_draft(recipe: Recipe, target: PreTrainedModel) -> PreTrainedModel:
    """The draft to train, in float32: a new one or a saved one."""
    if isinstance(recipe.draft, str):
        with loading(recipe.draft, "draft"):
            return AutoModel.from_pretrained(recipe.draft, dtype=torch.float32)
    kind, settings = find_kind(recipe)
    return kind.from_target(target, **settings).float()


def find_kind(recipe: Recipe) -> tuple[Any, dict[str, Any]]:
    """The class of a new draft, and its settings; those of a saved draft are not read."""
    settings = {"kind": "longspec"} | (recipe.draft if isinstance(recipe.draft, dict) else {})
    kinds = {draft.config_class.short_name(): draft for draft in trained_drafts().values()}
    if (kind := settings.pop("kind")) not in kinds:
        raise CommandError(f"draft.kind={kind!r}: expected one of {', '.join(kinds)}.")
    return kinds[kind], settings


def lora_config(settings: dict[str, Any] | None) -> Any:
    if settings is None:
        return None
    from peft import LoraConfig

    options.check_names("lora", settings, {field.name for field in fields(LoraConfig)})
    return LoraConfig(**settings)


def write_facts(recipe: Recipe, folder: Path, state: Any, measured: HeldOut | None = None) -> None:
    """Write card.json into the folder of the draft; entries that were added to it before stay."""
    file = folder / CARD_FACTS
    try:
        facts = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except ValueError:
        print(f"{file} is not JSON and was not changed: it has no entry for this run.", file=sys.stderr)
        return
    dataset = str((recipe.dataset or {}).get("path", ""))
    losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
    loss = f", loss {losses[-1]:.3f} in the last ones" if losses else ""
    # the command may name little of it, above all with --resume
    text = yaml.safe_dump({name: value for name, value in vars(recipe).items() if value}, sort_keys=False)
    entries = {
        "base_model": None if Path(base := options.split_gguf(recipe.target)[0]).exists() else base,
        "datasets": [dataset] if "/" in dataset and not Path(dataset).exists() else [],
        "training": f"{state.global_step:,} steps{loss}.\n\n```yaml\n{without_folders(text)}```",
        "command": command(),
        "commit": git_commit(),
        "held_out": str(measured or ""),
        "warning": measured and measured.warning,
    }
    for name in ("held_out", "warning"):  # those of an earlier run
        facts.pop(name, None)
    facts |= {name: value for name, value in entries.items() if value}
    replace_file(file, json.dumps(facts, indent=2) + "\n")
