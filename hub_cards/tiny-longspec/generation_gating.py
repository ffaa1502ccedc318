# Published with a draft by hf_longspec, Apache-2.0.
"""Which gate a call gets: an open one, its own, or that of the first of several processes."""

from collections.abc import Callable, Sequence
from typing import Any

from transformers.utils import logging

from .generation_draft_tree import DraftTree
from .generation_ranks import Ranks
from .generation_rehearsal import Rehearsal
from .generation_speculation_gate import PLAIN, SpeculationGate
from .generation_stats import GateDecision, SpeculationStats

logger = logging.get_logger(__name__)

GATE_DEFAULTS: dict[str, Any] = {"gate": True}


class OpenGate:
    """Always speculates: `gate=False`, and drafts that propose nothing."""

    is_open = True
    tree = 0

    def speculates(self) -> bool:
        """Yes."""
        return True

    def rehearse(self, emitted: Sequence[Sequence[int]], propose: Callable[[], DraftTree]) -> None:
        """There are no plain steps."""

    def record(self, tokens: int, rows: int, length: int) -> GateDecision | None:
        """Nothing to measure."""
        return None


class SharedGate:
    """The gate of the first rank, for all ranks of a sharded target: their steps must be the same.

    Args:
        gate ([`SpeculationGate`]): Asked on the first rank alone.
        ranks ([`Ranks`]): All of them.
    """

    is_open = False

    def __init__(self, gate: SpeculationGate, ranks: Ranks):
        self.gate = gate
        self.ranks = ranks
        self.tree = 0

    def speculates(self) -> bool:
        """What the first rank says."""
        decides = self.ranks.rank == 0
        speculates, self.tree = self.ranks.first([decides and self.gate.speculates(), self.gate.tree])
        return bool(speculates)

    def rehearse(self, emitted: Sequence[Sequence[int]], propose: Callable[[], DraftTree]) -> None:
        """On the first rank alone."""
        if self.ranks.rank == 0:
            self.gate.rehearse(emitted, propose)

    def record(self, tokens: int, rows: int, length: int) -> GateDecision | None:
        """Take note of the step on the first rank; the others find out nothing."""
        return self.gate.record(tokens, rows, length) if self.ranks.rank == 0 else None


Gate = OpenGate | SpeculationGate | SharedGate


def gate_of(wanted: bool, drafter: Any, ranks: Ranks | None) -> Gate:
    """The gate of one call.

    Args:
        wanted (`bool`): The setting `gate`.
        drafter ([`Drafter`]): Of the call.
        ranks ([`Ranks`], *optional*): Processes that share the target. If there are others besides, as where several
            copies of a sharded target run side by side, the gate is open: this was never tried.
    """
    if not wanted or drafter.num_nodes == 1:
        return OpenGate()
    gate = SpeculationGate(drafter.trees, drafter.most_speedup, Rehearsal() if drafter.can_rehearse else None)
    if ranks is None:
        return gate
    return SharedGate(gate, ranks) if ranks.is_everyone else OpenGate()


def check_gate(value: Any) -> None:
    """Refuse a setting `gate` that is no bool.

    Raises:
        ValueError: With the value, the rule and the remedy.
    """
    if type(value) is not bool:
        raise ValueError(
            f"gate={value!r}: expected True or False. True switches speculation off while it does not pay, False "
            "always speculates."
        )


def announce(decision: GateDecision | None, draft: Any, stats: SpeculationStats) -> None:
    """Add what a gate found out to the statistics of the call; the first time that a draft does not pay, say so."""
    if decision is None:
        return
    stats.gate_decisions.append(decision)
    if decision.choice == PLAIN and not draft.was_told_of_gate:
        draft.was_told_of_gate = True
        logger.warning(warning_of(decision))


def warning_of(decision: GateDecision) -> str:
    """What a user is told when speculation is switched off."""
    against = (
        f"against {decision.plain_tokens_per_second:.3g} tokens/s without drafting, behind {decision.length} tokens"
    )
    if not decision.tau:
        return (
            f"speculation cannot pay here and is not tried for now: at most {decision.draft_tokens_per_second:.3g} "
            f"tokens/s if every draft were accepted, {against}. It is tried when that has changed."
        )
    return (
        f"speculation does not pay here and is switched off for now: {decision.draft_tokens_per_second:.3g} tokens/s "
        f"at {decision.tau:.2f} tokens per verification, {against}. It is tried again now and then. Fewer drafted "
        "tokens, a longer context or a draft that knows the text better may pay; draft.generation_config.gate = False "
        "always speculates."
    )
