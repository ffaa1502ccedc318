"""One thread for tiny tensors, the gate as shipped, a tokenizer, and hypothesis profiles `short` (default) and `soak`.

HYPOTHESIS_PROFILE=soak chooses the other profile. The gate decides by measured time, so a test that counts steps asks
for `every_step_speculates`; SPECULATION_GATE=flip, where gates open and shut at random, finds those that forgot.
"""

import datetime
import gc
import logging
import math
import os

import pytest
import torch
from hypothesis import HealthCheck, settings

# A million objects are made until all tests are collected, and none of them is garbage.
gc.disable()

# Tiny models gain nothing from threads, and threads that wait for each other on a busy machine made one test
# file take 148 s instead of 14 s. A test that needs threads sets them itself.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of processes that tests start
# The few kernels of one test are not worth a pool of processes that import torch.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# Pytest listens to every logger that does not propagate, and torch would write it a report of all that it traces for
# compilation, in a tenth of the time of tracing.
trace_log = logging.getLogger("torch.__trace")
trace_log.handlers.clear()
trace_log.propagate = True

# Without a GPU Triton's kernels run in its interpreter, which must be chosen before they are defined.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# No deadline: the first call of a kernel or a model is slow and says nothing about the property.
# Derandomized: a red run must be red again; new examples are the business of the long profile.
settings.register_profile(
    "short", max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("soak", max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "short"))

GATE_OF = "hf_longspec.generation.special_cases.gate.gate_of"

# Which of all model types run today; the same in all processes of a run.
os.environ.setdefault("ARCHITECTURE_ROTATION", str(datetime.datetime.now(datetime.UTC).date().toordinal()))


def pytest_report_header() -> str:
    return f"model types: ARCHITECTURE_ROTATION={os.environ['ARCHITECTURE_ROTATION']}"


def pytest_collection_finish() -> None:
    """Leave what is imported by now, a million objects, out of later garbage collections and `gc.get_objects()`."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Let the interpreter tidy up at its end, or else Triton reports what is left as leaked."""
    if not hasattr(config, "workerinput"):  # of pytest-xdist, each of which would take a second more
        gc.unfreeze()


@pytest.fixture(autouse=True)
def one_thread_is_left():
    """Every test leaves one thread, as all later ones in its process would be slow otherwise."""
    yield
    assert torch.get_num_threads() == 1


@pytest.fixture(autouse=True)
def others_go_unnoticed():
    """No output says that the machine is busy, as it often is during tests."""
    from hf_longspec.generation import sequences

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sequences, "MOST_LOAD", math.inf)
        patch.setattr(sequences, "LEAST_SHARE", 0.0)
        yield


@pytest.fixture(autouse=os.environ.get("SPECULATION_GATE") == "flip")
def gates_flip():
    """Gates open and shut at random."""
    # imported here: the interpreter is chosen above
    from tests.gates import FlippingGate

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GATE_OF, lambda drafter, *_: FlippingGate(drafter))
        yield


@pytest.fixture
def every_step_speculates():
    """Calls have no gate, so that acceptance and steps can be counted.

    Not by the fixture `monkeypatch`: that one would then be undone after the fixtures that tidy up after a test.
    """
    # imported here: the interpreter is chosen above
    from tests.gates import ungated

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GATE_OF, ungated)
        yield


@pytest.fixture(scope="session")
def tokenizer():
    """One token per character, special tokens where the tiny targets have theirs."""
    # imported here: the interpreter is chosen above
    from tests.tiny_tokenizers import character_tokenizer

    return character_tokenizer(" abcdefghijklmnopqrstuvwxyz.,!?0123456789", padding_side="left")
