"""TokenRecyclingDraftModel: training-free drafting from the target's own candidates."""

from typing import Any, ClassVar

from ...generation.drafter import Binding, Drafter
from ...generation.target import TargetView
from ..base import DraftModel
from ..configuration_base import DraftConfig
from ..setting_checks import check_integer
from .generation_token_recycling import TokenRecyclingDrafter

# Smallest and largest value of each setting. Chances are assumed for the first 16 candidates.
RANGES = {"num_nodes": (2, 512), "max_depth": (1, 32), "num_candidates": (1, 16)}


class TokenRecyclingConfig(DraftConfig):
    """Configuration of [`TokenRecyclingDraftModel`]: the target's shapes only, as there are no weights."""

    model_type = "longspec_token_recycling"


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
    }

    def make_drafter(self, binding: Binding) -> Drafter:
        """Return a drafter with the present settings."""
        return TokenRecyclingDrafter(binding, *map(self.setting, RANGES))

    def max_nodes(self, target: TargetView) -> int:
        """Return the number of nodes of a tree, root included."""
        return int(self.setting("num_nodes"))

    def check_settings(self, target: TargetView) -> None:
        """Refuse numbers out of range."""
        for name, (least, most) in RANGES.items():
            check_integer(name, self.setting(name), least, most)
