"""Break the rules that losslessness rests on, one at a time, and show that a test catches each.

    python -m tests.mutants            apply every mutation to a copy of the sources and run its test
    python -m tests.mutants --table    print the table of tests/mutations.md

A mutation replaces one piece of source, which must occur exactly once, and its test must fail then. The test must also
pass on the unchanged copy.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.mutations import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("hf_longspec", "tests", "benchmarks", "hub_cards", "pyproject.toml", "LICENSE")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="print the table and do nothing else")
    parser.add_argument("-k", dest="only", default="", help="only rules that contain this text")
    args = parser.parse_args()
    if args.table:
        print(table())
        return 0
    chosen = [mutation for mutation in MUTATIONS if args.only in mutation.rule]
    survived = [mutation.rule for mutation in chosen if not is_caught(mutation)]
    print(f"{len(chosen) - len(survived)} of {len(chosen)} mutations were caught")
    return int(bool(survived))


def table() -> str:
    """Return the mutations as a Markdown table."""
    rows = [f"| {one.rule} | `{one.file}` | `{one.test}` |" for one in MUTATIONS]
    return "\n".join(["| rule that is broken | in `hf_longspec/` | test that fails |", "|---|---|---|", *rows])


def is_caught(mutation: Mutation) -> bool:
    """Apply a mutation to a copy of the sources, run its test, and report the result."""
    with TemporaryDirectory() as folder:
        for name in COPIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile
            copy(ROOT / name, Path(folder) / name)
        path = Path(folder) / "hf_longspec" / mutation.file
        source = path.read_text(encoding="utf-8")
        if source.count(mutation.old) != 1:
            raise SystemExit(f"{mutation.file}: {mutation.old!r} occurs {source.count(mutation.old)} times, not once")
        path.write_text(source.replace(mutation.old, mutation.new), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", mutation.test]
        result = subprocess.run(
            command, cwd=folder, env=os.environ | {"PYTHONPATH": folder}, capture_output=True, text=True
        )
    caught = result.returncode == 1  # 1: tests failed; others: nothing ran
    print(f"{'caught  ' if caught else 'SURVIVED'} {mutation.rule} ({mutation.test})", flush=True)
    return caught


if __name__ == "__main__":
    raise SystemExit(main())
