"""What a command decodes with: target, tokenizer and draft, loaded from the options it was given."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..generation.target import TargetView
from ..modeling.modeling_ngram import NgramDraftModel
from ..modeling.modeling_plain import PlainDraftModel
from ..modeling.modeling_specattn import SpecAttnDraftModel
from . import CommandError, models
from .options import DTYPES
from .progress import waiting

# Drafts that need no training, by the names that the command line knows. SpecAttn was renamed Vegas by its authors.
TRAINING_FREE = {
    "specattn": SpecAttnDraftModel,
    "vegas": SpecAttnDraftModel,
    "ngram": NgramDraftModel,
    "plain": PlainDraftModel,
}


@dataclass(frozen=True)
class Session:
    """A target with its tokenizer and a draft for it, ready to generate.

    Args:
        target (`str`): Hub id or folder, as it was given.
        draft_name (`str`): Likewise, or one of [`TRAINING_FREE`].
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
        """Refuse what does not fit into the positions of the target.

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
    with models.quiet(progress_bars=not Path(target).is_dir()):
        with waiting(f"Loading {target}"):
            tokenizer = models.load_tokenizer(target)
            model = models.load_target(target, kind, place)
        with waiting(f"Loading the draft {draft}"):
            loaded = open_draft(draft, model, settings)
        yield Session(target, draft, model, tokenizer, loaded, settings)


def open_draft(name: str, model: PreTrainedModel, settings: dict[str, Any]) -> Any:
    """The draft called `name` for `model`, with `settings` in place of those it comes with.

    Raises:
        CommandError: If it cannot be loaded or was made for another target.
        ValueError: If it has no such setting, or refuses its value.
    """
    known = TRAINING_FREE.get(name)
    draft = models.load_draft(name, model) if known is None else known.from_target(model)
    for key, value in settings.items():
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
    return models.DTYPES[name]
