"""SelfDraftModel, the base of drafts that are the target itself on a part of its cache."""

from typing import Any, ClassVar

from ..generation.target import TargetView
from .base import DraftModel
from .setting_checks import check_choice, check_integer

ACCEPTANCES = ("rejection", "coupled")


class SelfDraftModel(DraftModel):
    """Draft chains with the target model itself on a part of its cache, without weights.

    Settings:
        num_assistant_tokens (`int`): Number of tokens drafted per iteration (gamma).
        sparse_ratio (`float`): Share of the prefix that a drafting step reads in a sparse layer.
        sparse_min_tokens (`int`): Minimum number of tokens to read. Shorter prefixes are read as a whole.
        acceptance (`str`): When sampling, `rejection` or `coupled`.
    """

    weightless: ClassVar[bool] = True
    settings: ClassVar[dict[str, Any]] = {
        "num_assistant_tokens": 4,
        "sparse_ratio": 0.07,
        "sparse_min_tokens": 256,
        "acceptance": "rejection",
    }

    def max_nodes(self, target: TargetView) -> int:
        """Return the number of nodes of the chain, root included."""
        return int(self.setting("num_assistant_tokens")) + 1

    def check_settings(self, target: TargetView) -> None:
        """Refuse unknown choices and numbers out of range."""
        check_choice("acceptance", self.setting("acceptance"), ACCEPTANCES)
        for name in ("num_assistant_tokens", "sparse_min_tokens"):
            check_integer(name, self.setting(name), 1)
        if not isinstance(ratio := self.setting("sparse_ratio"), int | float) or not 0 < ratio <= 1:
            raise ValueError(f"sparse_ratio={ratio!r}: expected a number in (0, 1].")

    def check_sampling(self) -> None:
        """Refuse n-grams together with drawn tokens, as rejection sampling supports chains of drawn tokens only."""
        if self.setting("acceptance") == "rejection" and (candidates := self.setting("ngram_candidates")):
            raise ValueError(
                f"acceptance='rejection' with ngram_candidates={candidates}: when sampling, drafted tokens that are "
                "drawn from a distribution cannot share a tree with n-grams. Use acceptance='coupled', or "
                "ngram_candidates=0."
            )
