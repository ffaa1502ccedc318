"""Recipes of `hf-longspec train`: YAML files whose values options replace."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import yaml
from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassFieldValidationError

from ..cli import CommandError, one_line, options


@strict
@dataclass
class Recipe:
    """One training run."""

    target: str  # Hub id or folder of the target model
    training: dict[str, Any]  # arguments of `DraftTrainingArguments`; `output_dir` is required
    # arguments of `datasets.load_dataset`, or `tokens`, a list of `.npy` files with token streams
    dataset: dict[str, Any]
    eval_dataset: dict[str, Any] | None = None  # likewise
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # type of the target's weights
    attn_implementation: str | None = None  # attention of the target while training
    # Hub id or folder of a draft to go on with, or settings of a new one, as in `from_target` of the draft's class,
    # which `kind` names: `longspec` (the default), `tokenswift`, `eagle3`, `dflash` or `mtp`
    draft: str | dict[str, Any] | None = field(default_factory=dict)
    # concatenate documents and cut them into rows of so many tokens, or `auto`. Without it every document is a row.
    pack: int | Literal["auto"] | None = None
    lora: dict[str, Any] | None = None  # arguments of `peft.LoraConfig`: train an adapter on the draft


def recipe_of(args: SimpleNamespace) -> Recipe:
    """Read the recipe of `--config`, with the values of the other options."""
    options.require_sources(args.data or [])
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
    """Read a recipe, with other values for some of its keys, such as `training.seed`."""
    try:
        content = yaml.load(options.read_text(file, None)[1], Loader=options.YamlLoader)
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
    options.check_names("recipe", content, {field.name for field in fields(Recipe)})
    try:
        recipe = Recipe(**content)
    except (TypeError, StrictDataclassFieldValidationError) as error:  # the first if a field is missing
        raise CommandError(f"{str(file)!r}: {one_line(error)}. Correct the recipe, or the option.") from error
    if isinstance(recipe.pack, int) and recipe.pack < 1:
        raise CommandError(f"pack: {recipe.pack!r} in the recipe: expected the number of tokens per row, at least 1.")
    for name, data in (("dataset", recipe.dataset), ("eval_dataset", recipe.eval_dataset)):
        check_data(name, data, recipe.pack)
    return recipe


def check_data(name: str, data: dict[str, Any] | None, pack: int | str | None) -> None:
    """Refuse a dataset without a source, and tokens that are missing or not packed."""
    if data is None:
        return
    if not data.keys() & {"path", "tokens"}:
        raise CommandError(f"{name} has neither path nor tokens. Set one, as in the recipes of recipes/.")
    if "tokens" not in data:
        return
    options.check_names(f"{name} with tokens", data, {"tokens"})
    if pack is None:
        raise CommandError(f"{name}: tokens have no documents. Set pack to the number of tokens per row.")
    for file in [data["tokens"]] if isinstance(data["tokens"], str) else data["tokens"]:
        options.require_existing("tokens of", file)
