"""NgramDraftModel: training-free drafting from the text itself."""

from typing import Any, ClassVar

from ..generation.drafters.base import Binding, Drafter
from ..generation.drafters.ngram import NgramDrafter
from ..generation.ngram_settings import NgramSettings
from ..generation.target import TargetView
from .base import DraftModel
from .configuration_ngram import NgramConfig


class NgramDraftModel(DraftModel):
    """Proposes what followed the last tokens earlier in the same text: a better prompt lookup, for any batch.

    Has no weights and runs no model, so it costs next to nothing where the text does not repeat itself.

    ```python
    draft = NgramDraftModel.from_target(target, num_assistant_tokens=8, ngram_candidates=2)
    target.generate(**inputs, assistant_model=draft)
    ```
    """

    config_class = NgramConfig
    weightless: ClassVar[bool] = True
    takes_ngrams: ClassVar[bool] = False  # they are all it has
    # On real text, greedily, depth is worth more than width; sampled text seldom repeats either way: docs/ngram.md.
    settings: ClassVar[dict[str, Any]] = {
        "num_assistant_tokens": 8,
        "ngram_candidates": 2,
        "ngram_size": 3,
        "ngram_source": "both",
        "ngram_preload": True,
    }

    def make_drafter(self, binding: Binding) -> Drafter:
        """A drafter with the present settings."""
        return NgramDrafter(binding, self._ngrams())

    def max_nodes(self, target: TargetView) -> int:
        """Root and all paths."""
        return 1 + self._ngrams().num_nodes

    def check_settings(self, target: TargetView) -> None:
        """Refuse numbers out of range and unknown choices."""
        self._ngrams()

    def _ngrams(self) -> NgramSettings:
        return NgramSettings.read(self.setting, num_tokens="num_assistant_tokens", fewest=1)
