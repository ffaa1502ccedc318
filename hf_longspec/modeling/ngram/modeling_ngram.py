"""NgramDraftModel: training-free drafting from the text itself."""

from typing import Any, ClassVar

from ...generation.drafter import Binding, Drafter
from ...generation.target import TargetView
from ..base import DraftModel
from ..configuration_base import DraftConfig
from .generation_ngram import NgramDrafter
from .settings_ngram import NgramSettings


class NgramConfig(DraftConfig):
    """Configuration of [`NgramDraftModel`]: the target's shapes only, as there are no weights."""

    model_type = "longspec_ngram"


class NgramDraftModel(DraftModel):
    """Propose continuations of earlier occurrences of the last tokens, like prompt lookup decoding, for any batch size.

    The draft has no weights and runs no model, so it costs almost nothing if the text does not repeat itself.

    ```python
    draft = NgramDraftModel.from_target(target, num_assistant_tokens=8, ngram_candidates=2)
    target.generate(**inputs, assistant_model=draft)
    ```
    """

    config_class = NgramConfig
    weightless: ClassVar[bool] = True
    takes_ngrams: ClassVar[bool] = False  # its trees consist of n-grams already
    # On real text depth helps greedy decoding more than width. Sampled text seldom repeats itself. See docs/ngram.md.
    settings: ClassVar[dict[str, Any]] = {
        "num_assistant_tokens": 8,
        "ngram_candidates": 2,
        "ngram_size": 3,
        "ngram_source": "both",
        "ngram_preload": True,
    }

    def make_drafter(self, binding: Binding) -> Drafter:
        """Return a drafter with the present settings."""
        return NgramDrafter(binding, self._settings())

    def max_nodes(self, target: TargetView) -> int:
        """Return the number of nodes of a tree, root included."""
        return 1 + self._settings().num_nodes

    def check_settings(self, target: TargetView) -> None:
        """Refuse numbers out of range and unknown choices."""
        self._settings()

    def _settings(self) -> NgramSettings:
        return NgramSettings.read(self.setting, num_tokens="num_assistant_tokens", fewest=1)
