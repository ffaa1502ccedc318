"""The YAML file that describes a training run."""

import dataclasses
import re
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ..cli import CommandError

try:
    import yaml
except ImportError as error:
    raise CommandError("recipes need PyYAML, which is not installed: pip install 'hf_longspec[train]'") from error


@dataclass
class Recipe:
    """One training run.

    Args:
        target (`str`): Hub id or folder of the target model.
        training (`dict[str, Any]`): Arguments of `DraftTrainingArguments`; `output_dir` is required.
        dataset (`dict[str, Any]`): Arguments of `datasets.load_dataset`, or `tokens`, a list of `.npy` files with
            token streams.
        eval_dataset (`dict[str, Any]`, *optional*): Likewise.
        dtype (`str`, *optional*, defaults to `"auto"`): Type of the target's weights.
        attn_implementation (`str`, *optional*): Attention of the target while training.
        draft (`str` or `dict[str, Any]`, *optional*): Hub id or folder of a draft to go on with, or settings of a new
            one, as in `from_target` of the draft's class, which `kind` names: `longspec` (the default) or `tokenswift`.
        pack (`int`, *optional*): Concatenate documents and cut them into rows of so many tokens. Without it every
            document is a row.
        lora (`dict[str, Any]`, *optional*): Arguments of `peft.LoraConfig`: train an adapter on the draft.
    """

    target: str
    training: dict[str, Any]
    dataset: dict[str, Any]
    eval_dataset: dict[str, Any] | None = None
    dtype: str = "auto"
    attn_implementation: str | None = None
    draft: str | dict[str, Any] | None = field(default_factory=dict)
    pack: int | None = None
    lora: dict[str, Any] | None = None


MAPPINGS = ("training", "dataset", "eval_dataset", "lora")


def read_recipe(file: Path, overrides: dict[str, Any]) -> Recipe:
    """The recipe in `file`.

    Args:
        file (`Path`): YAML.
        overrides (`dict[str, Any]`): Keys with other values, such as `{"training.max_steps": 10}`.

    Raises:
        CommandError: If the file cannot be read, or has keys that a recipe does not have.
    """
    try:
        content = yaml.load(file.read_text(encoding="utf-8"), Loader=_Loader)
    except OSError as error:
        raise CommandError(f"cannot read {str(file)!r}: {error.strerror}. Check --config.") from error
    except yaml.YAMLError as error:
        raise CommandError(f"{str(file)!r} is not YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(content, dict):
        raise CommandError(f"{str(file)!r} holds a {type(content).__name__}: a recipe is a mapping with a target.")
    for path, value in overrides.items():
        _override(content, path, value)
    known = {field.name: field for field in dataclasses.fields(Recipe)}
    check_names("recipe", content, known)
    required = ("target", "training", "dataset")
    if missing := [name for name in required if content.get(name) is None]:
        raise CommandError(f"{str(file)!r} has no {' and no '.join(missing)}: a recipe needs {', '.join(required)}.")
    for name in MAPPINGS:
        if not isinstance(content.get(name, {}), dict | None):
            raise CommandError(f"{name}: {content[name]!r} is no mapping: indent its keys below it.")
    return Recipe(**content)


def check_names(what: str, given: dict[str, Any], known: Any) -> None:
    """Refuse names that do not exist, with the nearest that does.

    Raises:
        CommandError: For the first such name.
    """
    for name in given:
        if name not in known:
            near = get_close_matches(str(name), known, 1)
            choices = f"did you mean {near[0]}?" if near else f"it has {', '.join(sorted(known))}."
            raise CommandError(f"unknown key {str(name)!r} in {what}: {choices}")


def parse_setting(text: str) -> tuple[str, Any]:
    """From `training.seed=1` to the key and its value, which is read as YAML.

    Raises:
        CommandError: If it has another form.

    >>> parse_setting("training.learning_rate=5e-4")
    ('training.learning_rate', 0.0005)
    """
    path, equals, value = text.partition("=")
    if not equals or not all(path.split(".")):
        raise CommandError(f"--set {text!r}: expected key=value, such as training.seed=1.")
    try:
        return path, yaml.load(value, Loader=_Loader)
    except yaml.YAMLError as error:
        raise CommandError(f"--set {text!r}: the value is not YAML; put it into quotes.") from error


def _override(content: dict[str, Any], path: str, value: Any) -> None:
    *folders, name = path.split(".")
    for folder in folders:
        if content.get(folder) is None:
            content[folder] = {}
        content = content[folder]
        if not isinstance(content, dict):
            raise CommandError(f"cannot set {path}: {folder} is {content!r} in the recipe, not a mapping.")
    content[name] = value


class _Loader(yaml.SafeLoader):
    """A YAML loader that reads 5e-4 as a number, as Python does; YAML 1.1 reads it as a text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)
