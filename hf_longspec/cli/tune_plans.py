"""Which settings of a draft are tried, in which order, and what decides."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..generation.draft_tree import num_static_nodes
from ..generation.target import TargetView
from . import CommandError

Options = dict[str, Any]

# SpecAttn. The ratios reach from below the paper's plateau (3 %) to well above its choice (7 %).
RATIOS = (0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.25)
GAMMAS = (1, 2, 3, 4, 5, 6, 8, 10, 12)
LARGE_GAMMA = 12
# Acceptance no longer grows: this share of the most that any ratio reaches.
PLATEAU = 0.98

# LongSpec: chains, then ever wider trees up to the default.
WIDTHS = ([1], [1, 1], [1, 1, 1], [1, 1, 1, 1], [2, 2], [2, 2, 1], [3, 2, 1, 1], [4, 4, 4, 3])

# TokenSwift: children of every node, and the most nodes of a tree that are worth a try.
BRANCHES, MOST_NODES = (1, 2, 3), 64


@dataclass(frozen=True)
class Trial:
    """One candidate, measured.

    Args:
        step (`str`): Why it was tried.
        options (`dict[str, Any]`): Settings, on top of those of the draft.
        tau (`float`): Tokens per verification.
        tokens_per_second (`float`): Median over the repeats.
    """

    step: str
    options: Options
    tau: float
    tokens_per_second: float


class Measure(Protocol):
    """Decodes with every candidate in turns."""

    def __call__(self, step: str, candidates: Sequence[Options], repeats: int | None = None) -> list[Trial]:
        """One trial per candidate; `repeats` defaults to what the user wants."""


def fastest(trials: Sequence[Trial]) -> Options:
    """The settings that decoded fastest; the first of equals."""
    return max(trials, key=lambda trial: trial.tokens_per_second).options


def tune_specattn(draft: Any, target: TargetView, context: int, measure: Measure) -> Options:
    """The paper's three steps.

    Source: https://huggingface.co/papers/2602.07223, section 3.4.
    """
    present = float(draft.setting("sparse_ratio"))
    ratios = distinct_ratios(present, context, int(draft.setting("sparse_min_tokens")))
    chosen = present
    if len(ratios) > 1:
        wide = [{"sparse_ratio": ratio, "num_assistant_tokens": LARGE_GAMMA} for ratio in ratios]
        # acceptance does not depend on the clock, so that one run tells it
        trials = measure("1 acceptance by ratio", wide, 1)
        chosen = plateau([(trial.options["sparse_ratio"], trial.tau) for trial in trials])
    gammas = sorted({*GAMMAS, int(draft.setting("num_assistant_tokens"))})
    by_gamma = [{"sparse_ratio": chosen, "num_assistant_tokens": gamma} for gamma in gammas]
    best = fastest(measure("2 speed by gamma", by_gamma))
    place = ratios.index(chosen)
    around = [best | {"sparse_ratio": ratio} for ratio in ratios[max(place - 1, 0) : place + 2]]
    return fastest(measure("3 speed by ratio", around)) if len(around) > 1 else best


def distinct_ratios(present: float, context: int, fewest: int) -> list[float]:
    """The ratios that select different numbers of entries from `context`, `fewest` at least; `present` is one of them.

    >>> distinct_ratios(0.07, context=4096, fewest=256)
    [0.01, 0.07, 0.1, 0.15, 0.25]
    >>> distinct_ratios(0.07, context=200, fewest=256)
    [0.07]
    """
    by_entries: dict[int, float] = {}
    for ratio in (present, *RATIOS):
        by_entries.setdefault(min(context, max(fewest, math.ceil(ratio * context))), ratio)
    return sorted(by_entries.values())


def plateau(taus: Sequence[tuple[float, float]]) -> float:
    """The smallest ratio whose tau is close to the largest, from pairs of ratio and tau in ascending order.

    >>> plateau([(0.01, 2.0), (0.03, 3.95), (0.07, 3.9), (0.15, 4.0)])
    0.03
    """
    highest = max(tau for _, tau in taus)
    return next(ratio for ratio, tau in taus if tau >= PLATEAU * highest)


def tune_longspec(draft: Any, target: TargetView, context: int, measure: Measure) -> Options:
    """The fastest of [`WIDTHS`] that the draft accepts."""
    return _fastest_tree("tree_widths", WIDTHS, draft, target, measure)


def tune_tokenswift(draft: Any, target: TargetView, context: int, measure: Measure) -> Options:
    """The fastest of trees over 1, 2, ... heads with one number of children throughout."""
    levels = range(2, draft.config.num_heads + 2)
    trees = [[1] + [branch] * (level - 1) for branch in BRANCHES for level in levels]
    trees = [tree for tree in trees if num_static_nodes(tree) <= MOST_NODES]
    return _fastest_tree("tree_branching", trees, draft, target, measure)


def _fastest_tree(name: str, trees: Sequence[list[int]], draft: Any, target: TargetView, measure: Measure) -> Options:
    present = list(draft.setting(name))
    trees = [present, *(tree for tree in trees if tree != present)]
    return fastest(measure("speed by tree", [{name: tree} for tree in trees if _accepts(draft, target, name, tree)]))


def _accepts(draft: Any, target: TargetView, name: str, value: Any) -> bool:
    before = getattr(draft.generation_config, name)
    try:
        setattr(draft.generation_config, name, value)
        draft.check(target)
    except ValueError:
        return False
    finally:
        setattr(draft.generation_config, name, before)
    return True


PLANS: dict[str, Callable[[Any, TargetView, int, Measure], Options]] = {
    "specattn": tune_specattn,
    "longspec": tune_longspec,
    "tokenswift": tune_tokenswift,
}


def plan_for(draft: Any) -> Callable[[Any, TargetView, int, Measure], Options]:
    """How this kind of draft is tuned.

    Raises:
        CommandError: If it is not.
    """
    kind = draft.config.model_type
    if kind not in PLANS:
        raise CommandError(f"a draft of type {kind} is not tuned: pass a SpecAttn, LongSpec or TokenSwift draft.")
    return PLANS[kind]
