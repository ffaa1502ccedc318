"""What the gate would choose at the costs that GPUs were measured to have, for drafts of several chances.

Costs are those of captured and fused iterations in the result files of `gpu.py`, by card, context and batch: those of a
step without a draft, and of LongSpec and SpecAttn. Sizes between lie on the line between them. Texts are simulated: the
best candidate of a level is right with the given chance, and the next ones where all better ones are wrong with 0.4 of
it. There is no GPU in this, and no text.

    python -m benchmarks.gate_replay > benchmarks/results/gate-replay.md
"""

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

from benchmarks.harness import RESULTS
from tests.generation.made_up_machine import Machine, always

FILES = {"H100": ("gpu", "gpu-more"), "H200": ("gpu-h200", "gpu-h200-more")}
CHANCES = (0.3, 0.5, 0.7, 0.85)
TOKENS, SEEDS = 2000, range(4)
SHAPES = {
    "LongSpec, 4+4+4+3": (4, 4, 4, 3),
    "LongSpec, 4+16+16+16+11": (4, 16, 16, 16, 11),
    "LongSpec, chain of three": (1, 1, 1),
    "SpecAttn, gamma 6": (1,) * 6,
    "SpecAttn, int4, gamma 6": (1,) * 6,
}


def recorded() -> dict[tuple[str, int, int], dict[str, tuple[int, float]]]:
    """Return the nodes and milliseconds of iterations by card, context and batch, and by draft."""
    found: dict[tuple[str, int, int], dict[str, tuple[int, float]]] = {}
    for card, names in FILES.items():
        for name in names:
            for line in (RESULTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
                row = json.loads(line)
                if row["kind"] == "iteration" and row["mode"] == "fused":
                    place = card, row["context"], row["batch"]
                    found.setdefault(place, {})[row["draft"]] = row["nodes"], row["ms"]["median"]
    return found


def line(first: tuple[int, float], last: tuple[int, float]) -> Callable[[int], float]:
    """Return the function on the line through two points."""
    (low, start), (high, end) = first, last
    return lambda size: start + (end - start) * (size - low) / (high - low)


def replayed(plain: float, nodes: int, milliseconds: float, widths: tuple[int, ...], chance: float) -> dict[str, Any]:
    """Run texts, and return the usual choice, the speed over plain steps and over the best fixed choice."""
    costs = line((1, plain), (nodes, milliseconds))
    speeds, against, steps = [], [], Counter[tuple[int, ...]]()
    for seed in SEEDS:
        machine = Machine(costs, lambda levels: 0.0, always(chance), widths, seed=seed, sizes=2)
        machine.further = 0.4 * chance
        machine.run(TOKENS)
        steps.update(machine.steps)
        speeds.append(plain * machine.emitted / machine.now)
        against.append(machine.best() * machine.emitted / machine.now)
    usual, count = steps.most_common(1)[0]
    share = count / sum(steps.values())
    name = "+".join(map(str, usual)) if usual else "no draft"
    return {"choice": f"{name} ({share:.0%})", "speed": sum(speeds) / len(speeds), "best": sum(against) / len(against)}


def main() -> None:
    print("# The gate at the recorded costs of GPUs\n\n" + str(__doc__).split("\n\n")[1] + "\n")
    print("| card | context | batch | draft | cost in plain steps | chance | choice | x plain steps | x best fixed |")
    print("|---|---|---|---|---|---|---|---|---|")
    for (card, context, batch), drafts in sorted(recorded().items()):
        if "plain loop" not in drafts:
            continue
        plain = drafts["plain loop"][1]
        for draft, widths in SHAPES.items():
            if draft not in drafts:
                continue
            nodes, milliseconds = drafts[draft]
            for chance in CHANCES:
                row = replayed(plain, nodes, milliseconds, widths, chance)
                cost = milliseconds / plain
                cells = card, context, batch, draft, f"{cost:.2f}", chance, row["choice"], f"{row['speed']:.2f}"
                print(f"| {' | '.join(map(str, cells))} | {row['best']:.2f} |")


if __name__ == "__main__":
    main()
