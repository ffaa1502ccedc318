"""One verification behind 16K tokens: our backend against the masked block of transformers' `sdpa`.

Attention alone, and the whole forward of a random model with four layers of an 8B Llama, over 1, 8, 17 and 64 nodes. A
single node is what plain decoding runs: there transformers needs no mask. Needs about 8 GiB of memory.

    python benchmarks/verification.py
"""

import argparse
from pathlib import Path

from hf_longspec.bench.arguments import add_repeats, integers, names, parser, set_threads
from hf_longspec.bench.ceilings import read_gb_per_second
from hf_longspec.bench.progress import Progress
from hf_longspec.bench.reports import verification_report
from hf_longspec.bench.results import ResultFile
from hf_longspec.bench.timing import TimeGuard
from hf_longspec.bench.verification import VerificationBenchmark
from hf_longspec.bench.verification_inputs import Shape

ROOT = Path(__file__).resolve().parents[1]


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    set_threads(args.threads)
    guard = TimeGuard(args.minutes)
    progress = Progress(total=2 * len(args.nodes) * len(args.dtypes), quiet=args.quiet)
    settings = {"shape": vars(args.shape), "context": args.context, "repeats": args.repeats}
    with ResultFile(args.output, "verification", verification_report, guard, settings) as results:
        bandwidth = read_gb_per_second()
        results.write("ceilings", read_gb_per_second=round(bandwidth, 1))
        benchmark = VerificationBenchmark(
            args.shape,
            args.context,
            args.nodes,
            repeats=args.repeats,
            bandwidth=bandwidth,
            results=results,
            progress=progress,
        )
        benchmark.run(args.dtypes)
    progress.close()
    print(args.output.with_suffix(".md").read_text(encoding="utf-8"))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    made = parser(__doc__, ROOT / "benchmarks" / "results" / "verification.jsonl", minutes=6)
    add_repeats(made)
    made.add_argument("--context", type=int, default=16384, help="tokens before the nodes (default: %(default)s)")
    made.add_argument("--nodes", type=integers, default=[1, 8, 17, 64], help="tree sizes (default: 1,8,17,64)")
    made.add_argument("--dtypes", type=names, default=["float32", "bfloat16"], help="default: float32,bfloat16")
    made.add_argument("--shape", type=shape, default=Shape(), help="sizes of the model, such as layers=2,hidden=512")
    return made.parse_args(arguments)


def shape(text: str) -> Shape:
    """`layers=2,hidden=512` as sizes."""
    pairs = (pair.split("=") for pair in text.split(","))
    return Shape(**{name: int(size) for name, size in pairs})


if __name__ == "__main__":
    main()
