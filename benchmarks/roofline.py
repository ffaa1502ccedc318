"""Floors of decoding for a model on a GPU: the least time of a step, a verification and an iteration. Nothing is run.

A floor divides bytes by bandwidth and operations by arithmetic, so it says what no implementation can beat, and from
which acceptance on a drafter can pay at all. Rates come from data sheets unless measured ones are given.

    python benchmarks/roofline.py --target Llama-3.1-8B --gpu H200
    python benchmarks/roofline.py --target path/or/hub-id --tbs 3.1 --tflops 700 --batches 1,8 --contexts 8192,131072
"""

import argparse
import json

from hf_longspec.bench.arguments import integers
from hf_longspec.bench.roofline_report import Drafting, roofline_markdown, roofline_rows
from hf_longspec.bench.roofline_shapes import MACHINES, SHAPES, Machine, shape_of


def main(arguments: list[str] | None = None) -> None:
    made = argument_parser()
    args = made.parse_args(arguments)
    try:
        shape, machine = shape_of(args.target), machine_of(args)
        options = {
            "weight_bytes": args.weight_bytes,
            "kv_bytes": args.kv_bytes,
            "attention_tflops": args.attention_tflops,
        }
        points = [(batch, context) for batch in args.batches for context in args.contexts]
        drafting = Drafting(args.trees, args.gammas, args.ratio, args.branching, args.budget)
        rows = roofline_rows(shape, machine, points, args.nodes, drafting, **options)
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


def tree(text: str) -> list[list[int]]:
    return [[int(width) for width in part.split("+")] for part in text.split(",")]


def argument_parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, usual = made.add_argument, Drafting()
    add("--target", default="Llama-3.1-8B", help=f"{', '.join(SHAPES)}, a folder or a Hub id (default: %(default)s)")
    add("--gpu", choices=list(MACHINES), default="H200", help="default: %(default)s")
    add("--tbs", type=float, help="measured bandwidth, 10^12 bytes per second")
    add("--tflops", type=float, help="measured matrix products, 10^12 operations per second")
    add("--attention-tflops", type=float, help="what the attention kernel reaches (default: as --tflops)")
    add("--batches", type=integers, default=[1, 4, 8], help="default: 1,4,8")
    add("--contexts", type=integers, default=[8192, 32768, 131072], help="default: 8192,32768,131072")
    add("--nodes", type=integers, default=[17, 69], help="nodes of a verification (default: 17,69)")
    add("--weight-bytes", type=float, default=2.0, help="2 for bfloat16, 1 for FP8, 0.5 for 4 bits (default: 2)")
    add("--kv-bytes", type=float, default=2.0, help="likewise for the cache (default: 2)")
    add("--trees", type=tree, default=usual.trees, help="LongSpec's widths (default: 4+16+16+16+16,4+4+4+4)")
    add("--gammas", type=integers, default=usual.gammas, help="drafted tokens of SpecAttn (default: 6,9)")
    add("--ratio", type=float, default=usual.ratio, help="share that SpecAttn drafts over (default: %(default)s)")
    add("--branching", type=integers, default=usual.branching, help="TokenSwift's children (default: 1,3,3,3)")
    add("--budget", type=int, default=usual.budget, help="of TokenSwift's partial cache (default: %(default)s)")
    add("--json", action="store_true", help="JSON in place of tables")
    return made


if __name__ == "__main__":
    main()
