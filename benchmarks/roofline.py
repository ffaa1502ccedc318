"""Floors of decoding for a model on a GPU: the least time of a step, a verification and an iteration. Nothing is run.

A floor divides bytes by bandwidth and operations by arithmetic, so no implementation can be faster. It also gives the
acceptance from which a drafter can pay. Rates come from data sheets unless measured ones are given.

    python -m benchmarks.roofline --target Llama-3.1-8B --gpu H200
    python -m benchmarks.roofline --target path/or/hub-id --tbs 3.1 --tflops 700 --batches 1,8 --contexts 8192,131072
"""

import argparse
import json
from collections.abc import Sequence
from itertools import product
from typing import Any

from benchmarks.floors import CONFIGS, MACHINES, Machine, Roofline, TargetShape, shape_of
from benchmarks.harness import integers, trees
from benchmarks.pages import Columns, fixed
from hf_longspec.bench.report import table


def roofline_rows(shape: TargetShape, machine: Machine, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per batch size and context of the command line.

    Returns:
        `list[dict]`, ready for JSON: times in milliseconds, sizes in bytes.
    """
    rows = []
    for batch, context in product(args.batches, args.contexts):
        at = Roofline(shape, machine, batch, context, args.weight_bytes, args.kv_bytes, args.attention_tflops)
        drafted = [
            *(at.longspec(widths) for widths in args.trees),
            *(at.specattn(gamma, args.ratio) for gamma in args.gammas),
            *(at.tokenswift(args.branching, budget=budget) for budget in (args.budget, None)),
        ]
        rows.append(
            {
                "target": shape.name,
                "machine": machine.name,
                "tb_per_second": machine.tb_per_second,
                "tflops": machine.tflops,
                "batch": batch,
                "context": context,
                "fits": at.fits,
                "weight_bytes_read": shape.weights_read(batch) * at.weight_bytes,
                "kv_bytes_per_token": at.kv_bytes_per_token,
                "ar_ms": at.ar_ms,
                "verify_ms": {str(count): at.verify_ms(count) for count in args.nodes},
                "masked_verify_ms": {str(count): at.masked_verify_ms(count) for count in args.nodes},
                "iterations": [iteration.to_dict() for iteration in drafted],
            }
        )
    return rows


def roofline_markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Two tables: a step and a verification, then the drafters."""
    first = rows[0]
    facts = (
        f"Floors, computed and not measured: {first['target']} on {first['machine']} "
        f"({first['tb_per_second']:g} TB/s, {first['tflops']:g} TFLOP/s). A forward of one token reads "
        f"{first['weight_bytes_read'] / 1e9:.2f} GB of weights; keys and values take "
        f"{first['kv_bytes_per_token'] / 1024:g} KiB per token. A verification in brackets repeats the keys and values "
        "of every group, as transformers does under a mask."
    )
    place: dict[str, Any] = {
        "batch": "batch",
        "context": lambda row: f"{row['context']}" + ("" if row["fits"] else " (does not fit)"),
    }
    steps = place | {"step, ms": fixed("ar_ms", 2)}
    for count in first["verify_ms"]:
        steps[f"verify {count}, ms"] = lambda row, count=count: (
            f"{row['verify_ms'][count]:.2f} ({row['masked_verify_ms'][count]:.2f})"
        )
    drafters: Columns = {
        **place,
        "drafter": "drafter",
        **{f"{name}, ms": fixed(f"{name}_ms", 2) for name in ("draft", "verify", "iteration")},
        "c": fixed("c", 3),
        "break-even tau": fixed("break_even_tau", 2),
        "at most": lambda row: f"{row['max_speedup']:.2f}x (tau {row['max_tau']})",
    }
    drafted = [row | iteration for row in rows for iteration in row["iterations"]]
    return "\n\n".join([facts, table(rows, steps), table(drafted, drafters)])


def main(arguments: list[str] | None = None) -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = made.add_argument
    add("--target", default="Llama-3.1-8B", help=f"{', '.join(CONFIGS)}, a folder or a Hub id (default: %(default)s)")
    add("--gpu", choices=list(MACHINES), default="H200", help="default: %(default)s")
    add("--tbs", type=float, help="measured bandwidth, 10^12 bytes per second")
    add("--tflops", type=float, help="measured matrix products, 10^12 operations per second")
    add("--attention-tflops", type=float, help="what the attention kernel reaches (default: as --tflops)")
    add("--batches", type=integers, default="1,4,8", help="default: %(default)s")
    add("--contexts", type=integers, default="8192,32768,131072", help="default: %(default)s")
    add("--nodes", type=integers, default="16,64", help="nodes of a verification (default: %(default)s)")
    add("--weight-bytes", type=float, default=2.0, help="2 for bfloat16, 1 for FP8, 0.5 for 4 bits (default: 2)")
    add("--kv-bytes", type=float, default=2.0, help="likewise for the cache (default: 2)")
    add("--trees", type=trees, default="4+16+16+16+11,4+4+4+3", help="of LongSpec (default: %(default)s)")
    add("--gammas", type=integers, default="6,9", help="drafted tokens of SpecAttn (default: %(default)s)")
    add("--ratio", type=float, default=0.07, help="share that SpecAttn drafts over (default: %(default)s)")
    add("--branching", type=integers, default="1,3,3,3", help="TokenSwift's children (default: %(default)s)")
    add("--budget", type=int, default=4096, help="of TokenSwift's partial cache (default: %(default)s)")
    add("--json", action="store_true", help="JSON in place of tables")
    args = made.parse_args(arguments)
    try:
        rows = roofline_rows(shape_of(args.target), machine_of(args), args)
    except ValueError as error:
        made.error(str(error))
    print(json.dumps(rows, indent=2) if args.json else roofline_markdown(rows))


def machine_of(args: argparse.Namespace) -> Machine:
    """The GPU of `--gpu`, with measured rates in place of those of its data sheet."""
    if (args.tbs is None) != (args.tflops is None):
        raise ValueError("--tbs and --tflops belong together: pass both measured rates, or neither.")
    if args.tbs is None:
        return MACHINES[args.gpu]
    return Machine(f"{args.gpu}, measured rates", args.tbs, args.tflops, MACHINES[args.gpu].memory_gb)


if __name__ == "__main__":
    main()
