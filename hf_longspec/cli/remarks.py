"""What the numbers of a comparison say, in sentences that are derived from them."""

from dataclasses import dataclass, field

from .measuring import Measurement

HF, PLAIN = "HF generate", "plain loop"

# Two runs of one thing differ by a few percent; below this no order is claimed.
SAME_SPEED = 0.05

# Greedy text of small models falls into loops, which any drafter predicts. More repetition than this is pointed out.
LOOP_LENGTH, LOOPING = 4, 0.5


@dataclass
class Group:
    """Everything measured in one dtype: the stock loop, our loop without a draft, and the drafts.

    Args:
        dtype (`str`): Name of the type.
        rows (`list[Measurement]`): In that order.
        context (`int`): Tokens of the prompt.
        checks (`list[str]`): What the last column says of each row.
        details (`list[str]`): Sentences on rows that failed their check.
    """

    dtype: str
    rows: list[Measurement]
    context: int
    checks: list[str] = field(default_factory=list)
    details: list[str] = field(default_factory=list)

    def speed_ratio(self, row: Measurement) -> float:
        """Speed of decoding, relative to the stock loop."""
        return _ratio(row.tokens_per_second, self.rows[0].tokens_per_second)

    @property
    def drafted(self) -> dict[str, Measurement]:
        """The rows that were decoded with a draft, by name."""
        return {row.name: row for row in self.rows[2:]}

    def gain(self, name: str) -> float:
        """Speed of decoding with a draft, relative to our loop without one."""
        return _ratio(self.drafted[name].tokens_per_second, self.rows[1].tokens_per_second)


def remarks(groups: list[Group], native_bfloat16: bool | None) -> list[str]:
    """The ratios of every group, why a draft did not pay where it did not, and what makes the numbers special."""
    timed = [group for group in groups if all(row.tokens_per_second for row in group.rows)]
    said = [_ratios(group) for group in timed]
    for name in timed[0].drafted if timed else ():
        if unpaid := [group for group in timed if group.gain(name) < 1 + SAME_SPEED]:
            said.append(_why_not(name, unpaid))
    if (repeated := max((repetition(group.rows[-1].tokens) for group in groups), default=0.0)) > LOOPING:
        said.append(
            f"{repeated:.0%} of the {LOOP_LENGTH}-token sequences of the text have occurred in it before: it repeats "
            "itself, as greedy text of small models does, so expect a lower tau on text that does not."
        )
    if native_bfloat16 is False and any(group.dtype == "bfloat16" for group in timed):
        said.append(_emulation({group.dtype: group for group in timed}))
    return said


def _ratios(group: Group) -> str:
    stock, plain = group.rows[:2]
    said = [f"the {plain.name} ran at {group.speed_ratio(plain):.2f}x the speed of {stock.name}"]
    for name, row in group.drafted.items():
        accepted = _ratio((row.tau or 1.0) - 1.0, row.drafted)
        said.append(
            f"{name} at {group.gain(name):.2f}x that of the {plain.name} ({accepted:.0%} of its drafts accepted)"
        )
    return f"{group.dtype}: {', '.join(said)}."


def _why_not(name: str, groups: list[Group]) -> str:
    where = " and ".join(group.dtype for group in groups)
    contexts = " and ".join(dict.fromkeys(str(group.context) for group in groups))
    outcome = "slower than" if all(group.gain(name) < 1 - SAME_SPEED for group in groups) else "no faster than"
    finding = f"In {where} {name} is {outcome} decoding without a draft here"
    if name != "SpecAttn":
        return f"{finding}: drafting cost as much as it saved, or more."
    return (
        f"{finding}: it rereads all weights of the model for every drafted token and saves only on reading the cache, "
        f"which does not make up for it with this model at {contexts} tokens."
    )


def _emulation(groups: dict[str, Group]) -> str:
    detected = "This machine has no bfloat16 instructions, so PyTorch emulates them"
    if "float32" not in groups:
        return f"{detected}: do not take its bfloat16 speeds for those of other machines."
    if groups["bfloat16"].context != groups["float32"].context:
        return f"{detected}: do not compare the speeds of the two groups, whose prompts differ in length."
    half, full = (groups[name].rows[0] for name in ("bfloat16", "float32"))
    decoding = _ratio(half.tokens_per_second, full.tokens_per_second)
    prefill = _ratio(half.first_token_seconds, full.first_token_seconds)
    return (
        f"{detected}: {half.name} in bfloat16 decoded at {decoding:.2f}x its float32 speed and took {prefill:.1f}x as "
        "long for the first token."
    )


def repetition(tokens: tuple[int, ...]) -> float:
    """Share of the sequences of `LOOP_LENGTH` tokens that have occurred before.

    >>> repetition((1, 2, 3, 1, 2, 3, 1))
    0.25
    """
    grams = list(zip(*(tokens[start:] for start in range(LOOP_LENGTH)), strict=False))
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0
