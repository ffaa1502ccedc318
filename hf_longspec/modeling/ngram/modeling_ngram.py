"""NgramDraftModel: training-free drafting from the text itself."""

from typing import Any, ClassVar

from ...generation.drafter import Binding, Drafter
from ...generation.target import TargetView
from ..base import DraftModel
from ..tree_choices import other_trees
from .configuration_ngram import NgramConfig
from .generation_ngram import NgramDrafter
from .settings_ngram import NgramSettings


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
        "tree_choices": None,
        "ngram_size": 3,
        "ngram_source": "both",
        "ngram_preload": True,
    }

    def make_drafter(self, binding: Binding) -> Drafter:
        """Return a drafter with the present settings."""
        configured, *others = self._trees()
        return NgramDrafter(binding, configured, others)

    def max_nodes(self, target: TargetView) -> int:
        """Return the number of nodes of the largest tree, root included."""
        return 1 + max(tree.num_nodes for tree in self._trees())

    def check_settings(self, target: TargetView) -> None:
        """Refuse numbers out of range and unknown choices."""
        self._trees()

    def _trees(self) -> list[NgramSettings]:
        """Return the settings of all trees, the configured one first."""
        names = "num_assistant_tokens", "ngram_candidates"
        configured = [self.setting(name) for name in names]
        others = other_trees(configured, self.setting("tree_choices"), "[num_assistant_tokens, ngram_candidates]")
        return [self._ngrams({}), *(self._ngrams(_named(names, sizes)) for sizes in others)]

    def _ngrams(self, sizes: dict[str, Any]) -> NgramSettings:
        """Return the settings, with those in `sizes` replaced."""
        read = lambda name: sizes[name] if name in sizes else self.setting(name)  # noqa: E731
        return NgramSettings.read(read, num_tokens="num_assistant_tokens", fewest=1)


def _named(names: tuple[str, str], sizes: Any) -> dict[str, Any]:
    if not isinstance(sizes, list) or len(sizes) != len(names):
        raise ValueError(f"tree_choices has {sizes!r}: expected pairs of {' and '.join(names)}, such as [4, 1].")
    return dict(zip(names, sizes, strict=True))
