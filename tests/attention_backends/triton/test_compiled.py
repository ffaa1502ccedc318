"""The kernels in the shipped configurations, compiled for GPUs that need not be there (aot.py).

The interpreter cannot show that the real compiler takes the source, that no register is spilled to memory, that shared
memory suffices, or that barriers stand where they must. Compiling takes a second per kernel, so the short profile
compiles vectors of 128 numbers for sm_90; `pytest -m soak` compiles all configurations for all GPUs.
"""

import json
import re
from pathlib import Path

import pytest

from tests.attention_backends.triton.machine import python

triton = pytest.importorskip("triton", reason="triton is not installed")

SCRIPT = Path(__file__).with_name("aot.py")
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"

# Shared memory that one program may use, in bytes (CUDA programming guide, compute capabilities).
SHARED_MEMORY = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
# Most spilled bytes per thread, by capability, call and size of a vector: in float32 without a tree.
STACK_BYTES = {(89, "hybrid", 256): 8}
if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9):
    # in float32
    STACK_BYTES |= {(80, "hybrid", 64): 16, (80, "hybrid", 128): 40, (80, "tree", 128): 8}
    STACK_BYTES |= {(89, "tree", 64): 16, (89, "hybrid", 128): 32}
    STACK_BYTES |= {(90, "hybrid", 128): 32}  # 64 rows with scores: faster than 32 keys, which do not spill
    STACK_BYTES |= {(80, "hybrid", 256): 8}  # 16 rows of 16 bits with all features
    STACK_BYTES |= {(100, "hybrid", 128): 184}  # 64 rows with scores, as on sm_90
    STACK_BYTES |= {(90, "hybrid", 256): 128}  # 64 rows of 16 bits with all features; 16 bytes with a tree alone


def compile_kernels(capability, profile, folder):
    """The compiler's report on every kernel, by call, compiled afresh into an empty folder."""
    if not CUOBJDUMP.exists():
        pytest.skip("triton comes without cuobjdump")
    reports = {}
    for line in python(SCRIPT, capability, profile, TRITON_CACHE_DIR=str(folder)).splitlines():
        report = json.loads(line)
        reports.setdefault(report["call"], []).append(report)
    return reports


def assert_fits(reports, capability):
    for report in (report for call in reports if call != "spilling" for report in reports[call]):
        assert report["REG"] > 8  # the report was read
        assert report["SHARED"] <= SHARED_MEMORY[capability], report
        size = re.search(r"\b\d+\b", report["arguments"])  # the first number
        spilled = STACK_BYTES.get((capability, report["call"], int(size[0])), 0)
        assert report["STACK"] <= spilled and not report["LOCAL"], report
    for report in reports["move"]:
        assert report["SHARED"] == 0, report
        assert report["BARRIER"], f"{report}: a slot may be written before another thread has read it"


def test_no_spills(tmp_path):
    short = compile_kernels(90, "short", tmp_path)
    assert_fits(short, 90)
    kernels = {call: sorted(report["kernel"] for report in reports) for call, reports in short.items()}
    assert kernels["hybrid"] == ["attention_kernel"] * 2 + ["combine_kernel", "reduce_scores_kernel"]
    assert kernels["tree"] == ["attention_kernel", "combine_kernel"]
    assert kernels["move"] == ["_move_kernel"] * 4
    assert kernels["layer"] == ["_delta_kernel", "_gated_kernel"] + ["_norm_kernel"] * 2 + ["_rotate_kernel"] * 2


@pytest.mark.soak
@pytest.mark.parametrize("capability", list(SHARED_MEMORY))
def test_no_spills_in_any_configuration(capability, tmp_path):
    reports = compile_kernels(capability, "all", tmp_path)
    assert_fits(reports, capability)
    assert reports["spilling"][0]["STACK"] > 0  # a spill is seen
    # 16, 32 and 64 rows of 16 bits, or 128, less on old GPUs and with vectors of 256, each with four sets of features
    of_kernel = [report for report in reports["hybrid"] if report["kernel"] == "attention_kernel"]
    assert len(of_kernel) == (92 if capability >= 90 else 76)
