"""What the gate knows: seconds of steps by their size, and the chance that a drafted token is accepted.

[`Costs`] are measured from the steps that run anyway: medians of the last ones, which grow with the size. Medians are
right beside other programs, too, as these make steps of all sizes slower; so what earlier calls have measured holds in
proportion. [`Chances`] are shares of recent trials, which begin with a prior.
"""

from bisect import bisect
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from functools import cache
from itertools import accumulate, pairwise
from operator import mul
from statistics import median, median_low

# Last steps of a size whose median counts.
SAMPLES = 16
# Steps of a size after which its time is taken as it is. The first one may fill caches, or share the processor.
CERTAIN = 3
# Steps after which a size that was measured once is measured again, and last steps that tell how fast the machine is.
AGAIN, RATIOS = 64, 32
# Steps take equally long within this factor; otherwise so many of them are measured.
EQUAL, MANY = 1.3, 6
# Time of one more node in plain steps, and weight of a prior in trials, before anything is measured. The first is low,
# so that larger trees are tried.
NODE_COST, STRENGTH = 0.06, 4.0
# Share of the trials so far that the next one replaces.
FADING = 1 / 64
# Share of the misses that twice as many candidates avoid, before that is measured.
MORE = 0.5
# Tokens of the longest match of n-grams that is told apart, and the chance of its next token after 1, 2, ... tokens.
MATCHES = (0.1, 0.25, 0.35, 0.45, 0.5, 0.55, 0.6, 0.65)
# Likewise, that another path is right where the first one is wrong.
SECOND_PATH = 0.2
# Probabilities that are told apart, which a draft gives to its own tokens.
SHARES = (0.2, 0.4, 0.6, 0.8, 0.95)
# A path of n-grams, and how many tokens before it match.
Match = tuple[Sequence[int], int]


class Costs:
    """Seconds of steps by size: the number of nodes of a verification, or the number of drafted levels.

    A size that was not measured lies on the line between its neighbours.

    Args:
        earlier ([`Costs`], *optional*): Costs of an earlier call, when the machine may have been faster or slower. So
            they hold in proportion.
        is_other_length (`bool`, *optional*): Whether texts are longer or shorter than those of `earlier`. Then plain
            steps are measured first, and other sizes have the weight of few steps.
        is_free (`bool`, *optional*): Whether size 0 takes no time.

    >>> costs = Costs()
    >>> for size, seconds in [(1, 1.0), (5, 1.2), (9, 1.3), (9, 1.5), (9, 9.9)]:
    ...     costs.add(size, seconds)
    >>> costs(1), costs(5), costs(7), costs(17)
    (1.0, 1.2, 1.35, 2.0)
    >>> now = Costs(costs)
    >>> now.add(9, 3.0)
    >>> now(1), now(9)
    (2.0, 3.0)
    """

    def __init__(self, earlier: "Costs | None" = None, is_other_length: bool = False, is_free: bool = False):
        self._earlier = {} if earlier is None else earlier.samples()
        self._points: list[tuple[int, float]] = [] if earlier is None else earlier._points
        if is_other_length:
            self._earlier = {size: last[-CERTAIN:] for size, last in self._earlier.items() if size > 1}
        # costs that hold in proportion until sizes are measured
        self._expected = {0: 0.0} if is_free else dict(self._points)
        # seconds of the last steps over those of earlier ones of their sizes, and the typical ratio
        self._ratios, self._ratio = deque[float](maxlen=RATIOS), 1.0
        self._new: dict[int, deque[float]] = {}
        self._steps, self._first = 0, dict.fromkeys(self._earlier, -AGAIN)

    def samples(self) -> dict[int, list[float]]:
        """Return the seconds of the last steps of each size."""
        return {size: self._last(size) for size in self._earlier.keys() | self._new.keys()}

    def _last(self, size: int) -> list[float]:
        earlier = (seconds * self._ratio for seconds in self._earlier.get(size, ()))
        return [*earlier, *self._new.get(size, ())][-SAMPLES:]

    def add(self, size: int, seconds: float) -> None:
        """Count a step of a size."""
        new = self._new.setdefault(size, deque(maxlen=SAMPLES))
        new.append(seconds)
        self._first.setdefault(size, self._steps)
        self._steps += 1
        if size in self._expected:
            self._ratios.append(seconds / self._expected[size])
            self._ratio = median(self._ratios)
        if len(new) < SAMPLES or self._steps % 4 == 0:  # what is known well changes slowly
            self._update()

    def _update(self) -> None:
        """Compute the typical cost of each size."""
        samples = self.samples()
        found = {size: (cost * self._ratio, 1) for size, cost in self._expected.items()}
        found |= {size: (self._typical(size, samples), len(last)) for size, last in samples.items()}
        # the nearest costs that grow with the size, in the sense of least squares: cost, number of steps, sizes
        blocks: list[tuple[float, int, list[int]]] = []
        for size, (cost, count) in sorted(found.items()):
            sizes = [size]
            while blocks and blocks[-1][0] > cost:
                above, more, others = blocks.pop()
                cost, count, sizes = (above * more + cost * count) / (more + count), more + count, others + sizes
            blocks.append((cost, count, sizes))
        self._points = [(size, cost) for cost, _, sizes in blocks for size in sizes]

    def _typical(self, size: int, samples: Mapping[int, Sequence[float]]) -> float:
        """Return the typical time of a size, nearer to the assumption the fewer steps there were."""
        seconds, count = median_low(samples[size]), len(samples[size])
        if size <= 1 or count >= CERTAIN or 1 not in samples:
            return seconds
        if count == 1 and self._steps - self._first[size] >= AGAIN:  # it may have been an accident
            count = 0
        assumed = median_low(samples[1]) * (1 + NODE_COST * (size - 1))
        return min(seconds, assumed + (seconds - assumed) * count / CERTAIN)

    @property
    def is_known(self) -> bool:
        """Whether steps were measured, and not only the first one, which also prepares what others use again."""
        return self._steps > 1

    @property
    def largest(self) -> int:
        """The largest size that was measured."""
        return max([*self._earlier, *self._new], default=1)

    def count(self, size: int) -> int:
        """Return how many steps of a size count."""
        return len(self._last(size))

    def is_certain(self, size: int) -> bool:
        """Whether steps of a size took equally long, or were many."""
        samples = self._last(size)
        return len(samples) >= MANY or (len(samples) > 0 and max(samples) <= EQUAL * min(samples))

    def __call__(self, size: int) -> float:
        """Return the seconds of a step of a size, or if no step was measured, its assumed time in plain steps."""
        points = self._points
        if not points:
            return 1 + NODE_COST * (size - 1)
        (first, least), (last, most) = points[0], points[-1]
        if size < first:
            return least / (1 + NODE_COST * (first - size))
        if size > last:
            slope = (most - least) / (last - first) if last > first else least * NODE_COST
            return most + slope * (size - last)
        for (low, start), (high, end) in pairwise([*points, points[-1]]):
            if low <= size <= high:
                return start + (end - start) * (size - low) / max(1, high - low)
        return most


class Chances:
    """Chances of acceptance by what is known of a token before its verification.

    Args:
        first (`float`): Chance of the best candidate of the first level before anything is known.

    >>> chances = Chances(0.5)
    >>> for _ in range(4):
    ...     chances.add_path([1, 1], ranks=[0])
    >>> round(chances.level(0, 1), 2), round(chances.level(1, 1), 2), round(chances.tokens([1, 1]), 2)
    (0.75, 0.38, 2.03)
    """

    def __init__(self, first: float):
        self.first = first
        self.is_careful = False  # whether chances are lower bounds, by a standard error
        self._levels: dict[tuple[int, int, bool], float] = {}  # results of `level` since the last trial
        self._trials: dict[Hashable, float] = {}
        self._hits: dict[Hashable, float] = {}

    def add(self, key: Hashable, is_hit: float) -> None:
        """Count a trial, a hit or not, or the chance of a hit where that is all that is known."""
        self._levels.clear()
        self._trials[key] = self._trials.get(key, 0.0) * (1 - FADING) + 1
        self._hits[key] = self._hits.get(key, 0.0) * (1 - FADING) + is_hit

    def of(self, key: Hashable, prior: float) -> float:
        """Return the chance of a kind of token, which is `prior` before any trial."""
        weight = self._trials.get(key, 0.0) + STRENGTH
        chance = (self._hits.get(key, 0.0) + STRENGTH * prior) / weight
        return max(0.0, chance - (chance * (1 - chance) / weight) ** 0.5) if self.is_careful else chance

    def fade(self, share: float) -> None:
        """Forget a share of all trials."""
        self._levels.clear()
        for counts in (self._trials, self._hits):
            for key in counts:
                counts[key] *= 1 - share

    def said(self, share: float) -> float:
        """Return the chance of a token to which the draft gives this probability."""
        return self.of(("share", bisect(SHARES, share)), share)

    def add_said(self, shares: Sequence[float], verified: int, accepted: int) -> None:
        """Count the tokens of a chain by the draft's probabilities; the first ones were `verified` and `accepted`."""
        for depth, share in enumerate(shares[: min(verified, accepted + 1)]):
            self.add(("share", bisect(SHARES, share)), depth < accepted)
        if len(shares) > verified == accepted:  # a token that was not worth its verification
            self.add((verified, 1), self.said(shares[verified]))

    def level(self, depth: int, width: int) -> float:
        """Return the chance that one of the best `width` nodes of a level is accepted, if the level above was."""
        above = (depth - 1, 1, self.is_careful)
        prior = self.first if not depth else self._levels.get(above) or self.level(depth - 1, 1)
        chance = self.of((depth, 1), prior)
        for count in doublings(width)[1:]:
            chance = max(chance, self.of((depth, count), 1 - (1 - chance) * (1 - MORE)))
        return chance

    def tokens(self, widths: Sequence[int]) -> float:
        """Return the tokens that a verification of a tree is expected to emit per row, the bonus token included."""
        return 1.0 + sum(self.reached(widths))

    def reached(self, widths: Sequence[int]) -> list[float]:
        """Return the chance that a token of each level of a tree is emitted."""
        chances = []
        for place in enumerate(widths):
            key = *place, self.is_careful
            if (chance := self._levels.get(key)) is None:
                chance = self._levels[key] = self.level(*place)
            chances.append(chance)
        return list(accumulate(chances, mul))

    def add_path(self, widths: Sequence[int], ranks: Sequence[int]) -> None:
        """Count a verified tree of which nodes of these `ranks` in their levels were accepted."""
        for depth, width in enumerate(widths):
            rank = ranks[depth] if depth < len(ranks) else width
            for count in doublings(width):
                self.add((depth, count), rank < count)
            if rank >= width:
                return

    def gains(self, paths: Sequence[Match], reached: Sequence[float] = ()) -> list[tuple[float, int]]:
        """Return for each node of the paths of a row its gain in tokens and the index of its path, likeliest first.

        Tokens that a path shares with the first one are nodes of the first one. A node gains nothing where a tree
        beside it, which reaches its levels with these chances, has the same token. Both are taken to be independent.
        """
        found: list[tuple[float, float, int]] = []
        first, chances = paths[0][0] if paths else (), [1.0]
        for index, (path, length) in enumerate(paths):
            shared = common(path, first) if index else 0
            chance = chances[shared]
            if index:
                chance = max(0.0, chance - chances[min(shared + 1, len(chances) - 1)]) * self.of("second", SECOND_PATH)
            for depth in range(shared, len(path)):
                if not index or depth > shared:
                    match = min(length + depth, len(MATCHES))
                    chance *= self.of(("match", match), MATCHES[match - 1])
                if not index:
                    chances.append(chance)
                found.append((chance, 1 - reached[depth] if depth < len(reached) else 1.0, index))
        # by chance, which no node has more of than the one before it on its path
        return [(chance * left, index) for chance, left, index in sorted(found, key=lambda node: -node[0])]

    def add_match(self, paths: Sequence[Match], tokens: Sequence[int]) -> None:
        """Count the paths of n-grams before the emitted `tokens`, also those that were not verified."""
        if not paths or not tokens:
            return
        path, length = paths[0]
        for depth, (token, right) in enumerate(zip(path, tokens, strict=False)):
            self.add(("match", min(length + depth, len(MATCHES))), token == right)
            if token != right:
                break
        others = {other[0] for other, _ in paths[1:] if other[0] != path[0]}
        if others and path[0] != tokens[0]:
            self.add("second", tokens[0] in others)


@cache
def doublings(most: int) -> Sequence[int]:
    """Return the numbers of candidates that are told apart, of at most so many.

    >>> doublings(1), doublings(6)
    ([1], [1, 2, 4, 6])
    """
    return [*(2**power for power in range((most - 1).bit_length())), most]


def common(path: Sequence[int], other: Sequence[int]) -> int:
    """Return with how many tokens both paths begin.

    >>> common((7, 8, 9), (7, 8))
    2
    """
    pairs = zip(path, other, strict=False)
    return next((place for place, (own, theirs) in enumerate(pairs) if own != theirs), min(len(path), len(other)))
