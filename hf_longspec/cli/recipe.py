"""Recipes of `hf-longspec train`: YAML files whose values options replace. Read before torch is imported."""

from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from ..cli import CARD_FACTS, CommandError, options
from .outputs import claim


@dataclass
class Recipe:
    """One training run."""

    target: str  # Hub id or folder of the target model
    training: dict[str, Any]  # arguments of `DraftTrainingArguments`; `output_dir` is required
    # arguments of `datasets.load_dataset`, or `tokens`, a list of `.npy` files with token streams
    dataset: dict[str, Any]
    eval_dataset: dict[str, Any] | None = None  # likewise
    dtype: str = "auto"  # type of the target's weights
    attn_implementation: str | None = None  # attention of the target while training
    # Hub id or folder of a draft to go on with, or settings of a new one, as in `from_target` of the draft's class,
    # which `kind` names: `longspec` (the default), `tokenswift`, `eagle3`, `dflash` or `mtp`
    draft: str | dict[str, Any] | None = field(default_factory=dict)
    # concatenate documents and cut them into rows of so many tokens. Without it every document is a row.
    pack: int | None = None
    lora: dict[str, Any] | None = None  # arguments of `peft.LoraConfig`: train an adapter on the draft


def of_command(args: SimpleNamespace) -> Recipe:
    """Read the recipe of `--config`, with the values of the other options."""
    named = {
        "target": args.target,
        "draft": args.draft,
        "dataset": dataset_of(args.data) if args.data else None,
        "training.text_column": args.column,
        "training.output_dir": args.output_dir and str(args.output_dir),
        "training.max_steps": args.max_steps,
        "training.learning_rate": args.learning_rate,
    }
    overrides = {name: value for name, value in named.items() if value is not None}
    return read_recipe(args.config, overrides | options.read_settings(args.setting, "training.seed=1"))


def dataset_of(sources: list[str]) -> dict[str, Any]:
    """Arguments of `datasets.load_dataset` for text files, for JSON lines, or for one data set or its folder.

    >>> dataset_of(["one.jsonl", "two.jsonl"])["path"], dataset_of(["org/books"])
    ('json', {'path': 'org/books', 'split': 'train'})
    """
    files = [Path(source) for source in sources]
    if len(files) == 1 and not files[0].suffix and not files[0].is_file():
        return {"path": sources[0], "split": "train"}
    if all(file.suffix in (".json", ".jsonl") for file in files):
        return {"path": "json", "data_files": sources, "split": "train"}
    for file in files:
        options.read_text(file, None)
    return {"path": "text", "data_files": sources, "sample_by": "document", "split": "train"}


def read_recipe(file: Path, overrides: dict[str, Any]) -> Recipe:
    try:
        content = yaml.load(file.read_text(encoding="utf-8"), Loader=options.YamlLoader)
    except OSError as error:
        raise CommandError(f"cannot read {str(file)!r}: {error.strerror}. Check --config.") from error
    except UnicodeDecodeError as error:
        raise CommandError(f"{str(file)!r} is not a text file. Pass a YAML recipe as --config.") from error
    except yaml.YAMLError as error:
        raise CommandError(f"{str(file)!r} is not YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(content, dict):
        raise CommandError(
            f"{str(file)!r} holds a {type(content).__name__}, expected a mapping. See recipes/ for examples."
        )
    for path, value in overrides.items():
        *folders, name = path.split(".")
        place = content
        for folder in folders:
            if place.get(folder) is None:
                place[folder] = {}
            place = place[folder]
            if not isinstance(place, dict):
                raise CommandError(f"cannot set {path}: {folder} is {place!r} in the recipe, not a mapping.")
        place[name] = value
    check_names("recipe", content, {field.name for field in fields(Recipe)})
    required = ("target", "training", "dataset")
    if missing := [name for name in required if content.get(name) is None]:
        raise CommandError(f"{str(file)!r} has no {' and no '.join(missing)}: a recipe needs {', '.join(required)}.")
    if content.get("dtype", "auto") not in list(options.DtypeName):
        raise CommandError(f"dtype: {content['dtype']!r} in the recipe: expected {', '.join(options.DtypeName)}.")
    for name in ("training", "dataset", "eval_dataset", "lora"):
        if not isinstance(content.get(name, {}), dict | None):
            raise CommandError(f"{name}: {content[name]!r} is not a mapping. Indent its keys below it.")
    recipe = Recipe(**content)
    if recipe.pack is not None and (type(recipe.pack) is not int or recipe.pack < 1):
        raise CommandError(f"pack: {recipe.pack!r} in the recipe: expected the number of tokens per row, at least 1.")
    for name, data in (("dataset", recipe.dataset), ("eval_dataset", recipe.eval_dataset)):
        check_data(name, data, recipe.pack)
    if isinstance(recipe.draft, dict) and (kind := recipe.draft.get("kind")) is not None:
        kinds = [names[0] for names in options.drafts_with("training")]
        # recipes of earlier versions have the whole `model_type`
        recipe.draft["kind"] = str(kind).removeprefix("longspec_")
        if recipe.draft["kind"] not in kinds:
            raise CommandError(f"draft.kind={kind!r}: expected one of {', '.join(kinds)}.")
    return recipe


def check_data(name: str, data: dict[str, Any] | None, pack: int | None) -> None:
    """Refuse a dataset without a source, and tokens that are missing or not packed."""
    if data is None:
        return
    if not data.keys() & {"path", "tokens"}:
        raise CommandError(f"{name} has neither path nor tokens. Set one, as in the recipes of recipes/.")
    if "tokens" not in data:
        return
    check_names(f"{name} with tokens", data, {"tokens"})
    if pack is None:
        raise CommandError(f"{name}: tokens have no documents. Set pack to the number of tokens per row.")
    for file in [data["tokens"]] if isinstance(data["tokens"], str) else data["tokens"]:
        options.require_existing("tokens of", file)


def claim_folder(recipe: Recipe, inputs: list[Any], resume: bool, overwrite: bool) -> None:
    """Refuse an output folder that holds something, unless this is to be continued or replaced."""
    if recipe.training.get("output_dir") is None:
        raise CommandError("training has no output_dir. Set it, or pass --output-dir.")
    folder = Path(recipe.training["output_dir"])
    options.require_writable_folder(folder)
    if resume and not list(folder.glob("checkpoint-*/trainer_state.json")):
        raise CommandError(f"{str(folder)!r} has no complete checkpoint to resume from: start without --resume.")
    read = [*inputs, recipe.target, recipe.draft if isinstance(recipe.draft, str) else None]
    claim([folder], read, overwrite=overwrite, resume=resume, kept=[CARD_FACTS])


def check_names(what: str, names: dict[str, Any], known: Any) -> None:
    """Refuse names that do not exist, with the nearest that does."""
    for name in names:
        if name not in known:
            near = get_close_matches(str(name), known, 1)
            choices = f"did you mean {near[0]}?" if near else f"it has {', '.join(sorted(known))}."
            raise CommandError(f"unknown key {str(name)!r} in {what}: {choices}")
