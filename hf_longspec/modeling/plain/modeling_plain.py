"""PlainDraftModel: no draft, the same loop. The autoregressive baseline that every benchmark prints."""

from typing import ClassVar

from ...generation.drafter import Binding, Drafter
from ...generation.target import TargetView
from ..base import DraftModel
from .configuration_plain import PlainConfig
from .generation_plain import PlainDrafter


class PlainDraftModel(DraftModel):
    """Runs the decoding loop without drafting: one token per forward, on the same cache and kernels.

    ```python
    plain = PlainDraftModel.from_target(target)
    target.generate(**inputs, assistant_model=plain)
    ```
    """

    config_class = PlainConfig
    weightless: ClassVar[bool] = True
    takes_ngrams: ClassVar[bool] = False  # the baseline stays one token per forward

    def make_drafter(self, binding: Binding) -> Drafter:
        """A drafter that proposes the root alone."""
        return PlainDrafter(binding)

    def max_nodes(self, target: TargetView) -> int:
        """One: the root."""
        return 1
