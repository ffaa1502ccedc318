"""The kernels in the shipped configurations, compiled for GPUs that need not be there (aot.py).

The interpreter cannot show that the real compiler takes the source, that no register is spilled to memory, that shared
memory suffices, or that the barrier of the move stands where it must. Compiling takes a second per kernel, so
the short profile compiles vectors of 128 numbers for sm_90; `pytest -m soak` compiles all configurations for all GPUs.
"""

import json
from pathlib import Path

import pytest

from hf_longspec.attention_backends.triton.tiles import Gpu, hybrid_config
from tests.attention_backends.triton.machine import python

triton = pytest.importorskip("triton", reason="triton is not installed")

SCRIPT = Path(__file__).with_name("aot.py")
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"

# Shared memory that one program may use, in bytes (CUDA programming guide, compute capabilities).
SHARED_MEMORY = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
# Spilled bytes per thread with vectors of 256: the tree kernel with an additive mask, in float32 on sm_89 and
# in 16 bits on sm_90, and the sparse kernel with a softcap in float32 on sm_89.
STACK_BYTES = {(89, "tree"): 24, (90, "tree"): 8, (89, "sparse"): 32}


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
        assert report["REG"] > 16  # the report was read
        # sm_86 and sm_89, which run what is compiled for sm_80, have least
        most = SHARED_MEMORY[89] if report["kernel"] == "sparse_kernel" else SHARED_MEMORY[capability]
        assert report["SHARED"] <= most, report
        spilled = STACK_BYTES.get((capability, report["call"]), 0) if "256" in report["arguments"] else 0
        assert report["STACK"] <= spilled and not report["LOCAL"], report
    for report in reports["move"]:
        assert report["SHARED"] == 0, report
        assert report["BARRIER"], f"{report}: a slot may be written before another thread has read it"


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    return compile_kernels(90, "short", tmp_path_factory.mktemp("kernels"))


def test_no_spills(short):
    assert_fits(short, 90)
    kernels = {call: sorted(report["kernel"] for report in reports) for call, reports in short.items()}
    assert kernels["hybrid"] == ["attention_kernel"] * 9 + ["combine_kernel"] * 2
    assert kernels["tree"] == ["attention_kernel"] * 2 + ["combine_kernel"]
    assert kernels["sparse"].count("sparse_kernel") == 3
    assert kernels["move"] == ["_move_kernel"] * 4


def test_the_report_shows_a_spill(short):
    (report,) = short["spilling"]
    assert report["STACK"] > 0


@pytest.mark.soak
@pytest.mark.parametrize("capability", list(SHARED_MEMORY))
def test_no_spills_in_any_configuration(capability, tmp_path):
    reports = compile_kernels(capability, "all", tmp_path)
    assert_fits(reports, capability)
    assert sum(report["kernel"] == "prefix_kernel" for call in reports for report in reports[call]) == 38
    assert sum(report["kernel"] == "sparse_kernel" for report in reports["sparse"]) == 8


def test_the_smallest_gpu_gets_smaller_tiles():
    large = hybrid_config(64, 128, 128, 2, Gpu(SHARED_MEMORY[80], False))
    small = hybrid_config(64, 128, 128, 2, Gpu(SHARED_MEMORY[89], False))
    assert (large.block_keys, small.block_keys) == (64, 32)
    assert small == large._replace(block_keys=32)
