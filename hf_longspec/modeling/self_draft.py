"""SelfDraftModel, the base of drafts that are the target itself on a part of its cache."""

from typing import Any, ClassVar

from ..generation.target import TargetView
from .base import DraftModel
from .tree_choices import other_trees

ACCEPTANCES = ("rejection", "coupled")


class SelfDraftModel(DraftModel):
    """Draft chains with the target model itself on a part of its cache, without weights."""

    weightless: ClassVar[bool] = True
    settings: ClassVar[dict[str, Any]] = {
        "num_assistant_tokens": 4,
        "tree_choices": None,
        "sparse_ratio": 0.07,
        "sparse_min_tokens": 256,
        "acceptance": "rejection",
    }

    def max_nodes(self, target: TargetView) -> int:
        """Return the number of nodes of the longest chain, root included."""
        return max(self.gammas()) + 1

    def gammas(self) -> list[int]:
        """Return the number of drafted tokens of all chains, the configured one first."""
        gamma = int(self.setting("num_assistant_tokens"))
        return [gamma, *other_trees(gamma, self.setting("tree_choices"), "num_assistant_tokens")]

    def check_choice(self, name: str, choices: tuple[str, ...]) -> None:
        """Refuse a setting that is none of `choices`."""
        if (value := self.setting(name)) not in choices:
            raise ValueError(f"{name}={value!r}: expected one of {', '.join(choices)}.")

    def check_number(self, name: str, least: int) -> None:
        """Refuse a setting that is no integer of at least `least`."""
        if type(value := self.setting(name)) is not int or value < least:
            raise ValueError(f"{name}={value!r}: expected an integer of at least {least}.")

    def check_settings(self, target: TargetView) -> None:
        """Refuse unknown choices and numbers out of range."""
        self.check_choice("acceptance", ACCEPTANCES)
        for name in ("num_assistant_tokens", "sparse_min_tokens"):
            self.check_number(name, 1)
        for gamma in self.gammas()[1:]:
            if type(gamma) is not int or gamma < 1:
                raise ValueError(f"tree_choices: num_assistant_tokens={gamma!r}: expected an integer of at least 1.")
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
