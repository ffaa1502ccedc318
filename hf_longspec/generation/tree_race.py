"""Which of several trees speculation takes: the one that gives the most tokens per second, as far as trying may tell.

All trees have fixed sizes. A large one emits more per verification and costs more; which is better depends on the
machine, the batch, the length and the text. So they are measured, like speculation itself, and against the same kind of
limit: steps with another tree than the fastest one may lose a share of the time, `TREE_SHARE`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from .drafters.base import TreeShape
from .pace import TOKENS_WINDOW, Pace

# Fewest steps that can refute something.
FEWEST = 2
# Steps of which two may be outliers.
SAMPLES = 3
# Steps that confirm that something pays.
CONFIRMING = 16
# Time that may be lost to trying trees beside the fastest one.
TREE_SHARE = 0.005
# By how much another tree has to be faster, standard errors apart, to replace the fastest one.
MARGIN = 1.02
# Trees are compared anew when the longest prefix has grown by this factor.
GROWTH = 1.25
# Plain steps that trying one tree after another may cost, where the first one does not pay.
ATTEMPT = 20


@dataclass
class Contender:
    """One of the trees.

    Args:
        shape ([`TreeShape`]): Its name and sizes.
        pace ([`Pace`]): Of steps that verified it.
        ran (`bool`): Whether it ran in the present phase; its first step may compile or fill caches.
        refuted (`bool`): Whether it does not pay, as far as this attempt has found out.
        confirmed (`bool`): Whether it has paid in this attempt.
        closed_until (`float`): Length of the longest row from which on it is compared with the fastest one again.
        seconds (`float`, *optional*): What a step took when it was last measured.
    """

    shape: TreeShape
    pace: Pace = field(default_factory=Pace)
    ran: bool = False
    refuted: bool = False
    confirmed: bool = False
    closed_until: float = 0.0
    seconds: float | None = None

    @property
    def most_tokens(self) -> int:
        """Tokens that a step emits per row if everything is accepted."""
        return self.shape.max_depth + 1


class TreeRace:
    """Measures trees, and chooses the one of the next step that speculates.

    Args:
        shapes (`Sequence[TreeShape]`): All of them, the one to begin with first.

    Attributes:
        tree (`int`): Of the next step.
        best (`int`): The one that is taken while no other is tried.
    """

    def __init__(self, shapes: Sequence[TreeShape]):
        self.contenders = [Contender(shape) for shape in shapes]
        self.best = self.tree = self._first = 0
        self._spent = 0.0

    @property
    def pace(self) -> Pace:
        """Of the best one."""
        return self.contenders[self.best].pace

    @property
    def name(self) -> str:
        """Of the best one."""
        return self.contenders[self.best].shape.name

    def begin(self) -> None:
        """Steps that speculate are about to begin, behind others."""
        self.tree = self.best
        for one in self.contenders:
            one.ran = False

    def restart(self) -> None:
        """Forget everything; another tree has its turn to be the first, if this one was tried."""
        tried = any(one.pace.count for one in self.contenders)
        self._first = self.best = self.tree = (self._first + tried) % len(self.contenders)
        for one in self.contenders:
            one.pace.restart()
            one.refuted, one.confirmed, one.closed_until = False, False, 0.0

    def add(self, tokens: int, rows: int, seconds: float) -> None:
        """Count a step with `tree`."""
        one = self.contenders[self.tree]
        if one.ran:
            one.pace.add(tokens, rows, seconds)
            one.seconds = one.pace.seconds
        if self.tree != self.best:
            self._spent = max(0.0, self._spent + self._cost(one) - tokens / rows / self.pace.speed)
        one.ran = True

    def may_pay(self, plain: float) -> bool:
        """Whether the best one is not refuted by plain steps of `plain` seconds."""
        one = self.contenders[self.best]
        if one.pace.count < FEWEST:
            return True
        if self.best != self._first and not one.confirmed and self._lost_in_vain(plain) >= ATTEMPT * plain:
            return False
        return one.pace.hoped_tokens(one.most_tokens) * plain >= one.pace.seconds

    def pays(self, plain: float) -> bool:
        """Whether it is faster, as far as it can be told."""
        pays = self.pace.count >= CONFIRMING and self.pace.tokens * plain >= self.pace.seconds
        self.contenders[self.best].confirmed |= pays
        return pays

    def give_up(self, plain: float) -> bool:
        """The best one does not pay: another one becomes the best, if trying it is affordable. Whether there is one."""
        known = self.contenders[self.best]
        known.refuted = True
        lost, over = self._lost_in_vain(plain), known.pace.seconds - plain
        for index, one in enumerate(self.contenders):
            # cost of a step of which nothing is known yet: fewer nodes hardly cost less than half as much
            more = over * max(0.5, (one.shape.num_nodes - 1) / (known.shape.num_nodes - 1))
            if not one.refuted and lost + (FEWEST + 1) * more <= ATTEMPT * plain:
                self.best = self.tree = index
                one.pace.restart()
                return True
        # what is reported, and judged once more when plain steps have been measured again
        tried = [index for index, one in enumerate(self.contenders) if one.pace.count]
        self.best = self.tree = max(tried, key=lambda index: self.contenders[index].pace.speed)
        return False

    def lost(self, plain: float, uncounted: int) -> float:
        """Seconds that all trees of this attempt have cost beyond what plain steps would have.

        Of a tree that paid before it failed, not more than the window of its steps is held against it.
        """
        tried = [one for one in self.contenders if one.pace.count]
        steps = [min(one.pace.count, TOKENS_WINDOW) if one.confirmed else one.pace.count for one in tried]
        return sum(one.pace.lost(count + uncounted, plain) for one, count in zip(tried, steps, strict=True))

    def _lost_in_vain(self, plain: float) -> float:
        """The same of trees that never paid."""
        tried = [one for one in self.contenders if one.pace.count and not one.confirmed]
        return sum(one.pace.lost(one.pace.count + 1, plain) for one in tried)

    def compare(self, now: float, length: int) -> None:
        """The best one pays: decide about the other one that was tried in this step, and what is tried in the next.

        Args:
            now (`float`): Seconds of all steps so far.
            length (`int`): Tokens of the longest row.
        """
        if self.tree != self.best:
            self._judge(self.tree, length)
            self.tree = self.best  # every other step, so that both are measured at the same time
            return
        for index, one in enumerate(self.contenders):
            if index != self.best and length >= one.closed_until and self._risk(one) <= TREE_SHARE * now - self._spent:
                self.tree = index
                return

    def _judge(self, index: int, length: int) -> None:
        one, best = self.contenders[index], self.contenders[self.best]
        if one.pace.count < FEWEST:
            return
        hoped = one.pace.hoped_tokens(one.most_tokens)
        if hoped < one.pace.seconds * best.pace.speed or one.pace.count >= TOKENS_WINDOW:
            self._close(one, length)
        elif one.pace.count % CONFIRMING == 0:  # seldom: who looks often enough finds any difference
            least, most = one.pace.tokens - one.pace.error, best.pace.tokens + best.pace.error
            if least * best.pace.seconds >= MARGIN * most * one.pace.seconds:
                self._close(best, length)
                self.best, one.refuted = index, False

    @staticmethod
    def _close(one: Contender, length: int) -> None:
        one.closed_until = GROWTH * length
        one.pace.restart()

    def _cost(self, one: Contender) -> float:
        """Seconds of a step; after few of them, at most what its number of nodes makes of another tree's."""
        if one.pace.count >= SAMPLES and one.seconds is not None:
            return one.seconds
        known = [(other.seconds, other.shape.num_nodes) for other in self.contenders if other.seconds is not None]
        return min(seconds * max(1.0, one.shape.num_nodes / nodes) for seconds, nodes in known)

    def _risk(self, one: Contender) -> float:
        """Seconds that another step with it may be expected to lose."""
        tokens = one.pace.hoped_tokens(one.most_tokens) if one.pace.count else 1.0
        return max(0.0, self._cost(one) - tokens / self.pace.speed)
