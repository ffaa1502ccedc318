"""Choose among draft trees of fixed sizes: the one that gives the most tokens per second, as measured.

A large tree emits more tokens per verification and costs more. The better one depends on the machine, the batch, the
length and the text, so trees are tried while others run, at the expense of a fixed share of the time.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from .drafter import TreeShape

# Steps over which tokens and times are averaged.
TOKENS_WINDOW, SECONDS_WINDOW = 128, 16
# Imagined row-steps in which everything was accepted. They are the only evidence for a draft of which nothing was
# accepted yet, so that refuting it costs about OPTIMISM x depth plain steps, whatever a step costs.
OPTIMISM = 2

# Share of the time that may be lost to trying other trees than the fastest one.
TREE_SHARE = 0.005
# Fewest steps that can refute a tree, and steps that confirm that one pays.
FEWEST, CONFIRMING = 2, 16
# Steps of a tree of which two may be outliers.
TREE_SAMPLES = 3
# By how much another tree has to be faster, standard errors apart, to replace the fastest one.
TREE_MARGIN = 1.02
# Trees are compared again when the longest prefix has grown by this factor.
GROWTH = 1.25
# Plain steps that trying one tree after another may cost if the first one does not pay.
ATTEMPT = 20


class StepStatistics:
    """Measured time and tokens per kind of step: tokens over `TOKENS_WINDOW` steps, times over `SECONDS_WINDOW`."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget everything."""
        self.count = self.row_steps = 0
        self._tokens: deque[float] = deque(maxlen=TOKENS_WINDOW)
        self._seconds: deque[float] = deque(maxlen=SECONDS_WINDOW)

    def fade(self, steps: int) -> None:
        """Keep the tokens of the last few steps only, so that those of another text soon outweigh them."""
        self._tokens = deque(list(self._tokens)[-steps:], maxlen=TOKENS_WINDOW)
        self.count = self.row_steps = len(self._tokens)

    def add(self, tokens: int, rows: int, seconds: float) -> None:
        """Count a step in which `rows` growing rows emitted `tokens` together."""
        self.count += 1
        self.row_steps += rows
        self._tokens.append(tokens / rows)
        self._seconds.append(seconds)

    @property
    def seconds(self) -> float:
        """Lower quartile of the times, the fastest of three: disturbances only make a step slower."""
        return sorted(self._seconds)[(len(self._seconds) - 1) // 4]

    @property
    def tokens(self) -> float:
        """Mean tokens per step and row."""
        return sum(self._tokens) / len(self._tokens)

    @property
    def error(self) -> float:
        """Standard error of `tokens`."""
        mean, count = self.tokens, len(self._tokens)
        variance = sum((tokens - mean) ** 2 for tokens in self._tokens) / max(1, count - 1)
        return (variance / count) ** 0.5

    @property
    def speed(self) -> float:
        """Tokens per second and row."""
        return self.tokens / max(self.seconds, 1e-9)

    def hoped_tokens(self, most: int) -> float:
        """Return an upper estimate of `tokens`: mean, standard error, and a fading share of `most`."""
        hope = OPTIMISM * (most - self.tokens) / (self.row_steps + OPTIMISM)
        return self.tokens + self.error + hope

    def lost(self, steps: int, plain_seconds: float) -> float:
        """Return the seconds that `steps` steps take beyond plain steps that emit as much, at least 0."""
        return max(0.0, steps * (self.seconds - self.tokens * plain_seconds))


@dataclass
class Arm:
    """One of the trees that a tuner chooses from.

    Args:
        shape ([`TreeShape`]): Its name and sizes.
        steps ([`StepStatistics`]): Steps that verified it.
        ran (`bool`): Whether it ran since speculation was last switched on; its first step may compile.
        refuted (`bool`): Whether it was found not to pay in the present attempt.
        confirmed (`bool`): Whether it paid in the present attempt.
        closed_until (`float`): Length of the longest row from which on it is compared with the fastest one again.
        seconds (`float`, *optional*): Time of a step when it was last measured.
    """

    shape: TreeShape
    steps: StepStatistics = field(default_factory=StepStatistics)
    ran: bool = False
    refuted: bool = False
    confirmed: bool = False
    closed_until: float = 0.0
    seconds: float | None = None

    @property
    def most_tokens(self) -> int:
        """Tokens that a step emits per row if everything is accepted."""
        return self.shape.max_depth + 1


class TreeTuner:
    """Measure trees, and choose the one for the next step that speculates.

    Steps with another tree than the fastest one may lose `TREE_SHARE` of the time.

    Args:
        shapes (`Sequence[TreeShape]`): All trees, the one to begin with first.

    Attributes:
        tree (`int`): Index of the tree for the next step.
        best (`int`): Index of the tree that is used while no other is tried.
    """

    def __init__(self, shapes: Sequence[TreeShape]):
        self.arms = [Arm(shape) for shape in shapes]
        self.best = self.tree = self._first = 0
        self._spent = 0.0

    @property
    def steps(self) -> StepStatistics:
        """Steps with the best tree."""
        return self.arms[self.best].steps

    @property
    def name(self) -> str:
        """Name of the best tree."""
        return self.arms[self.best].shape.name

    def begin(self) -> None:
        """Begin a phase of speculation after plain steps."""
        self.tree = self.best
        for arm in self.arms:
            arm.ran = False

    def fade(self) -> None:
        """Keep the last steps of every tree as evidence for another text."""
        for arm in self.arms:
            arm.steps.fade(CONFIRMING)
            arm.closed_until = 0.0

    def restart(self) -> None:
        """Forget everything; begin with another tree than last time, if that one was tried."""
        tried = any(arm.steps.count for arm in self.arms)
        self._first = self.best = self.tree = (self._first + tried) % len(self.arms)
        for arm in self.arms:
            arm.steps.restart()
            arm.refuted, arm.confirmed, arm.closed_until = False, False, 0.0

    def add(self, tokens: int, rows: int, seconds: float) -> None:
        """Count a step with `tree`."""
        arm = self.arms[self.tree]
        if arm.ran:
            arm.steps.add(tokens, rows, seconds)
            arm.seconds = arm.steps.seconds
        if self.tree != self.best:
            self._spent = max(0.0, self._spent + self._cost(arm) - tokens / rows / self.steps.speed)
        arm.ran = True

    def may_pay(self, plain: float) -> bool:
        """Return whether plain steps of `plain` seconds do not refute the best tree."""
        arm = self.arms[self.best]
        if arm.steps.count < FEWEST:
            return True
        if self.best != self._first and not arm.confirmed and self._lost_in_vain(plain) >= ATTEMPT * plain:
            return False
        return arm.steps.hoped_tokens(arm.most_tokens) * plain >= arm.steps.seconds

    def pays(self, plain: float) -> bool:
        """Return whether the best tree was measured to be faster than plain steps of `plain` seconds."""
        pays = self.steps.count >= CONFIRMING and self.steps.tokens * plain >= self.steps.seconds
        self.arms[self.best].confirmed |= pays
        return pays

    def give_up(self, plain: float) -> bool:
        """Replace the best tree, which does not pay, by another one if trying that is affordable.

        Returns:
            `bool`: Whether there was such a tree.
        """
        known = self.arms[self.best]
        known.refuted = True
        lost, over = self._lost_in_vain(plain), known.steps.seconds - plain
        for index, arm in enumerate(self.arms):
            # cost of a step that was never measured: fewer nodes hardly cost less than half as much
            more = over * max(0.5, (arm.shape.num_nodes - 1) / (known.shape.num_nodes - 1))
            if not arm.refuted and lost + (FEWEST + 1) * more <= ATTEMPT * plain:
                self.best = self.tree = index
                arm.steps.restart()
                return True
        # this tree is reported, and judged once more when plain steps have been measured again
        tried = [index for index, arm in enumerate(self.arms) if arm.steps.count]
        self.best = self.tree = max(tried, key=lambda index: self.arms[index].steps.speed)
        return False

    def lost(self, plain: float, uncounted: int) -> float:
        """Return the seconds that all trees of this attempt have cost beyond plain steps.

        A tree that paid before it failed counts with the steps of one window at most.
        """
        tried = [arm for arm in self.arms if arm.steps.count]
        steps = [min(arm.steps.count, TOKENS_WINDOW) if arm.confirmed else arm.steps.count for arm in tried]
        return sum(arm.steps.lost(count + uncounted, plain) for arm, count in zip(tried, steps, strict=True))

    def _lost_in_vain(self, plain: float) -> float:
        """Return the same for trees that never paid."""
        tried = [arm for arm in self.arms if arm.steps.count and not arm.confirmed]
        return sum(arm.steps.lost(arm.steps.count + 1, plain) for arm in tried)

    def compare(self, now: float, length: int) -> None:
        """Decide about the tree that was just tried beside the best one, which pays, and choose the next one to try.

        Args:
            now (`float`): Seconds of all steps so far.
            length (`int`): Tokens of the longest row.
        """
        if self.tree != self.best:
            self._judge(self.tree, length)
            self.tree = self.best  # every other step, so that both are measured at the same time
            return
        for index, arm in enumerate(self.arms):
            if index != self.best and length >= arm.closed_until and self._risk(arm) <= TREE_SHARE * now - self._spent:
                self.tree = index
                return

    def _judge(self, index: int, length: int) -> None:
        arm, best = self.arms[index], self.arms[self.best]
        if arm.steps.count < FEWEST:
            return
        hoped = arm.steps.hoped_tokens(arm.most_tokens)
        if hoped < arm.steps.seconds * best.steps.speed or arm.steps.count >= TOKENS_WINDOW:
            self._close(arm, length)
        elif arm.steps.count % CONFIRMING == 0:  # seldom: frequent comparisons find differences that are not there
            least, most = arm.steps.tokens - arm.steps.error, best.steps.tokens + best.steps.error
            if least * best.steps.seconds >= TREE_MARGIN * most * arm.steps.seconds:
                self._close(best, length)
                self.best, arm.refuted = index, False

    @staticmethod
    def _close(arm: Arm, length: int) -> None:
        arm.closed_until = GROWTH * length
        arm.steps.restart()

    def _cost(self, arm: Arm) -> float:
        """Return the seconds of a step; with few measurements, scale those of another tree by the number of nodes."""
        if arm.steps.count >= TREE_SAMPLES and arm.seconds is not None:
            return arm.seconds
        known = [(other.seconds, other.shape.num_nodes) for other in self.arms if other.seconds is not None]
        return min(seconds * max(1.0, arm.shape.num_nodes / nodes) for seconds, nodes in known)

    def _risk(self, arm: Arm) -> float:
        """Return the seconds that another step with it may be expected to lose."""
        tokens = arm.steps.hoped_tokens(arm.most_tokens) if arm.steps.count else 1.0
        return max(0.0, self._cost(arm) - tokens / self.steps.speed)
