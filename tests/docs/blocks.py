"""The documents of the repository, and the blocks of code in them."""

import re
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
FOLDERS = ("benchmarks", "examples", "recipes")
ELSEWHERE = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", *(f"{folder}/README.md" for folder in FOLDERS))
PAGES = [*ELSEWHERE, "hub_cards/README.md", *sorted(f"docs/{path.name}" for path in (PROJECT / "docs").glob("*.md"))]
FENCE = re.compile(r"(?:^<!-- not run: (?P<reason>[^\n]+) -->\n)?^```(?P<language>\w*)\n(?P<code>.*?)^```", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """One fenced block: the line that its code begins at, and why it is not run, if it is not."""

    page: str
    line: int
    language: str
    code: str
    reason: str | None


def read(page: str) -> str:
    return (PROJECT / page).read_text(encoding="utf-8")


def blocks_of(page: str) -> list[Block]:
    """All blocks of a page, in order."""
    text = read(page)
    return [
        Block(page, text.count("\n", 0, match.start("code")) + 1, match["language"], match["code"], match["reason"])
        for match in FENCE.finditer(text)
    ]


# What differs from run to run in a line about a call: its speed, and the counts where the gate pauses drafting.
TAU = re.compile(r"(?<=tau )\d+\.\d+")
CHANGING = re.compile(
    r" *\d+ plain steps,|, on a busy machine \(.*?\)|, [\d.]+x of no draft|"
    r" *(?<![\w.])\d[\d./]*(?= verifications| drafted tokens| tokens/s|x generate| s of prefill)"
)


def lasting(output: str) -> tuple[str, list[float]]:
    """The words of an output that every run prints, and its taus, which rounding may change a little."""
    return CHANGING.sub("", TAU.sub("", output)), [float(tau) for tau in TAU.findall(output)]


def prose_of(page: str) -> str:
    """A page without its blocks."""
    return FENCE.sub("", read(page))
