"""SelfDraftModel, the base of drafts that are the target itself on a part of its cache."""

from typing import Any, ClassVar

from ..generation.target import TargetView
from .base import DraftModel
from .settings import ACCEPTANCE, Setting


class SelfDraftModel(DraftModel):
    """Draft chains with the target model itself on a part of its cache, without weights."""

    weightless: ClassVar[bool] = True
    settings: ClassVar[dict[str, Any]] = {
        "num_assistant_tokens": Setting(4, "Number of tokens drafted per iteration (gamma).", int),
        "sparse_ratio": Setting(
            0.07, "Share of the prefix that a drafting step reads in a sparse layer.", float, most=1
        ),
        "sparse_min_tokens": Setting(256, "Minimum number of tokens to read; shorter prefixes are read whole.", int),
        "acceptance": ACCEPTANCE,
    }

    def max_nodes(self, target: TargetView) -> int:
        """Return the number of nodes of the chain, root included."""
        return int(self.setting("num_assistant_tokens")) + 1

    def check_sampling(self) -> None:
        """Refuse n-grams together with drawn tokens, as rejection sampling supports chains of drawn tokens only."""
        if self.setting("acceptance") == "rejection" and (candidates := self.setting("ngram_candidates")):
            raise ValueError(
                f"acceptance='rejection' with ngram_candidates={candidates}: when sampling, drafted tokens that are "
                "drawn from a distribution cannot share a tree with n-grams. Use acceptance='coupled', or "
                "ngram_candidates=0."
            )
