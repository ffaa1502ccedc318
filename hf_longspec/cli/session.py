"""A target, its tokenizer and a draft, found and loaded from the options of a command, with errors of one line."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.utils import logging

from ..cli import CommandError, first_line
from ..generation.target import TargetView
from ..modeling.register_draft import weightless_drafts
from .options import DTYPES
from .output import waiting

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TINY_TARGET = Path(__file__).resolve().parents[2] / "hub_cards" / "tiny-target"
# Trained for the tiny target.
TINY_DRAFTS = [TINY_TARGET.with_name(name) for name in ("tiny-tokenswift", "tiny-longspec")]


def find_target(name: str | None) -> str:
    """The folder or Hub id to load: `name`, or the tiny target that comes with the repository.

    Raises:
        CommandError: If there is no name and no tiny target.
    """
    if name is not None:
        return name
    if not (TINY_TARGET / "config.json").is_file():
        raise CommandError(
            f"the tiny target is not at {TINY_TARGET}: run this in a checkout of the repository, or pass --target with "
            "a Hub id or a folder."
        )
    return str(TINY_TARGET)


def load_tokenizer(target: str) -> Any:
    """The tokenizer of `target`.

    Raises:
        CommandError: If it cannot be loaded.
    """
    with loading(target, "tokenizer"):
        return AutoTokenizer.from_pretrained(target)


def max_positions(target: str) -> int:
    """Tokens that `target` has positions for; practically unlimited if its configuration names no limit.

    Raises:
        CommandError: If the configuration cannot be loaded.
    """
    with loading(target, "configuration"):
        config = AutoConfig.from_pretrained(target).get_text_config(decoder=True)
    return getattr(config, "max_position_embeddings", None) or sys.maxsize


def load_target(target: str, dtype: torch.dtype, device: torch.device | None = None) -> PreTrainedModel:
    """The model in eval mode on `device`, by default the first GPU, or the CPU.

    Raises:
        CommandError: If it cannot be loaded, or cannot be decoded speculatively.
    """
    with loading(target, "model"):
        model, info = AutoModelForCausalLM.from_pretrained(target, dtype=dtype, output_loading_info=True)
        _refuse_other_weights(model, info)
    if reasons := TargetView(model).why_not():
        raise CommandError(f"{target} cannot be used: {'; '.join(reasons)}. Pass another --target.")
    # Token ids only: penalties and temperatures of a repository's own settings would change the text of greedy
    # decoding.
    own = model.generation_config
    model.generation_config = GenerationConfig(
        bos_token_id=own.bos_token_id, eos_token_id=own.eos_token_id, pad_token_id=own.pad_token_id
    )
    return model.to(device or ("cuda" if torch.cuda.is_available() else "cpu")).eval()


def load_draft(name: str, model: PreTrainedModel) -> Any:
    """A published draft for `model`.

    Raises:
        CommandError: If it cannot be loaded, is no draft, or was made for another target.
    """
    with loading(name, "draft"):
        draft, info = AutoModel.from_pretrained(name, dtype=model.dtype, output_loading_info=True)
        if not getattr(draft, "_is_longspec_draft", False):
            raise ValueError(f"it is a {type(draft).__name__}, not a draft")
        _refuse_other_weights(draft, info)
        draft.check(TargetView(model))
    return draft


def _refuse_other_weights(model: PreTrainedModel, info: dict[str, Any]) -> None:
    """Refuse weights of another architecture: transformers initialises missing weights at random and continues."""
    label = f"config.json says model_type={model.config.model_type!r}"
    for kind in ("missing", "mismatched"):
        if names := sorted(map(str, info.get(f"{kind}_keys") or ())):
            raise ValueError(
                f"{label}, and of the weights of a {type(model).__name__} {len(names)} are {kind} in its files, "
                f"{names[0]} for one"
            )
    if names := sorted(info.get("unexpected_keys") or ()):
        print(f"note: {label}, which has no use for {len(names)} weights, {names[0]} for one.", file=sys.stderr)


@contextmanager
def loading(name: str, what: str) -> Iterator[None]:
    """Turn every error while loading into one line; each format and architecture raises its own."""
    if not Path(name).exists() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise CommandError(f"cannot load the {what} of {name!r}: there is no such folder. Check the path.")
    try:
        yield
    except CommandError:
        raise
    except Exception as error:
        reason = first_line(error)
        remedy = (
            "Check its files" if Path(name).is_dir() else "Check the name; offline, only what is cached can be loaded"
        )
        raise CommandError(f"cannot load the {what} of {name!r}: {reason.rstrip('.')}. {remedy}.") from error


@contextmanager
def quiet(progress_bars: bool) -> Iterator[None]:
    """Silence the warnings of transformers, and its progress bars unless something may be downloaded."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    if not progress_bars:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def describe_device(device: torch.device) -> str:
    """Name of the device and what matters for speed."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"CPU ({torch.backends.cpu.get_cpu_capability()}, {threads} thread{'s' if threads > 1 else ''})"


@dataclass(frozen=True)
class Session:
    """A target with its tokenizer and a draft for it, ready to generate.

    Args:
        target (`str`): Hub id or folder, as it was given.
        draft_name (`str`): Likewise, or one of [`weightless_drafts`].
        model (`PreTrainedModel`): The target.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        draft (`DraftModel`): The draft.
        settings (`dict[str, Any]`): Those of its settings that were given with `--set`.
    """

    target: str
    draft_name: str
    model: PreTrainedModel
    tokenizer: Any
    draft: Any
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def dtype(self) -> str:
        """Name of the target's type."""
        return str(self.model.dtype).removeprefix("torch.")

    def encode(self, name: str, text: str) -> torch.Tensor:
        """Token ids `(1, length)` of a prompt, on the device of the target.

        Raises:
            CommandError: If there are none.
        """
        # verbose=False: what is too long is refused by the caller, or cut
        ids = list(self.tokenizer(text, verbose=False)["input_ids"])
        if not ids:
            raise CommandError(f"{name} has no tokens under the tokenizer of {self.target}. Pass another text.")
        return torch.tensor([ids], device=self.model.device)

    def require_room(self, name: str, prompt_tokens: int, new_tokens: int) -> None:
        """Refuse a prompt that does not fit into the positions of the target.

        Raises:
            CommandError: With both numbers.
        """
        limit = getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        if limit is not None and prompt_tokens + new_tokens > limit:
            raise CommandError(
                f"{name} has {prompt_tokens} tokens, which with {new_tokens} new ones exceed the {limit} positions of "
                "the model. Pass a shorter text, or fewer --max-new-tokens."
            )


@contextmanager
def opened(
    target: str, draft: str, settings: dict[str, Any], dtype: str = "auto", device: str | None = None
) -> Iterator[Session]:
    """Load everything, under a spinner, with the warnings of transformers off.

    Raises:
        CommandError: If something cannot be found or loaded, or does not go together.
        ValueError: If the draft has no such setting, or refuses its value.
    """
    place = _device(device)
    kind = _dtype(dtype, place)
    with quiet(progress_bars=not Path(target).is_dir()):
        with waiting(f"Loading {target}"):
            tokenizer = load_tokenizer(target)
            model = load_target(target, kind, place)
        with waiting(f"Loading the draft {draft}"):
            loaded = open_draft(draft, model, settings)
        yield Session(target, draft, model, tokenizer, loaded, settings)


def open_draft(name: str, model: PreTrainedModel, settings: dict[str, Any] | None = None) -> Any:
    """The draft called `name` for `model`, with `settings` in place of those it comes with.

    Raises:
        CommandError: If it cannot be loaded or was made for another target.
        ValueError: If it has no such setting, or refuses its value.
    """
    known = weightless_drafts().get(name)
    draft = load_draft(name, model) if known is None else known.from_target(model)
    for key, value in (settings or {}).items():
        if key not in draft.settings:
            had = ", ".join(sorted(draft.settings)) or "none"
            raise ValueError(f"--set {key}: the draft {name} has no such setting; it has {had}.")
        setattr(draft.generation_config, key, value)
    draft.check(TargetView(model))
    return draft


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise CommandError(f"--device {name}: PyTorch has no such device here. Pass cpu, or leave it out.") from error
    return device


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name not in DTYPES:
        raise CommandError(f"--dtype {name}: expected one of {', '.join(DTYPES)}.")
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return TORCH_DTYPES[name]
