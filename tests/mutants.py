"""Break the rules that losslessness rests on, one at a time, and show that a test catches each.

    python -m tests.mutants            apply every mutation to a copy of the sources and run its test
    python -m tests.mutants --table    print the table of tests/mutations.md

A mutation replaces one piece of source, which must occur exactly once, and its test must fail then. The test must also
pass on the unchanged copy.
"""

import argparse
import os
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.mutations import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("hf_longspec", "tests")
LINKED = ("benchmarks", "hub_cards", "pyproject.toml", "LICENSE")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="print the table and do nothing else")
    parser.add_argument("-k", dest="only", default="", help="only rules that contain this text")
    args = parser.parse_args()
    if args.table:
        print(table())
        return 0
    chosen = [mutation for mutation in MUTATIONS if args.only in mutation.rule]
    with TemporaryDirectory() as name:
        folder = Path(name)
        for part in COPIED:
            shutil.copytree(ROOT / part, folder / part)
        for part in LINKED:
            (folder / part).symlink_to(ROOT / part)
        import_libraries()
        survived = [mutation.rule for mutation in chosen if not is_caught(mutation, folder)]
    print(f"{len(chosen) - len(survived)} of {len(chosen)} mutations were caught")
    return int(bool(survived))


def table() -> str:
    """Return the mutations as a Markdown table."""
    rows = [f"| {one.rule} | `{one.file}` | `{one.test}` |" for one in MUTATIONS]
    return "\n".join(["| rule that is broken | in `hf_longspec/` | test that fails |", "|---|---|---|", *rows])


def import_libraries() -> None:
    """Import what takes seconds here, for all the processes that run a test."""
    os.environ.setdefault("TRITON_INTERPRET", "1")  # as tests/conftest.py does, before Triton is imported
    import torch._dynamo
    import transformers.generation
    import transformers.modeling_utils  # noqa: F401

    torch.set_num_threads(1)


def is_caught(mutation: Mutation, folder: Path) -> bool:
    """Apply a mutation to the copy of the sources, run its test, undo it, and report the result."""
    path = folder / "hf_longspec" / mutation.file
    source = path.read_text(encoding="utf-8")
    if source.count(mutation.old) != 1:
        raise SystemExit(f"{mutation.file}: {mutation.old!r} occurs {source.count(mutation.old)} times, not once")
    path.write_text(source.replace(mutation.old, mutation.new), encoding="utf-8")
    status = run(folder, "-q", "-x", "-p", "no:cacheprovider", mutation.test, is_silent=True)
    caught = status == pytest.ExitCode.TESTS_FAILED  # others: nothing ran
    path.write_text(source, encoding="utf-8")
    print(f"{'caught  ' if caught else 'SURVIVED'} {mutation.rule} ({mutation.test})", flush=True)
    return caught


def run(folder: Path, *arguments: str, is_silent: bool = False) -> int:
    """Run pytest in a copy of the sources, in a fork of this process; return its exit status."""
    process = os.fork()
    if not process:
        status = 255
        try:
            os.chdir(folder)
            os.environ["PYTHONPATH"] = sys.path[0] = str(folder)
            for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
                del sys.modules[name]
            if is_silent:
                silent = os.open(os.devnull, os.O_WRONLY)
                os.dup2(silent, 1), os.dup2(silent, 2)
            status = pytest.main([*arguments])
        finally:
            sys.stdout.flush()
            os._exit(int(status))
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


if __name__ == "__main__":
    raise SystemExit(main())
