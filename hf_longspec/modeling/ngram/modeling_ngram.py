"""NgramDraftModel: training-free drafting from the text itself."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from safetensors.torch import load_file, save_file
from transformers.utils import cached_file

from ...generation.drafter import Binding, Drafter
from ...generation.target import TargetView
from ..base import DraftModel
from ..configuration_base import DraftConfig
from ..loading import of_hub, readable_errors
from ..settings import NGRAMS, Setting
from ..shared.ngrams import SEPARATOR, NgramDrafter, TextMemory

# File of a saved draft with the texts that it remembers.
MEMORY = "memory.safetensors"


class NgramConfig(DraftConfig):
    model_type = "longspec_ngram"


class NgramDraftModel(DraftModel):
    """Propose continuations of earlier occurrences of the last tokens, like prompt lookup decoding, for any batch size.

    The draft has no weights and runs no model, so it costs almost nothing if the text does not repeat itself.

    ```python
    draft = NgramDraftModel.from_target(target, num_assistant_tokens=8, ngram_candidates=2)
    target.generate(**inputs, assistant_model=draft)
    ```

    With `ngram_memory` it also searches what earlier calls generated, and the texts that were given to `remember`.
    """

    config_class = NgramConfig
    weightless: ClassVar[bool] = True
    takes_ngrams: ClassVar[bool] = False  # its trees consist of n-grams already
    # On real text depth helps greedy decoding more than width. Sampled text seldom repeats itself
    # (docs/ngrams_and_models.md).
    settings: ClassVar[dict[str, Any]] = {
        "num_assistant_tokens": replace(NGRAMS["ngram_num_tokens"], meaning="Number of tokens of a path."),
        **{name: setting for name, setting in NGRAMS.items() if name != "ngram_num_tokens"},
        "ngram_candidates": replace(NGRAMS["ngram_candidates"], default=2, least=1, meaning="Number of paths."),
        "ngram_memory": Setting(
            0, "Number of tokens of earlier texts that are searched too; 0 for none.", int, least=0, most=2**24
        ),
    }

    def __init__(self, config: NgramConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        self._memory = TextMemory(1, 1)

    @property
    def memory(self) -> TextMemory | None:
        """The texts that are remembered; `None` without `ngram_memory`."""
        sizes = self.setting("ngram_size"), self.setting("ngram_memory")
        if not sizes[1]:
            return None
        self.declared["ngram_memory"].check("ngram_memory", sizes[1])  # tables of this size are made
        if self._memory.sizes != sizes:  # in place, as copies with settings of their own share it
            self._memory.resize(*sizes, self._memory.index.text)
        return self._memory

    def remember(self, texts: Iterable[Sequence[int] | torch.Tensor]) -> None:
        """Search these texts in later calls, as what the calls generate.

        Args:
            texts (`Iterable[Sequence[int] | torch.Tensor]`): Token ids of each text, such as
                `tokenizer(documents)["input_ids"]`.

        Raises:
            ValueError: If `ngram_memory` is 0, or something is not a token of the target. No text is remembered then.
        """
        memory, size = self.memory, self.config.vocab_size
        if memory is None:
            raise ValueError(
                "ngram_memory=0: set draft.generation_config.ngram_memory to the number of tokens to keep."
            )
        rows = [row.tolist() if isinstance(row, torch.Tensor) else list(row) for row in texts]
        for token in (token for row in rows for token in row):
            if type(token) is not int or not 0 <= token < size:
                raise ValueError(
                    f"{token!r} in texts: expected token ids below {size}, a list or tensor for each text."
                )
        memory.remember(rows)

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs: Any) -> None:
        """Write config.json, generation_config.json and, with `ngram_memory`, the remembered texts."""
        super().save_pretrained(save_directory, **kwargs)
        file = Path(save_directory) / MEMORY
        file.unlink(missing_ok=True)
        if self.memory is not None:
            save_file({"tokens": torch.tensor(self.memory.index.text, dtype=torch.int32)}, file)

    @classmethod
    def _load(cls, path: Any, *args: Any, **kwargs: Any) -> tuple[Self, dict[str, Any]]:
        """Return a saved draft with the texts that it remembered."""
        draft, info = super()._load(path, *args, **kwargs)
        hub = of_hub(kwargs) | {"_raise_exceptions_for_missing_entries": False}
        file = cached_file(path, MEMORY, **hub) if draft.setting("ngram_memory") else None
        if file is not None:
            with readable_errors(path):
                tokens = load_file(file).get("tokens", torch.empty(0))
            size = draft.config.vocab_size
            if tokens.dtype != torch.int32 or tokens.dim() != 1 or ((tokens < SEPARATOR) | (tokens >= size)).any():
                raise ValueError(f"{file} does not hold a list of token ids below {size}. Delete it, or save it again.")
            if (memory := draft.memory) is not None:
                draft._memory = TextMemory(*memory.sizes, tokens.tolist())
        return draft, info

    def make_drafter(self, binding: Binding) -> Drafter:
        return NgramDrafter(binding, self.setting, "num_assistant_tokens", self.memory)

    def max_nodes(self, target: TargetView) -> int:
        return 1 + int(self.setting("num_assistant_tokens") * self.setting("ngram_candidates"))
