"""TokenRecyclingDraftModel."""

from typing import Any, ClassVar

from ...generation.target import TargetView
from ..base import DraftModel
from ..configuration_base import DraftConfig
from ..settings import Setting
from .generation_token_recycling import CHANCES, TokenRecyclingDrafter


class TokenRecyclingConfig(DraftConfig):
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
    drafter_class = TokenRecyclingDrafter
    weightless: ClassVar[bool] = True
    # the sizes of the paper, whose 80 nodes would fill half of a tile of 128 rows
    settings: ClassVar[dict[str, Any]] = {
        "num_nodes": Setting(64, "Number of nodes of the tree, root included.", int, least=2, most=512),
        "max_depth": Setting(6, "Depth of the deepest node.", int, most=32),
        # as many as chances are assumed for
        "num_candidates": Setting(8, "Number of candidates after each token.", int, most=len(CHANCES)),
    }

    def max_nodes(self, target: TargetView) -> int:
        return int(self.setting("num_nodes"))
