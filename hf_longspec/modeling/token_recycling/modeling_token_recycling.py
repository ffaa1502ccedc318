"""TokenRecyclingDraftModel: training-free drafting from the target's own candidates."""

from typing import Any, ClassVar

from ...generation.drafter import Binding, Drafter
from ...generation.target import TargetView
from ..base import DraftModel
from ..tree_choices import other_trees
from .configuration_token_recycling import TokenRecyclingConfig
from .generation_token_recycling import TokenRecyclingDrafter

# Smallest and largest value of each setting. Chances are assumed for the first 16 candidates.
RANGES = {"num_nodes": (2, 512), "max_depth": (1, 32), "num_candidates": (1, 16)}


class TokenRecyclingDraftModel(DraftModel):
    """Propose what the target itself ranked highest after earlier occurrences of each token.

    The draft has no weights and runs no model. It works with every target.

    ```python
    draft = TokenRecyclingDraftModel.from_target(target)
    target.generate(**inputs, assistant_model=draft)
    ```

    Source: https://huggingface.co/papers/2408.08696.
    """

    config_class = TokenRecyclingConfig
    weightless: ClassVar[bool] = True
    # the sizes of the paper, whose 80 nodes would fill half of a tile of 128 rows
    settings: ClassVar[dict[str, Any]] = {
        "num_nodes": 64,
        "max_depth": 6,
        "num_candidates": 8,
        "tree_choices": None,
    }

    def make_drafter(self, binding: Binding) -> Drafter:
        """Return a drafter with the present settings."""
        return TokenRecyclingDrafter(binding, self._sizes(), self.setting("max_depth"), self.setting("num_candidates"))

    def max_nodes(self, target: TargetView) -> int:
        """Return the number of nodes of the largest tree, root included."""
        return max(self._sizes())

    def _sizes(self) -> list[int]:
        """Return the numbers of nodes of all trees, the configured one first."""
        nodes = self.setting("num_nodes")
        return [nodes, *other_trees(nodes, self.setting("tree_choices"), "num_nodes")]

    def check_settings(self, target: TargetView) -> None:
        """Refuse numbers out of range."""
        for name, value in (
            *((name, self.setting(name)) for name in RANGES),
            *(("num_nodes", n) for n in self._sizes()),
        ):
            least, most = RANGES[name]
            if type(value) is not int or not least <= value <= most:
                raise ValueError(f"{name}={value!r}: expected an integer from {least} to {most}.")
