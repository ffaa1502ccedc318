"""The drafter that hides the steps which cannot or shall not speculate from another one."""

from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from ..attention_backends.lengths import on_device
from .draft_tree import DraftTree
from .drafter import Drafter, Verification
from .stats import GateDecision


class GatedDrafter(Drafter):
    """Propose the root alone while speculation is not possible or does not pay, else the tree of another drafter.

    Plain steps are hidden from the other drafter: it neither captures nor observes them. Before it proposes again, it
    is resumed with the text so far and the verification of one more root. So the first step after a pause is plain.

    Args:
        inner ([`Drafter`]): The other drafter.
        gate ([`SpeculationGate`], *optional*): Decides step by step; without one every step may
            speculate.
        may_speculate (`Callable[[int], bool]`): Whether the target can verify a tree of this depth in the next step.
        report (`Callable[[GateDecision], None]`): Called with every new decision of the gate.
        keep (`Callable[[], None]`, *optional*): Called when the text is complete, to keep the gate for another call.
    """

    def __init__(
        self,
        inner: Drafter,
        gate: Any,
        may_speculate: Callable[[int], bool],
        report: Callable[[GateDecision], None],
        keep: Callable[[], None] = lambda: None,
    ):
        super().__init__(inner.binding)
        self.inner = inner
        self.gate = gate
        self.num_nodes, self.max_depth = inner.num_nodes, inner.max_depth
        self._may_speculate = may_speculate
        self._report = report
        self.keep = keep
        self._is_possible = self._is_open = self._was_open = True
        self._has_started = False
        self._prompts: Sequence[torch.Tensor] = ()
        self._emitted: list[array[int]] = []

    @property
    def wants_hidden(self) -> bool | tuple[int, ...]:  # type: ignore[override]
        """As the other drafter, in the steps that it observes."""
        return self._is_open and self.inner.wants_hidden

    @property
    def is_steady(self) -> bool:  # type: ignore[override]
        """False in the step that resumes the other drafter."""
        return self._was_open or not self._is_open

    @property
    def first_ngram_node(self) -> int | None:  # type: ignore[override]
        """As the other drafter."""
        return self.inner.first_ngram_node

    @property
    def seed_tokens(self) -> int:
        """As the other drafter."""
        return self.inner.seed_tokens

    @property
    def state_bytes(self) -> int:
        """Bytes of the other drafter."""
        return self.inner.state_bytes

    def watch_prefill(self, lengths: Sequence[int], starts: Sequence[int]) -> AbstractContextManager[Any]:
        """As the other drafter."""
        return self.inner.watch_prefill(lengths, starts)

    def attention(self) -> AbstractContextManager[None]:
        """As the other drafter."""
        return self.inner.attention()

    def start(self, texts: Sequence[torch.Tensor], verification: Verification) -> None:
        """Start the other drafter, if speculation is possible."""
        self._prompts, self._emitted = texts, [array("q", tokens) for tokens in verification.tokens]
        self._is_open = self._may_speculate(self.max_depth)
        if self._is_open:
            self._inform(verification)

    def propose(self, root: torch.Tensor) -> DraftTree:
        """Return the other drafter's tree, or the root alone."""
        self._was_open, self._is_possible = self._is_open, self._may_speculate(self.max_depth)
        self._is_open = self._is_possible and (self.gate is None or self.gate.speculates())
        if self.gate is not None:
            self.inner.choose(self.gate.tree)
        return self.inner.propose(root) if self._is_open and self._was_open else DraftTree.root_only(root)

    def capture(self, tree: DraftTree) -> Any:
        """Return the other drafter's capture while the gate is open."""
        return self.inner.capture(tree) if self._is_open else None

    def observe(self, verification: Verification) -> None:
        """Pass the verification on while the gate is open, and measure the step."""
        for row, new in zip(self._emitted, verification.tokens, strict=True):
            row.extend(new)
        if self._is_open:
            self._inform(verification)
        if self.gate is None or not self._is_possible:
            return
        if not self._is_open:
            self.gate.follow(verification.tokens, lambda: self._shadow(verification))
        tokens = sum(map(len, verification.tokens))
        rows = sum(map(bool, verification.tokens))
        decision = self.gate.record(tokens, rows, max(self.binding.cache.lengths.host))
        if decision is not None:
            self._report(decision)

    def _inform(self, verification: Verification) -> None:
        """Let the other drafter start, go on, or resume after plain steps."""
        if self._has_started and self._was_open:
            self.inner.observe(verification)
            return
        rows = zip(self._prompts, self._emitted, self.binding.cache.lengths.host, strict=True)
        texts = [torch.cat([prompt, prompt.new_tensor(new)])[:length] for prompt, new, length in rows]
        if self._has_started:
            self.inner.resume(texts, verification)
        else:
            self.inner.start(texts, verification)
        self._has_started = True

    def _shadow(self, verification: Verification) -> DraftTree:
        """Propose a tree after a plain step, for comparison only."""
        self._inform(verification)
        return self.inner.propose(on_device([row[-1] for row in self._emitted], verification.path.device))
