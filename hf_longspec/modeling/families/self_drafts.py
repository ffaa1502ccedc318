"""Drafts without weights, whose chains the target drafts by itself on a part of its cache: SpecAttn, Quest."""

from typing import Any, ClassVar

from ...generation.target import TargetView
from ..base import DraftModel, refuse_masked
from ..settings import ACCEPTANCE, Setting


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

    def check_settings(self, target: TargetView) -> None:
        refuse_masked(target, type(self).__name__)
