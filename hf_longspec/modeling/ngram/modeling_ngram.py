"""NgramDraftModel: training-free drafting from the text itself."""

from dataclasses import replace
from typing import Any, ClassVar

from ...generation.drafter import Binding, Drafter
from ...generation.target import TargetView
from ..base import DraftModel
from ..configuration_base import DraftConfig
from ..settings import NGRAMS
from .generation_ngram import NgramDrafter


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
        "num_assistant_tokens": replace(NGRAMS["ngram_num_tokens"], default=8),
        **{name: setting for name, setting in NGRAMS.items() if name != "ngram_num_tokens"},
        "ngram_candidates": replace(NGRAMS["ngram_candidates"], default=2, least=1),
    }

    def make_drafter(self, binding: Binding) -> Drafter:
        """Return a drafter with the present settings."""
        return NgramDrafter(binding, self.setting, "num_assistant_tokens")

    def max_nodes(self, target: TargetView) -> int:
        """Return the number of nodes of a tree, root included."""
        return 1 + int(self.setting("num_assistant_tokens") * self.setting("ngram_candidates"))
