"""Break the rules that losslessness rests on, one at a time, and show that a test catches each.

    python -m tests.mutants              apply each mutation of tests/mutations to a copy of the sources, run its test
    python -m tests.mutants -k gate      those alone whose rule or file contains this text
    python -m tests.mutants --missing    print the files of the package that no mutation breaks

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
LINKED = ("benchmarks", "examples", "hub_cards", "pyproject.toml", "LICENSE")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--missing", action="store_true", help="print the files without a mutation and do nothing else")
    parser.add_argument("-k", dest="only", default="", help="only rules or files that contain this text")
    args = parser.parse_args()
    if args.missing:
        print("\n".join(files_without()))
        return 0
    chosen = [mutation for mutation in MUTATIONS if args.only in mutation.rule or args.only in mutation.file]
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


def files_without() -> list[str]:
    """Return the files of the package with functions that no mutation breaks."""
    package = ROOT / "hf_longspec"
    files = (path for path in package.rglob("*.py") if "def " in path.read_text(encoding="utf-8"))
    return sorted({path.relative_to(package).as_posix() for path in files} - {one.file for one in MUTATIONS})


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
