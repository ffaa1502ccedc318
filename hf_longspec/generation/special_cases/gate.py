"""The gate: choose in every step how much is drafted and verified, from measured costs and calibrated chances.

A step takes the tree that emits the most tokens per second: (1 + chances of its nodes) / (drafting + verification). The
root alone, a plain step, is one of the choices. N-grams that join a draft are verified on their own where its tree does
not pay. Costs belong to the target and a method of drafts, chances belong to the draft, and both outlive a call. What
is tried and does not pay is bounded by a credit, in plain steps: `CREDIT` at first, and `SHARE` of each plain step
afterwards. All of it is per growing row.

Choices by the ratio of expected tokens and time: SmartSpec, https://huggingface.co/papers/2406.14066, and Sequoia,
https://huggingface.co/papers/2402.12374. [`SpeculationGate`] decides, and [`GatedDrafter`] hides plain steps from the
draft.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate, chain, zip_longest
from threading import Lock
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ..draft_tree import DraftTree
from ..drafter import Drafter, DrafterAround, Verification
from ..sequences import SpeculationStats
from ..special_case import GATE, SpecialCase
from .costs import Chances, Costs, Match, common, doublings

# Plain steps that may be lost to trying a draft, most of them that are saved up from gains, and the share of later
# plain steps that may be lost.
CREDIT, MOST_CREDIT, SHARE = 1.5, 16.0, 0.01
# Most of the credit that it takes to bring a draft up to date, so that it is still tried.
RESUMING = 0.5
# Speculating steps for each plain one that was measured before plain ones are measured again. Their number then grows.
CHECK_AFTER = 8
# Steps of a long call after which its costs so far hold in proportion, as those of a call before it.
RENEW = 256
# After so many steps of a call, every fourth one decides for the next ones, too: a decision takes 0.1 ms or more.
STEADY, DECIDE_EVERY = 32, 4
# Nodes of a tree over those of the largest one that was measured, and time of a step over the expected one, at most.
REACH, OUTLIER = 4, 2.0
# Share of what is known about a draft that is forgotten in a step without it, and in a new call.
FADE_PLAIN, FADE_CALL = 1 / 256, 0.5
# Weight of a step in the average of recent ones.
FADE_STEP = 1 / 16
# Choices beside the draft's trees, which are numbered from 0 on.
PLAIN, ONLY_NGRAMS = -1, -2


class Recent:
    """Tokens and seconds of steps, of which earlier ones count less."""

    def __init__(self) -> None:
        self.tokens = self.seconds = 0.0

    def add(self, tokens: float, seconds: float) -> None:
        """Count a step."""
        self.tokens += FADE_STEP * (tokens - self.tokens)
        self.seconds += FADE_STEP * (seconds - self.seconds)

    @property
    def rate(self) -> float:
        """Tokens per second; 0 before any step."""
        return self.tokens / self.seconds if self.seconds else 0.0


class StepWithNgrams(NamedTuple):
    """What is expected of a step that verifies n-grams."""

    gains: list[list[tuple[float, int]]]  # results of [`Chances.gains`] for each row
    kept: int  # how many of them are verified
    tokens: float  # per row
    seconds: float


class SpeculationGate:
    """Choose how much is drafted and verified, step by step.

    [`Drafter.plan`] is this object: drafters read `widths`, n-grams are shortened by `cut`, and drafters of chains ask
    `goes_on` after each token.

    Args:
        drafter ([`Drafter`]): The drafter of the first call, which says how much it can draft.
        costs_of (`Callable`): Function of the power of two of a length, and of the [`Costs`] so far, to the [`Costs`]
            of verifications from now on.
        ranks (`Any`, *optional*): The processes that share the target. The first measures and decides for all.
        sizes (`int`, *optional*): Number of sizes of trees that are tried, if each takes a graph: 1 or 2; 0 for all.
    """

    def __init__(
        self,
        drafter: Any,
        costs_of: Callable[[int, Costs], Costs],
        ranks: Any = None,
        sizes: int = 0,
    ):
        self.ranks, self.sizes = ranks, sizes
        self.costs, self._power = Costs(), 0
        self.chances = Chances(drafter.first_chance)
        self.credit, self.expected = CREDIT, 1.0
        self._drafting = Costs(is_free=True)  # in plain steps
        self._matches: list[list[Match]] = []
        # n-grams beside the draft's last tree that paid, and without it, as expected of the last steps
        self._ngrams_beside, self._ngrams_alone = Recent(), Recent()
        self._tree: tuple[Sequence[int], int] = (), 1
        self._speculating, self._checks = 0, 0
        self.resume(drafter, costs_of)

    def resume(self, drafter: Any, costs_of: Callable[[int, Costs], Costs]) -> None:
        """Begin another call of the same kind with what is known."""
        self._drafter: Any = drafter
        self._costs_of: Any = costs_of
        self._has_levels = has_levels(drafter)
        # n-grams alone are one more size of trees
        self._joins_ngrams = num_own_nodes(drafter) < drafter.num_nodes and self.sizes != 1
        self.only_ngrams = False  # whether this step verifies n-grams without the draft
        self.answers = drafter.tells and set(drafter.largest) == {1} and self.ranks is None
        self._choices = choices(drafter, self.sizes)
        self.widths = self._choices[-1][0]
        # seconds of plain steps that emit as much as all steps of this call, and of these steps
        self.worth = self.seconds = 0.0
        self._steps, self._choice, self._rate = 0, PLAIN, 0.0
        self._begin_chain()
        self.chances.fade(FADE_CALL)

    def release(self) -> None:
        """Drop what belongs to the call that ends, and its target, which `costs_of` may hold."""
        self._drafter = self._costs_of = None
        self._matches = []

    def reach(self, length: int) -> None:
        """Take the costs for texts of this length. At first, and after `RENEW` steps, those so far are earlier ones."""
        if (power := length.bit_length()) != self._power or self._steps % RENEW == 0:
            self.costs = self._costs_of(power, self.costs)
            self._power = power

    def speculates(self) -> bool:
        """Return whether the draft is asked in the step that begins now, and set `widths` and `only_ngrams`."""
        self._steps += 1
        if (
            self._steps <= STEADY
            or self._steps % DECIDE_EVERY == 0
            or (self._choice != PLAIN and self.credit <= CREDIT)
        ):
            self._choice = self._best()
        choice = self._choice
        # plain steps are measured again
        if choice != PLAIN and self._speculating >= (CHECK_AFTER << self._checks) * max(1, self.costs.count(1)):
            self._speculating, self._checks, choice = 0, self._checks + 1, PLAIN
        if self.ranks is not None:
            choice = int(self.ranks.first([choice])[0])
        self._begin_chain()
        self.only_ngrams = choice == ONLY_NGRAMS
        if choice < 0:
            return False
        self.widths = self._choices[choice][0]
        self.expected = self.tokens(self.widths)
        if self.answers:  # as long as the draft is sure
            self.widths = self._choices[-1][0]
        return True

    def _begin_chain(self) -> None:
        # for each token of this chain: the draft's probability of it in each row, and the mean chance that the chain is
        # right so far
        self._said: list[Sequence[float]] = []
        self._gains: list[float] = []
        self._reached: list[float] = []  # by row, after the last token

    def goes_on(self, shares: Sequence[float]) -> bool:
        """Return whether to draft another token of chains after one to which the draft gives these probabilities."""
        above = self._reached or [1.0] * len(shares)
        self._said.append(shares)
        self._reached = [chance * self.chances.said(share) for chance, share in zip(above, shares, strict=True)]
        self._gains.append(sum(self._reached) / len(shares))
        depth = len(self._said)
        if depth == len(self.widths) or depth + 2 > self._reach:
            return False
        drafting = self.drafting(depth + 1) - self.drafting(depth)
        seconds = drafting + self.costs(depth + 2) - self.costs(depth + 1)
        return self._gains[-1] * self.chances.level(depth, 1) > self._rate * seconds

    def kept(self, may_cut: bool = True) -> int:
        """Return how many of the drafted tokens are worth their verification; at least one."""
        count = len(self._said)
        while may_cut and count > 1:
            if self._gains[count - 1] > self._rate * (self.costs(count + 1) - self.costs(count)):
                break
            count -= 1
        self.widths = self.widths[:count]
        self.expected = 1 + sum(self._gains[:count])
        return count

    def _best(self) -> int:
        """Return the index of the best tree of the draft, [`ONLY_NGRAMS`] or [`PLAIN`]."""
        if self._drafter.chooses_nodes:  # as soon as it has found them
            return 0 if self.credit > 0 else PLAIN
        best = without = ONLY_NGRAMS if self._joins_ngrams and self.credit > 0 else PLAIN
        if not self.costs.is_certain(1):
            return best
        plain = self.costs(1)
        rate, limit = 1 / plain, (1 + self.credit) * plain
        for index, (widths, nodes) in enumerate(self._choices):
            if nodes > self._reach:
                continue
            seconds = self.drafting(len(widths)) + self.costs(nodes)
            found = self.tokens(widths) / seconds
            if found > rate and (seconds <= limit or self._surely(self.tokens, widths) * plain > seconds):
                best, rate = index, found
        self._rate = rate
        if without == ONLY_NGRAMS and best >= 0:
            self._tree = self._choices[best]
            return best if self._ngrams_beside.rate >= self._ngrams_alone.rate else without
        return best

    @property
    def _reach(self) -> float:
        """Most nodes that are tried; all if there are few sizes."""
        return float("inf") if self.sizes else max(self._choices[0][1], REACH * self.costs.largest)

    def tokens(self, widths: Sequence[int]) -> float:
        """Return the tokens per row that a step with a tree of these widths is expected to emit."""
        return self.chances.tokens(self._told_apart(widths))

    def _told_apart(self, widths: Sequence[int]) -> Sequence[int]:
        """Return the numbers of candidates of each level that chances tell apart; 1 if levels are not complete."""
        return widths if self._has_levels else [1] * len(widths)

    def _surely(self, tokens: Callable[..., Any], *inputs: Any) -> Any:
        """Return the result of a function by lower bounds of all chances."""
        self.chances.is_careful = True
        found = tokens(*inputs)
        self.chances.is_careful = False
        return found

    def drafting(self, levels: int) -> float:
        """Return the seconds of drafting some levels."""
        if not self._drafting.is_known:
            return float(self._drafter.level_cost) * levels * self.costs(1)
        return self._drafting(levels) * self.costs(1)

    def cut(self, rows: Sequence[list[Match]], nodes: int, most: int) -> tuple[list[list[Sequence[int]]], int]:
        """Return the paths of n-grams of each row as far as they are worth their verification, and their nodes.

        Args:
            rows (`Sequence[list[tuple]]`): Paths of each row, best first, and how many tokens before them match.
            nodes (`int`): Number of nodes of the tree without them, root included.
            most (`int`): Most nodes of n-grams in a row.
        """
        self._matches = list(rows)
        if self.ranks is None:
            lengths, kept = self._lengths(rows, nodes, most)
        else:
            decides = self.ranks.rank == 0
            found, kept = self._lengths(rows, nodes, most) if decides else ([[0] * len(paths) for paths in rows], 0)
            *flat, kept = self.ranks.first([*chain.from_iterable(found), kept])
            numbers = iter(flat)
            lengths = [[next(numbers) for _ in paths] for paths in rows]
        pairs = zip(rows, lengths, strict=True)
        return [[path[:n] for (path, _), n in zip(paths, row, strict=True) if n] for paths, row in pairs], kept

    def _lengths(self, rows: Sequence[list[Match]], nodes: int, most: int) -> tuple[list[list[int]], int]:
        """Return how many tokens of each path are worth their verification, and the number of nodes. See `cut`."""
        has_tree = nodes > 1
        step = self._with_ngrams(rows, self.widths if has_tree else (), nodes, most)
        self.expected = step.tokens
        if self._joins_ngrams:  # what the same n-grams would gain without the tree, or beside it
            other = self._with_ngrams(rows, *(((), 1) if has_tree else self._tree), most)
            beside, alone = (step, other) if has_tree else (other, step)
            self._ngrams_beside.add(beside.tokens, beside.seconds)
            self._ngrams_alone.add(alone.tokens, alone.seconds)
        pairs = zip(rows, step.gains, strict=True)
        return [kept_lengths(paths, gains[: step.kept]) for paths, gains in pairs], step.kept

    def _with_ngrams(self, rows: Sequence[list[Match]], tree: Sequence[int], nodes: int, most: int) -> StepWithNgrams:
        """Return the best step with n-grams beside a tree of these widths and with so many nodes, root included."""
        tokens, gains = self._joined(rows, tree, most)
        surely: list[float] = []
        drafting, plain = self.drafting(len(tree)), self.costs(1)
        limit = (1 + self.credit) * plain
        spent = drafting + self.costs(nodes)
        rate, kept = tokens[0] / spent, 0
        # sizes that are captured are all or nothing
        for count in [most] if self.sizes else range(1, len(tokens)):
            if count >= len(tokens) or nodes + count > self._reach:
                break
            seconds = drafting + self.costs(nodes + count)
            if tokens[count] / seconds <= rate:
                continue
            if seconds > limit:
                surely = surely or self._surely(self._joined, rows, tree, most)[0]
            if seconds <= limit or surely[count] * plain > seconds:
                rate, kept, spent = tokens[count] / seconds, count, seconds
        return StepWithNgrams(gains, kept, tokens[kept], spent)

    def _joined(
        self, rows: Sequence[list[Match]], tree: Sequence[int], most: int
    ) -> tuple[list[float], list[list[tuple[float, int]]]]:
        """Return the tokens per row of steps with 0, 1, 2, ... nodes of n-grams beside a tree, and these nodes."""
        reached = self.chances.reached(self._told_apart(tree))
        gains = [self.chances.gains(paths, reached)[:most] for paths in rows]
        columns = zip_longest(*gains, fillvalue=(0.0, 0))
        more = (sum(gain for gain, _ in column) / len(rows) for column in columns)
        return list(accumulate(more, initial=1.0 + sum(reached))), gains

    def record(self, verification: Verification, drafting: float, verifying: float, is_draft: bool) -> None:
        """Learn from a step that has ended: its verification, the seconds of both parts, and whether it drafted."""
        rows, tree = sum(map(bool, verification.tokens)), verification.tree
        if not rows or tree is None or (self.ranks is not None and self.ranks.rank):
            return
        nodes, levels = tree.num_nodes, (len(self._said) or len(self.widths)) if is_draft else 0
        self.costs.add(nodes, verifying)
        plain = seconds = self.costs(1)
        worth = plain * sum(map(len, verification.tokens)) / rows
        if is_draft or self.only_ngrams:
            self._learn_ngrams(verification)
            if is_draft:
                self._drafting.add(levels, drafting / plain)
                self._learn(verification, nodes)
            else:
                self.chances.fade(FADE_PLAIN)
            self._speculating += 1
            seconds = min(drafting + verifying, OUTLIER * (self.drafting(levels) + self.costs(nodes)))
            self.credit = min(MOST_CREDIT, self.credit + (worth - seconds) / plain)
        else:
            self.credit = max(self.credit, min(CREDIT, self.credit + SHARE)) - min(RESUMING, drafting / plain)
            self.chances.fade(FADE_PLAIN)
        self.worth, self.seconds = self.worth + worth, self.seconds + seconds

    def _learn_ngrams(self, verification: Verification) -> None:
        """Count which of the n-grams were right, also of those that were not verified."""
        for matches, tokens in zip(self._matches, verification.tokens, strict=False):
            self.chances.add_match(matches, tokens)

    def _learn(self, verification: Verification, nodes: int) -> None:
        """Count which of the draft's nodes were accepted."""
        drafter = self._drafter
        if drafter.chooses_nodes:
            return
        own = nodes if drafter.first_ngram_node is None else drafter.first_ngram_node
        for row, (kept, tokens) in enumerate(zip(verification.nodes, verification.tokens, strict=True)):
            if tokens:
                path = [node for node in kept[1:] if node < own]
                ranks = ranks_of(drafter, path, self.widths) if self._has_levels else [0] * len(path)
                self.chances.add_path(self._told_apart(self.widths), ranks)
                self.chances.add_said([shares[row] for shares in self._said], len(self.widths), len(ranks))


def choices(drafter: Any, sizes: int = 0) -> list[tuple[Sequence[int], int]]:
    """Return the trees that a drafter can draft, as the widths of their levels and their number of nodes.

    Their levels are those of the largest tree, or the first ones, and have at most 1, 2, 4, ... nodes each. Two sizes
    are the largest tree and a chain, and one is the largest tree.
    """
    largest, own_nodes = tuple(drafter.largest), num_own_nodes(drafter)
    if not largest:  # it always drafts the same
        return [((1,) * drafter.max_depth, own_nodes)]
    most, depths = max(largest), range(1, len(largest) + 1)
    bounds = doublings(most) if has_levels(drafter) else [most]
    if sizes:
        bounds, depths = [bounds[0], most][-sizes:], depths[-1:]
    found = {tuple(min(bound, width) for width in largest[:depth]): None for bound in bounds for depth in depths}
    return [(widths, min(own_nodes, 1 + sum(drafter.level_sizes(widths)))) for widths in found]


def num_own_nodes(drafter: Any) -> int:
    """Return the number of nodes of a drafter's largest tree, without n-grams that join it."""
    joins = drafter.first_ngram_node is not None and not drafter.chooses_nodes
    return int(drafter.first_ngram_node if joins else drafter.num_nodes)


def has_levels(drafter: Any) -> bool:
    """Return whether the trees of a drafter have all nodes of their levels, one level after the other."""
    return bool(drafter.largest) and 1 + sum(drafter.level_sizes(drafter.largest)) == num_own_nodes(drafter)


def ranks_of(drafter: Any, path: Sequence[int], widths: Sequence[int]) -> list[int]:
    """Return which candidate of its level each node of a path is, from the first level on, as far as they are in one.

    >>> ranks_of(Drafter(None), [2, 4, 9], [3, 2])
    [1, 0]
    """
    first, ranks = 1, list[int]()
    for node, size, width in zip(path, drafter.level_sizes(widths), widths, strict=False):
        if not first <= node < first + size:
            break
        ranks.append((node - first) % width)
        first += size
    return ranks


def kept_lengths(paths: Sequence[Match], nodes: Sequence[tuple[float, int]]) -> list[int]:
    """Return the lengths of the beginnings of paths that have these nodes, which are those of [`Chances.gains`]."""
    first = paths[0][0] if paths else ()
    counts = Counter(index for _, index in nodes)
    return [
        counts[index] + (common(path, first) if index else 0) if counts[index] else 0
        for index, (path, _) in enumerate(paths)
    ]


class GatedDrafter(DrafterAround):
    """Propose the tree of another drafter as far as it pays, else n-grams that join it, or the root alone.

    Steps without its tree are hidden from the other drafter: it neither captures nor observes them. Before it proposes
    again, it is resumed with the text so far and the verification of one more root. So the first step after a pause is
    plain. `keep` is called when the text is complete.
    """

    def __init__(self, inner: Drafter, gate: SpeculationGate, stats: SpeculationStats, keep: Callable[[], None]):
        super().__init__(inner)
        self.gate = gate
        inner.follow(gate)
        self._ngrams: Any = getattr(inner, "ngrams", None)
        self._stats, self._keep, self._clock = stats, keep, inner.binding.target.clock
        self._is_open = self._was_open = True
        self.is_awaited = False  # whether the other drafter is needed as if it had observed all steps
        self._began = self._drafted = 0.0
        self._prompts: list[torch.Tensor] = []
        self._emitted: list[array[int]] = []

    @property
    def wants_hidden(self) -> bool | tuple[int, ...]:
        """As the other drafter, in the steps that it observes."""
        return self._is_open and self.inner.wants_hidden

    @property
    def first_ngram_node(self) -> int | None:
        """As the other drafter, or the node after the root."""
        node: int | None = 1 if self.gate.only_ngrams else self.inner.first_ngram_node
        return node

    @property
    def reuse_graph(self) -> bool:
        """False in the step that resumes the other drafter."""
        return self._was_open or not self._is_open

    def keep(self) -> None:
        """Keep the gate, and what the other drafter keeps; complete the statistics."""
        if self.gate.seconds:
            self._stats.speedup = self.gate.worth / self.gate.seconds
        self._keep()
        self.inner.keep()

    def start(self, texts: Sequence[torch.Tensor], verification: Verification) -> None:
        """Start the other drafter."""
        self._prompts, self._emitted = list(texts), [array("q", tokens) for tokens in verification.tokens]
        self.inner.start(texts, verification)

    def take(self, row: int, other: Any, of: int = 0) -> None:
        """Let the other drafter take a row, and note the text of its drafter."""
        super().take(row, other, of)
        if isinstance(other, GatedDrafter):
            self._prompts[row], self._emitted[row] = other._prompts[of], other._emitted[of][:]
            return
        sequences = other.binding.rule.sequences
        self._prompts[row] = sequences.tokens[0, : sequences.prompt_length]
        self._emitted[row] = sequences.generated[0][:]

    def propose(self, root: torch.Tensor) -> DraftTree:
        """Return the other drafter's tree, or the root alone."""
        self._began = self._clock()
        self.gate.reach(max(self.binding.cache.lengths.host))
        self._was_open, self._is_open = self._is_open, self.gate.speculates() or self.is_awaited
        self.gate.only_ngrams &= not self._is_open
        proposes = self.inner if self._drafts else self._ngrams if self.gate.only_ngrams else None
        tree = DraftTree.root_only(root) if proposes is None else proposes.propose(root)
        self._drafted = self._clock()
        return tree

    @property
    def is_ready(self) -> bool:
        """Whether the other drafter has observed all steps so far."""
        return self._is_open

    @property
    def _drafts(self) -> bool:
        return self._is_open and self._was_open

    def capture(self, tree: DraftTree) -> Any:
        """Return the other drafter's capture while the gate is open."""
        return super().capture(tree) if self._is_open else None

    def observe(self, verification: Verification) -> None:
        """Pass the verification on while the gate is open, and measure the step."""
        verified = self._clock()
        for row, new in zip(self._emitted, verification.tokens, strict=True):
            row.extend(new)
        if self._is_open:
            self._inform(verification)
        elif self._ngrams is not None:
            self._ngrams.observe(verification)
        is_open = self._is_open or self.gate.only_ngrams
        drafting = self._clock() - verified + self._drafted - self._began if is_open else 0.0
        if is_open and verification.tree.num_nodes > 1:  # type: ignore[union-attr]
            self._stats.num_expected_tokens += self.gate.expected * sum(map(bool, verification.tokens))
        self.gate.record(verification, drafting, verified - self._drafted, self._drafts)

    def _inform(self, verification: Verification) -> None:
        """Let the other drafter go on, or resume after plain steps."""
        if self._was_open:
            self.inner.observe(verification)
            return
        rows = zip(self._prompts, self._emitted, self.binding.cache.lengths.host, strict=True)
        texts = [torch.cat([prompt, prompt.new_tensor(new)])[:length] for prompt, new, length in rows]
        self.inner.resume(texts, verification)


# Gates that no call is using, by draft, target, and everything else that steps of a call depend on. Costs, by target.
_kept: WeakKeyDictionary[nn.Module, WeakKeyDictionary[nn.Module, dict[Hashable, SpeculationGate]]] = WeakKeyDictionary()
_costs: WeakKeyDictionary[nn.Module, dict[Hashable, Costs]] = WeakKeyDictionary()
_lock = Lock()


def gate_of(
    drafter: Any,
    costs_of: Callable[[int, Costs], Costs],
    ranks: Any = None,
    sizes: int = 0,
    last: SpeculationGate | None = None,
) -> SpeculationGate | None:
    """Return the gate of one call, the `last` of its kind; `None` if every step may speculate.

    Copies of a sharded target that run side by side, which was never tried, have no gate.
    """
    if drafter.num_nodes == 1 or (ranks is not None and not ranks.is_everyone):
        return None
    if last is None:
        return SpeculationGate(drafter, costs_of, ranks, sizes)
    last.resume(drafter, costs_of)
    return last


class Gate(SpecialCase):
    """The gate of calls that speculate."""

    case = GATE

    def drafter(self, inner: Any, session: Any) -> Any:
        """Return the drafter of a [`Session`] within a gate, unless every step may speculate.

        A gate is kept for the next call of its kind: the same draft, settings, target, way to choose tokens and number
        of rows. Gates of processes that decide together are not kept.
        """
        draft, target, rule = session.draft, session.target, inner.binding.rule
        ranks, model = target.ranks, target.model
        how = model.dtype, model.config._attn_implementation, draft.setting("compile"), torch.get_num_threads()
        place = model.device, session.cache.batch_size, *how
        settings = tuple(repr(draft.setting(name)) for name in draft.settings)
        kind = place, settings, rule is not None and rule.do_sample, inner.num_nodes

        def costs_of(power: int, earlier: Costs) -> Costs:
            key = place, draft.method, power  # as methods read more or less of a verification
            with _lock:
                known = _costs.setdefault(model, {})
                costs = known[key] = Costs(known.get(key, earlier), is_other_length=key not in known)
                return costs

        def keep() -> None:
            if gate is not None and ranks is None:
                gate.release()
                with _lock:
                    _kept.setdefault(draft, WeakKeyDictionary()).setdefault(model, {})[kind] = gate

        if (tau := getattr(draft.config, "mean_acceptance_length", None)) is not None:
            inner.first_chance = 1 - 1 / max(tau, 1.0)  # for which 1 + p + p² + ... is tau
        with _lock:
            last = _kept.get(draft, {}).get(model, {}).pop(kind, None)
        runner = target.steps.runner  # which takes a graph for each size; to compile one takes much longer
        gate = gate_of(inner, costs_of, ranks, 0 if runner is None else 1 if runner.compiles else 2, last)
        return inner if gate is None else GatedDrafter(inner, gate, session.stats, keep)
