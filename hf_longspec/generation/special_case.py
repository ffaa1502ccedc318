"""Seams between the core and special cases: what a special case of targets and calls can change.

Each has a file of its own in `special_cases/`, which imports the core and is imported by none of its files.
`special_cases/__init__.py` enters them in the lists below.

- A [`VerificationMode`] runs the nodes of a kind of target, if hybrid tree attention alone cannot.
- A [`SpecialCase`] gives the reasons why a call cannot use the draft, and replaces parts of the call.
- Layers and parts of a cache are in `cache.py`.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel

from .target_modules import logits_under, plain_forward


@dataclass
class LayerTraits:
    """Traits of a model's attention layers."""

    windows: tuple[int | None, ...]  # sliding window of every layer; `None` for a layer that attends to all keys
    reasons: list[str]  # reasons why a tree cannot be verified with these layers; empty if it can
    # a window that transformers' cache applies and the layers do not. After this many tokens, the text of plain
    # `generate` depends on where its prompt ended.
    forgotten_window: int | None
    # whether zeros change nothing, for every input that was tried
    ignored: dict[str, bool] = field(default_factory=dict)
    is_reached: bool = True  # whether every layer called the attention function
    counts_padding: bool = False  # whether the text of plain `generate` depends on padding


class VerificationMode:
    """How the nodes of a kind of target are verified; by default by hybrid tree attention.

    Modes are compared by identity. A target has one for all calls, as long as its config stays the same.
    """

    name = "hybrid tree attention"
    # function of [`logits_under`]'s arguments that returns the logits of nodes
    logits = staticmethod(logits_under)
    # function of [`plain_forward`]'s arguments that runs prompts, with the same result
    forward = staticmethod(plain_forward)
    # subclass of [`Prompts`], if those of a call need more
    prompts_class: Any = None
    # whether steps may be compiled, and not only captured
    compiles = True
    # A captured step reads the slots up to a power of two, or to one of this many parts of it.
    parts_of_bucket = 1
    # whether layers keep recurrent states
    has_states = False
    # last tokens of a prompt that run as a verification
    seed_tokens = 1
    # tokens per forward of prompts that run as chains
    chain_tokens = 256
    # whether one token and several may be computed by different rules, which plain `generate` tells apart
    tells_single_tokens = False
    # whether plain `generate` counts padding between tokens
    counts_columns = False
    # whether attention layers take the context of a step, which drafts need that run the target themselves
    takes_contexts = True
    # whether the first forward may get other inputs beside the tokens
    takes_inputs = True
    # whether this mode verifies models of which the trial of another one reached no layer
    takes_unreached = False

    def applies(self, target: Any) -> bool:
        """Return whether this is the mode of a [`TargetView`]; the modes before this one in `MODES` are not."""
        return True

    def is_reached(self, target: Any) -> bool:
        """Return whether all attention layers are reached."""
        return True

    def trial(self, model: PreTrainedModel, config: Any) -> LayerTraits:
        """Return the traits of the layers of a model with this text config. Called in `attention`."""
        raise NotImplementedError

    def attention(self, target: Any) -> AbstractContextManager[Any]:
        """Return the context in which nodes are verified."""
        context: AbstractContextManager[Any] = target.switched()
        return context

    def kinds(self) -> set[str]:
        """Return types of layers that this mode verifies, beside those that attend to all keys or to a window."""
        return set()

    def why_not_fixed(self, name: str) -> str | None:
        """Return with what feature of the class `name` steps cannot be compiled; `None` if they can."""
        return None

    def why_not_captured(
        self, model: PreTrainedModel, shape: tuple[int, int, int], buffers: Sequence[Any]
    ) -> str | None:
        """Return why a step of `shape` (rows, nodes, slots) runs without a graph; `None` if it is captured.

        `buffers` are keys and values of each layer, or `None`.
        """
        return None

    def why_not(self, target: Any) -> list[str]:
        """Return reasons why a target cannot be verified, as far as its class and its text config tell."""
        if target.model._can_set_attn_implementation():
            return []
        return ["its attention does not go through transformers' AttentionInterface"]

    def why_not_tried(self, target: Any) -> list[str]:
        """Return reasons that a trial found; called if there are no others."""
        reasons: list[str] = target.traits_by(self).reasons
        return reasons

    def replaced_layers(self, target: Any) -> list[Any]:
        """Return the layers whose functions a verification replaces."""
        return []

    def continues_texts(self, target: Any) -> bool:
        """Return whether a text after a cache is that of one call, in forwards of any number of tokens."""
        return True

    def padded_chain(self, tokens: torch.Tensor, size: int) -> torch.Tensor:
        """Return tokens `(B, T)` of chains, which run in forwards of `size` tokens, maybe with one more column."""
        return tokens


class SpecialCase:
    """A special case of calls. `SPECIAL_CASES` holds it by its name, which [`Call.special_cases`] mentions."""

    case: ClassVar[str]

    def why_not(self, call: Any) -> Iterator[str]:
        """Yield reasons why a [`Call`] cannot use the draft. Errors are raised before any work is done."""
        return iter(())

    def change(self, call: Any) -> None:
        """Replace parts of a [`Call`], before its prompts are read."""

    def drafter(self, inner: Any, session: Any) -> Any:
        """Return the drafter of a [`Session`], which is `inner` or a drafter around it."""
        return inner


# Verification modes, of which the first that applies is used; and special cases by the names of their cases.
MODES: list[VerificationMode] = []
SPECIAL_CASES: dict[str, Any] = {}
# Names of special cases that the loop calls itself.
GATE, FIRST_CHECKS = "the gate", "first checks"
