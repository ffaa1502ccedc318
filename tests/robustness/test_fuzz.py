"""Random calls of `generate` with a draft against the text without one; see tests/robustness/fuzz.py.

FUZZ_SEED=<number> chooses other calls. A failure prints the script of the smallest call that fails in the same way.
"""

import os
import runpy

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.generation.conftest import graphs
from tests.robustness.fuzz import calls, script_of

__all__ = ["graphs"]
SEED = int(os.environ.get("FUZZ_SEED", 0))
# The first call of every chunk is the simplest one.
CHUNKS, OF_CHUNK, SAMPLE, COMPILED = 50, 41, 10, 3
OF_RUN = 5  # later examples of one run of hypothesis resemble earlier ones
GENEROUS = {"deadline": None, "database": None, "report_multiple_bugs": False}
GENEROUS |= {"suppress_health_check": list(HealthCheck)}


def check(path, chunk, count, phases=(Phase.generate, Phase.shrink), **how):
    """Make that many different calls; the first that fails is shrunk and printed."""
    path, passed, failed, run = path / "call.py", set(), [], 10_000 * (CHUNKS * SEED + chunk)

    def try_out(call):
        script = script_of(call)
        if not failed and (script in passed or len(passed) == count):
            return
        path.write_text(script)
        try:
            runpy.run_path(str(path))
        except Exception:
            failed.append(script)
            raise
        passed.add(script)

    while len(passed) < count:
        run += 1
        every_call = settings(max_examples=OF_RUN, phases=phases, **GENEROUS)(given(calls(**how))(try_out))
        try:
            seed(run)(every_call)()
        except Exception as error:
            if not failed:  # no call was made
                raise
            # the last call that failed is the smallest
            pytest.fail(f"FUZZ_SEED={SEED}: {type(error).__name__}: {error}\n\n{failed[-1]}", pytrace=False)


def test_some_calls(tmp_path):
    check(tmp_path, 0, SAMPLE)


@pytest.mark.soak
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_many_calls(chunk, tmp_path):
    check(tmp_path, chunk, OF_CHUNK)


@pytest.mark.soak
@pytest.mark.parametrize("chunk", range(10))
def test_compiled_calls(chunk, tmp_path, graphs):
    """Few, and not shrunk: a call traces its steps for seconds."""
    check(tmp_path, chunk, COMPILED, phases=(Phase.generate,), compiles=True)
