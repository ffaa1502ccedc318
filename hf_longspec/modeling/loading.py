"""Loading of drafts: settings, weights, and readable errors for missing, truncated or unknown files."""

import json
import pickle
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from transformers import GenerationConfig, PreTrainedModel

from .saved_config import UNEXPECTED, described, read_config, readable, shortened

# Arguments of `from_pretrained` that determine the source of files.
HUB_KWARGS = {"revision", "cache_dir", "token", "local_files_only", "subfolder", "force_download", "proxies"}


def of_hub(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments among `kwargs` that determine the source of files."""
    return {name: value for name, value in kwargs.items() if name in HUB_KWARGS}


@contextmanager
def readable_errors(path: Any) -> Iterator[None]:
    """Replace errors of loading weights by errors with the folder and the remedy."""
    try:
        yield
    except SafetensorError as error:
        raise OSError(
            f"the weights in {path} cannot be read ({error}): the file is truncated or is not a safetensors file. "
            "Download or save the draft again."
        ) from error
    except UNEXPECTED as error:
        if type(error) is ValueError:
            raise
        raise OSError(
            f"{path} cannot be loaded ({described(error)}): config.json, the weights or their index, "
            "model.safetensors.index.json, are damaged. Download or save it again."
        ) from error
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        raise ValueError(
            f"the weights in {path} do not have the shapes of its config.json. Use files that were saved together."
        ) from error


def refuse_missing_weights(model: PreTrainedModel, info: Mapping[str, Any]) -> None:
    """Refuse weights of another architecture: transformers initialises missing weights at random and continues."""
    for kind in ("missing", "mismatched"):
        if names := sorted(map(str, info.get(f"{kind}_keys") or ())):
            raise ValueError(
                f"model_type={model.config.model_type!r} in config.json: {len(names)} weights of "
                f"{type(model).__name__} are {kind}, for example {names[0]}, and would be random. Use files that were "
                "saved together."
            )


def read_settings(draft: Any, path: Any, **hub: Any) -> None:
    """Set the settings of a draft to the saved ones, with defaults for missing settings."""
    try:
        with readable(f"generation_config.json of {path}"):
            draft.generation_config = GenerationConfig.from_pretrained(path, **hub)
    except OSError as error:
        if isinstance(error.__context__, json.JSONDecodeError | UnicodeDecodeError):
            raise  # otherwise there is no such file
    for name, value in draft.initial_settings().items():
        if not hasattr(draft.generation_config, name):  # published before the setting existed
            setattr(draft.generation_config, name, value)


_SNAPSHOT_KWARGS = HUB_KWARGS - {"subfolder", "proxies"}

# In order of preference.
WEIGHT_FILES = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
    "draft_model_weights.pth",
)


# What torch, safetensors and json raise for damaged files.
UNREADABLE = SafetensorError, RuntimeError, pickle.UnpicklingError, EOFError, ValueError, LookupError, TypeError


class Checkpoint:
    """Tensors of a checkpoint by name.

    Shards without a requested tensor are neither opened nor downloaded. `formats` are the names of weight files to look
    for, in order of preference.
    """

    def __init__(self, source: str, formats: Sequence[str] = WEIGHT_FILES, **hub: Any):
        self.source, self._formats = source, formats
        self._hub = {name: value for name, value in hub.items() if name in _SNAPSHOT_KWARGS}
        path = Path(source)
        self._on_hub = not path.exists()
        self._folder = path.parent if path.is_file() else path
        name = path.name if path.is_file() else self._find()
        index = self._folder / name
        with _readable(index):
            if name.endswith(".index.json"):
                self._files: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
                if not isinstance(self._files, dict):
                    raise TypeError(f"weight_map is {shortened(self._files)}")
                kind = ".safetensors" if "safetensors" in name else ""
                files = {str(file) for file in self._files.values() if not _is_plain_name(file, kind)}
                outside = sorted(files)
            else:
                self._files, outside = dict.fromkeys(_names(index), name), []
        if outside:
            raise ValueError(
                f"{index} refers to {outside}: expected names of files in the same folder. Do not use this checkpoint, "
                "or correct the index."
            )
        self.names = sorted(self._files)

    def read_config(self) -> dict[str, Any]:
        return read_config(self.source if self._on_hub else str(self._folder), **self._hub)

    def read(self, prefix: str | tuple[str, ...] = "", device: str = "cpu") -> dict[str, torch.Tensor]:
        """Return the tensors whose names begin with a prefix; on the device `"meta"` their shapes alone."""
        file_of = {name: file for name, file in self._files.items() if name.startswith(prefix)}
        files = sorted(set(file_of.values()))
        if self._on_hub:
            self._fetch(files)
        tensors: dict[str, torch.Tensor] = {}
        for file in files:
            with _readable(self._folder / file):
                tensors |= _tensors(self._folder / file, [name for name in file_of if file_of[name] == file], device)
        return tensors

    def tensors(
        self,
        names: Mapping[str, str],
        expected: Mapping[str, torch.Tensor],
        what: str,
        finished: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] = dict,
    ) -> dict[str, torch.Tensor]:
        """Return the tensors of a module.

        Other names or shapes than expected are refused before a tensor is read.

        Args:
            names (`Mapping[str, str]`): Name in the module of each tensor that is used, by that in the checkpoint.
            expected (`Mapping[str, torch.Tensor]`): Tensors with the expected names and shapes.
            what (`str`): What the module is, for messages.
            finished (`Callable`, *optional*): Makes the module's tensors of those that were read or of their shapes.
        """

        def read(device: str) -> dict[str, torch.Tensor]:
            found = self.read(tuple(names), device)
            return finished({names[name]: value for name, value in found.items() if name in names})

        shapes = {name: value.shape for name, value in read("meta").items()}
        missing, unknown = sorted(expected.keys() - shapes.keys()), sorted(shapes.keys() - expected.keys())
        if missing or unknown:
            raise ValueError(
                f"{self.source} has no {what}: missing tensors {missing}, unknown tensors {unknown}. Pass a checkpoint "
                "in the format of the authors' training code, without quantization."
            )
        for name, shape in shapes.items():
            if shape != expected[name].shape:
                raise ValueError(
                    f"{name} has shape {tuple(shape)} in {self.source}, expected {tuple(expected[name].shape)}. Pass "
                    "the target that the draft was trained for, and use files that were saved together."
                )
        weights = read("cpu")
        for name, value in weights.items():
            if expected[name].is_floating_point() and not value.is_floating_point():
                raise ValueError(
                    f"{name} has type {value.dtype} in {self.source}, expected floating point. Quantized weights are "
                    "not supported: pass a checkpoint without quantization."
                )
        return weights

    def _find(self) -> str:
        """Return the name of the preferred weight file. Indices are tried first, to download only needed shards."""
        for patterns in ([name for name in self._formats if name.endswith(".json")], self._formats):
            if self._on_hub:
                self._fetch(patterns)
            if files := [name for name in self._formats if (self._folder / name).exists()]:
                return files[0]
        raise ValueError(f"{self.source} contains no weights: expected one of {', '.join(self._formats)}.")

    def _fetch(self, files: Iterable[str]) -> None:
        self._folder = Path(snapshot_download(self.source, allow_patterns=list(files), **self._hub))


def _is_plain_name(file: Any, ending: str = "") -> bool:
    """Return whether a file name has an ending and contains no folder, on any operating system."""
    if not isinstance(file, str) or not file.endswith(ending):
        return False
    return file not in ("", ".", "..") and not set(file) & {"/", "\\", ":"}


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Replace errors of torch, safetensors and json by a ValueError with the file and the remedy."""
    try:
        yield
    except UNREADABLE as error:
        # torch's message about a pickle is an advice to run it
        fact = "UnpicklingError" if isinstance(error, pickle.UnpicklingError) else described(error)
        raise ValueError(
            f"{path} cannot be read ({fact}): the file is truncated or holds no named tensors. Download it again, or "
            "pass a checkpoint in the format of the authors' training code."
        ) from error


def _names(path: Path) -> list[str]:
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    return list(_load(path))


def _tensors(path: Path, names: list[str], device: str) -> dict[str, torch.Tensor]:
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as file:
            if device == "meta":
                return {name: torch.empty(file.get_slice(name).get_shape(), device=device) for name in names}
            return {name: file.get_tensor(name) for name in names}
    weights = _load(path)
    return {name: weights[name].to(device) for name in names}


def _load(path: Path) -> dict[str, torch.Tensor]:
    # Memory-mapped, so that tensors that are not requested are not read. Files of old torch versions cannot be mapped.
    mapped = zipfile.is_zipfile(path)
    weights = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    if not isinstance(weights, dict):
        raise TypeError(f"expected named tensors, found {type(weights).__name__}")
    return {name: weight for name, weight in weights.items() if isinstance(weight, torch.Tensor)}
