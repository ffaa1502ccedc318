"""PlainDraftModel: the decoding loop without drafted tokens, the autoregressive baseline of every benchmark."""

from typing import Any, ClassVar

from ...generation.drafter import RootDrafter
from ...generation.target import TargetView
from ..base import DraftModel
from ..configuration_base import DraftConfig


class PlainConfig(DraftConfig):
    model_type = "longspec_plain"


class PlainDraftModel(DraftModel):
    """Run the decoding loop without drafting: one token per forward, on the same cache and kernels.

    ```python
    plain = PlainDraftModel.from_target(target)
    target.generate(**inputs, assistant_model=plain)
    ```
    """

    config_class = PlainConfig
    drafter_class = RootDrafter
    weightless: ClassVar[bool] = True
    takes_ngrams: ClassVar[bool] = False  # the baseline stays one token per forward
    settings: ClassVar[dict[str, Any]] = {"forced_tokens": 0}

    def max_nodes(self, target: TargetView) -> int:
        return 1
