"""Drafts without weights, whose chains the target drafts by itself on a part of its cache: SpecAttn, Quest."""

import os
from typing import Any, ClassVar, Self

from transformers import PreTrainedModel
from transformers.utils import logging

from ...generation.target import TargetView
from ..base import DraftModel, refuse_masked
from ..configuration_base import DraftConfig
from ..settings import ACCEPTANCE, Setting
from .draft_weights import BITS, rounded_copy, state_of_weights, why_not_rounded

logger = logging.get_logger(__name__)


class SelfDraftModel(DraftModel):
    """Draft chains with the target model itself on a part of its cache, without weights.

    Drafting steps may run with cheaper weights: those of a copy of the target, see `from_target`.
    """

    weightless: ClassVar[bool] = True
    settings: ClassVar[dict[str, Any]] = {
        "num_assistant_tokens": Setting(4, "Number of tokens drafted per iteration (gamma).", int),
        "sparse_ratio": Setting(
            0.07, "Share of the prefix that a drafting step reads in a sparse layer.", float, most=1
        ),
        "sparse_min_tokens": Setting(256, "Minimum number of tokens to read; shorter prefixes are read whole.", int),
        "acceptance": ACCEPTANCE,
        "draft_weights": Setting(
            None,
            "Bits of the linear weights of drafting steps, but for the head; None for those of the target.",
            choices=tuple(BITS),
        ),
    }

    def __init__(self, config: DraftConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        # Both in tuples, as a module would become a part of the draft: a copy that the user has passed, and one that
        # was made, after the state of the target that it was made of.
        self._given: tuple[PreTrainedModel] | None = None
        self._made: tuple[Any, PreTrainedModel] | None = None

    @classmethod
    def from_target(
        cls, target: PreTrainedModel, draft_weights: PreTrainedModel | str | None = None, **overrides: Any
    ) -> Self:
        """Return a draft for `target`.

        Args:
            target (`PreTrainedModel`): The target.
            draft_weights (`PreTrainedModel` or `str`, *optional*): The model that runs the drafting steps, on the
                target's cache: the checkpoint of the target with cheaper weights, such as one that transformers has
                loaded with a `quantization_config`. It is not saved with the draft. With `"int8"` or `"int4"` a copy
                is made in the first call, which takes a half or a quarter of the memory of weights in bfloat16.
            overrides (`Any`): Settings by name.

        Raises:
            ValueError: If the target is not supported, a setting is unknown or the copy has other shapes.
        """
        if not isinstance(draft_weights, PreTrainedModel):
            return super().from_target(target, draft_weights=draft_weights, **overrides)
        draft = super().from_target(target, **overrides)
        draft._given = (draft_weights,)
        draft.check(TargetView(target))
        return draft

    def weights_for(self, target: PreTrainedModel) -> PreTrainedModel | None:
        """Return the model that runs the drafting steps; `None` if it is the target."""
        if self._given is not None:
            return self._given[0]
        weights = self.setting("draft_weights")
        if weights is None:
            self._made = None
            return None
        state = weights, state_of_weights(target)
        if self._made is None or self._made[0] != state:
            self._made = None  # its memory is free before another one is made
            self._made = state, rounded_copy(target, weights)
        return self._made[1]

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs: Any) -> None:
        """Write the settings. A copy of the target that was passed as `draft_weights` is not saved."""
        if self._given is not None:
            logger.warning("draft_weights is a model and not saved: pass it to from_target again.")
        super().save_pretrained(save_directory, **kwargs)

    def check_settings(self, target: TargetView) -> None:
        refuse_masked(target, type(self).__name__)
        weights = self.setting("draft_weights")
        if target.ranks is not None and (weights or self._given):
            raise ValueError("draft_weights is not supported under tensor parallelism. Set draft_weights=None.")
        if self._given is not None:
            self._check_copy(target, *self._given)
        elif weights is not None and self._made is None and (reason := why_not_rounded(target.model, weights)):
            raise ValueError(reason)

    def _check_copy(self, target: TargetView, copied: PreTrainedModel) -> None:
        expected, found = self.config.describe(target.model), self.config.describe(copied)
        for name, value in expected.items():
            if found[name] != value:
                raise ValueError(
                    f"draft_weights has {name}={found[name]}, and the target has {name}={value}. Pass the checkpoint "
                    "of the target with other weights."
                )
        if reasons := TargetView(copied).why_not():
            raise ValueError(f"draft_weights={type(copied).__name__} cannot draft: {'; '.join(reasons)}.")
