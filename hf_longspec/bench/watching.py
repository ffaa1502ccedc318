"""Looking into the calls of a draft from outside: every drafter that it makes is shown to somebody."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# Given a new drafter and what it is bound to; may replace methods of both, which live for one call.
Watch = Callable[[Any, Any], None]


@contextmanager
def watched_drafters(draft: Any, watch: Watch) -> Iterator[None]:
    """Let `watch(drafter, binding)` see every drafter that `draft` makes while the context is open; may be nested."""
    make, held = draft.drafter, vars(draft).get("drafter")

    def watched(binding: Any) -> Any:
        drafter = make(binding)
        watch(drafter, binding)
        return drafter

    draft.drafter = watched
    try:
        yield
    finally:
        if held is None:
            del draft.drafter
        else:
            draft.drafter = held


class AcceptedDepths:
    """How deep every verification was accepted, also the last of a row, which is cut at the token limit.

    Attributes:
        histogram (`list[int]`): Entry k counts the verifications, row by row, that accepted k drafted tokens.
    """

    def __init__(self) -> None:
        self.histogram: list[int] = []

    @contextmanager
    def of(self, draft: Any) -> Iterator["AcceptedDepths"]:
        """Count while the context is open."""
        with watched_drafters(draft, self._watch):
            yield self

    def _watch(self, drafter: Any, binding: Any) -> None:
        sequences = binding.rule.sequences
        append, calls = sequences.append, 0

        def counting_append(chosen: list[list[int]], scores: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > 1:  # the first comes from the prompt
                for tokens, done in zip(chosen, sequences.done, strict=True):
                    if not done:
                        self.histogram += [0] * (len(tokens) - len(self.histogram))
                        self.histogram[len(tokens) - 1] += 1
            return append(chosen, scores)

        sequences.append = counting_append
