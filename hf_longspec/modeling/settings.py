"""Settings of drafts as a table: for each one its default, the values that it may have, and its meaning."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Setting:
    """A setting of a draft, which is an attribute of `draft.generation_config`. `None` there stands for the default.

    >>> Setting(4, "Drafted tokens.", int).check("gamma", 0)
    Traceback (most recent call last):
    ValueError: gamma=0: expected an integer of at least 1. Drafted tokens.
    """

    default: Any
    # what it decides: sentences of the message about other values, and of the table in the documentation
    meaning: str = ""
    # `int`, `float`, `bool`, or `list` for a list of positive integers. By default the value is one of `choices`, or
    # anything if there are none.
    kind: type | None = None
    least: int = 1  # smallest integer
    above: float = 0  # bound of numbers that are no integers
    most: float | None = None
    choices: tuple[str, ...] = ()  # further values
    on_cpu: Any = None  # the default on a CPU, if it is another one; `None` then stands for that of the device

    @property
    def rule(self) -> str:
        if self.kind is None:
            return f"{'None or ' if self.default is None else ''}one of {', '.join(self.choices)}"
        if self.kind is int:
            rule = "an integer " + (
                f"of at least {self.least}" if self.most is None else f"from {self.least} to {self.most}"
            )
        elif self.kind is float:
            rule = f"a number above {self.above}" + ("" if self.most is None else f", at most {self.most}")
        else:
            rule = "True or False" if self.kind is bool else "a list of positive integers"
        return " or ".join((*(["None"] if self.default is None else []), *map(repr, self.choices), rule))

    def allows(self, value: Any) -> bool:
        if value is None or value in self.choices:
            return value is not None or self.default is None
        if self.kind is None:
            return not self.choices
        if self.kind is list:
            return isinstance(value, list | tuple) and bool(value) and all(type(n) is int and n > 0 for n in value)
        if self.kind is bool or isinstance(value, bool):
            return self.kind is bool and isinstance(value, bool)
        if not isinstance(value, int | float if self.kind is float else int):
            return False
        is_enough = value > self.above if self.kind is float else value >= self.least
        return is_enough and (self.most is None or value <= self.most)

    def check(self, name: str, value: Any) -> None:
        """Refuse another value with the rule and the meaning; `name` is that of the setting."""
        if not self.allows(value):
            raise ValueError(f"{name}={value!r}: expected {self.rule}. {self.meaning}".rstrip())


# Of several drafts.
ACCEPTANCE = Setting(
    "rejection",
    "When sampling, `rejection` draws tokens from the draft's own distribution, for chains only. `coupled` samples "
    "draft and target with the same random numbers, so a seed gives the same text as without a draft.",
    choices=("rejection", "coupled"),
)
# 16 nodes with the root. An H100 verifies them after 32K tokens in 1.04 of the time of one token, with fused steps; a
# core of a CPU takes 1.5 times as long, so there it is a chain.
WIDTHS = Setting(
    [4, 4, 4, 3],
    "Number of nodes of each level of the tree. `[1, 1, 1]` is a chain of three tokens.",
    list,
    on_cpu=[1, 1, 1, 1],
)

# Of all drafts.
COMMON = {
    "compile": Setting("auto", "How steps run.", choices=("auto", "graph", "fused", "compile", "off")),
    "gate": Setting(True, "True switches speculation off while it does not pay, False always speculates.", bool),
    "check_target": Setting(
        True, "True compares the first verification of a kind of target with a plain forward, False does not.", bool
    ),
    "forced_tokens": Setting(
        16, "Largest number of tokens that a grammar forces and that join a tree; 0 for none.", int, least=0
    ),
    "on_unsupported": Setting(
        "plain",
        "What becomes of a call that cannot be served with a draft: it is decoded without one, or is an error.",
        choices=("plain", "error"),
    ),
}

# Each length of keys has tables of its own, and hardly a text repeats this much without repeating more.
LONGEST_KEY = 16
# Of drafts whose trees n-grams may join.
NGRAMS = {
    "ngram_candidates": Setting(0, "Number of paths of n-grams; 0 for none.", int, least=0),
    "ngram_num_tokens": Setting(8, "Number of tokens of a path of n-grams.", int),
    "ngram_size": Setting(
        3, f"Number of last tokens that are searched for, at most {LONGEST_KEY}; then fewer.", int, most=LONGEST_KEY
    ),
    "ngram_source": Setting(
        "both",
        "`pool` ranks continuations by their counts, `lookup` by the length of the match. `both` takes the best one of "
        "the lookup, then those of the pool.",
        choices=("both", "pool", "lookup"),
    ),
    "ngram_preload": Setting(True, "Whether n-grams of the prompt count, or only those of the generated text.", bool),
}
