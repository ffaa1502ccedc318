"""The target as its own draft: it drafts chains by itself on a part of its cache, or with cheaper weights."""

import os
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, ClassVar, Self

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from ...generation.draft_tree import DraftTree
from ...generation.drafter import Binding, Drafter, drafted_tokens, noise_of_chain
from ...generation.target import TargetView
from ..base import DraftModel, refuse_masked
from ..configuration_base import DraftConfig
from ..settings import ACCEPTANCE, Setting
from .draft_weights import BITS, LowBitLinear, products_of, rounded_copy, state_of_weights, why_not_rounded
from .sparse_caches import budget

logger = logging.get_logger(__name__)

# Upper bound on the time per byte of keys and values, relative to that of weights. An attention kernel may reach only a
# small part of the bandwidth of matrix products, and weights may come from a cache of the processor.
KV_FACTOR = 16


class SelfDraftModel(DraftModel):
    """Draft chains with the target model itself on a part of its cache, without weights.

    Drafting steps may run with cheaper weights: those of a copy of the target, see `from_target`.
    """

    weightless: ClassVar[bool] = True
    settings: ClassVar[dict[str, Any]] = {
        "num_assistant_tokens": Setting(4, "Number of tokens drafted per verification, gamma.", int),
        "sparse_ratio": Setting(0.07, "Share of the cached prefix that a drafting step reads.", float, most=1),
        "sparse_min_tokens": Setting(256, "Least number of entries to read. Shorter prefixes are read whole.", int),
        "acceptance": ACCEPTANCE,
        "draft_weights": Setting(
            None,
            "`int4` or `int8` for the linear weights of drafting steps, except the head. `None` keeps the target's.",
            choices=tuple(BITS),
        ),
    }

    def __init__(self, config: DraftConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        # Both in tuples, as a module would become a part of the draft: a copy that the user has passed, and one that
        # was made, after the state of the target that it was made of.
        self._given: tuple[PreTrainedModel] | None = None
        self._made: tuple[Any, PreTrainedModel] | None = None
        # Rows of the batches that were drafted for, and whether steps were captured: kernels are chosen for them.
        self._occurred: set[tuple[int, bool]] = set()

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

    def weights_for(self, target: PreTrainedModel, rows: int = 1, is_captured: bool = False) -> PreTrainedModel | None:
        """Return the model that runs the drafting steps; `None` if it is the target.

        Args:
            target (`PreTrainedModel`): The target.
            rows (`int`): Rows of the batch, each of which is a vector of a drafting step.
            is_captured (`bool`): Whether steps are captured as CUDA graphs.
        """
        if self._given is not None:
            return self._given[0]
        weights = self.setting("draft_weights")
        if weights is None:
            self._made = None
            return None
        self._occurred.add((rows, is_captured))
        products = products_of(target, weights, self._occurred)
        state = weights, state_of_weights(target), products
        if self._made is None or self._made[0] != state:
            self._made = None  # its memory is free before another one is made
            self._made = state, rounded_copy(target, weights, products)
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
        if self._given is None:
            if weights is not None and self._made is None and (reason := why_not_rounded(target.model, weights)):
                raise ValueError(reason)
            return
        (copied,) = self._given
        expected, found = self.config.describe(target.model), self.config.describe(copied)
        for name, value in expected.items():
            if found[name] != value:
                raise ValueError(
                    f"draft_weights has {name}={found[name]}, and the target has {name}={value}. Pass the checkpoint "
                    "of the target with other weights."
                )
        if reasons := TargetView(copied).why_not():
            raise ValueError(f"draft_weights={type(copied).__name__} cannot draft: {'; '.join(reasons)}.")


class SelfDrafter(Drafter):
    """Draft chains on a part of the target's cache, `sparse`, with the target itself or a copy with cheaper weights.

    Subclasses set `sparse` and implement `observe`.
    """

    sparse: Any
    first_chance = 0.85
    steps_have_one_shape: bool = True
    """Whether a drafting step has the shapes of the one before, so that it may be compiled or captured."""

    def __init__(self, binding: Binding, draft: Any):
        super().__init__(binding)
        copied = draft.weights_for(binding.target.model, binding.cache.batch_size, binding.target.steps.captures)
        self.stepper = binding.target if copied is None else TargetView(copied, binding.target.steps.runner)
        self.gamma = self.max_depth = draft.setting("num_assistant_tokens")
        self.num_nodes, self.largest = self.gamma + 1, [1] * self.gamma
        self.sparse_ratio, self.sparse_min_tokens = draft.setting("sparse_ratio"), draft.setting("sparse_min_tokens")
        self._is_drawn = draft.draws_tokens and (binding.rule is None or binding.rule.takes_drawn_tokens)
        self.tells = draft.device.type == "cpu" and binding.target.steps.runner is None

    @property
    def state_bytes(self) -> int:
        return int(self.sparse.nbytes)

    def num_selected(self, length: int) -> int:
        """Return how many of `length` committed tokens a drafting step reads in a sparse layer, or fewer."""
        return budget(length, self.sparse_ratio, self.sparse_min_tokens)

    @property
    def level_cost(self) -> float:  # type: ignore[override]
        """Lower bound on the bytes that a drafting step reads, as a share of those of a plain step."""
        lengths = self.binding.cache.lengths.host
        share = sum(map(self.num_selected, lengths)) / max(1, sum(lengths))
        layers = (self.binding.cache.layers[index] for index in self.sparse.sparse_layers)
        parts = (part for layer in layers for part in (layer.keys, layer.values))
        weights, drafting = self._weight_bytes
        kv = sum(part.shape[1] * part.shape[3] * part.element_size() for part in parts) * sum(lengths) * KV_FACTOR
        return (drafting + kv * share) / (weights + kv) if weights + kv else 0.0

    @cached_property
    def _weight_bytes(self) -> tuple[int, int]:
        """Bytes of the weights that the target and a drafting step read, counted once per call."""
        return weight_bytes(self.binding.target), weight_bytes(self.stepper)

    def attention(self) -> AbstractContextManager[None]:
        return nullcontext() if self.stepper is self.binding.target else self.stepper.attention()

    def captured_chain(self, root: torch.Tensor, noise: torch.Tensor | None, with_q: bool) -> Any:
        """Return the result of `drafted_tokens` by one graph; `None` if there is none, as by default."""
        return None

    def propose(self, root: torch.Tensor) -> DraftTree:
        """Return a chain of gamma tokens after `root` `(batch,)`, drafted in one graph if that is possible."""
        rule = self.binding.rule
        self.gamma = len(self.widths_now)
        noise = noise_of_chain(self.binding, self.gamma, self._is_drawn)
        with_q = self._is_drawn and noise is not None
        drafted = self.captured_chain(root, noise, with_q)
        if drafted is None:
            after = lambda _, token: self._draft_step(token)  # noqa: E731
            drafted = drafted_tokens(rule, root, self.gamma, after, noise, with_q, self.asked)
            self.gamma = drafted[0].shape[1] - 1
        return DraftTree.chain(drafted[0], q=drafted[1])

    def _draft_step(self, token: torch.Tensor) -> torch.Tensor:
        """Run one token per row over what a drafting step reads, and return logits `(batch, vocab)`."""
        limit, is_fixed = self.binding.max_length, self.steps_have_one_shape
        logits: torch.Tensor = self.sparse.step(self.stepper, token, limit, fixed_shape=is_fixed)[0]
        self.sparse.advance()
        return logits


def weight_bytes(target: TargetView) -> int:
    """Return a lower bound on the bytes of weights that every step reads in this process.

    Only linear layers outside of experts count, since a step reads some of the experts only.
    """
    total = sum(
        (module.packed if isinstance(module, LowBitLinear) else module.weight).nbytes
        for name, module in target.model.named_modules()
        if isinstance(module, nn.Linear | LowBitLinear) and "expert" not in name
    )
    return total // (1 if target.ranks is None else target.ranks.size)
