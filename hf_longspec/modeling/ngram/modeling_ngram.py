"""NgramDraftModel: training-free drafting from the text itself."""

from typing import Any, ClassVar

from ...generation.drafter import Binding, Drafter
from ...generation.target import TargetView
from ..base import DraftModel
from ..configuration_base import DraftConfig
from .generation_ngram import NgramDrafter
from .settings_ngram import NgramSettings

# The settings that make up a tree.
SIZES = ("num_assistant_tokens", "ngram_candidates")


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
    tree_setting: ClassVar[str] = f"[{', '.join(SIZES)}]"
    # On real text depth helps greedy decoding more than width. Sampled text seldom repeats itself. See docs/ngram.md.
    settings: ClassVar[dict[str, Any]] = {
        "num_assistant_tokens": 8,
        "ngram_candidates": 2,
        "tree_choices": None,
        "ngram_size": 3,
        "ngram_source": "both",
        "ngram_preload": True,
    }

    def make_drafter(self, binding: Binding) -> Drafter:
        """Return a drafter with the present settings."""
        return NgramDrafter(binding, self._settings())

    def max_nodes(self, target: TargetView) -> int:
        """Return the number of nodes of the largest tree, root included."""
        return 1 + max(tree.num_nodes for tree in self._settings())

    def check_settings(self, target: TargetView) -> None:
        """Refuse numbers out of range and unknown choices."""
        self._settings()

    def configured_tree(self) -> list[Any]:
        """Return length and number of the paths."""
        return [self.setting(name) for name in SIZES]

    def _settings(self) -> list[NgramSettings]:
        """Return the settings of all trees, the configured one first.

        Raises:
            ValueError: If a value is out of range, or `tree_choices` has something else than pairs.
        """
        found = []
        for sizes in self.trees():
            if not isinstance(sizes, list) or len(sizes) != len(SIZES):
                raise ValueError(
                    f"tree_choices has {sizes!r}: expected pairs of {' and '.join(SIZES)}, such as [4, 1]."
                )
            values = {name: self.setting(name) for name in self.settings} | dict(zip(SIZES, sizes, strict=True))
            found.append(NgramSettings.read(values.__getitem__, num_tokens=SIZES[0], fewest=1))
        return found
