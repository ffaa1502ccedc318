"""The kernels in the shipped configurations, compiled for GPUs that need not be there (compile_kernels.py).

What the interpreter cannot know: that the real compiler takes the source, that no register is spilled to memory, and
that shared memory suffices. Compiling needs a second per variant, so the short profile compiles vectors of 128 numbers
only; `pytest -m soak` compiles all of them.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_longspec.attention_backends.triton.config import prefix_config

triton = pytest.importorskip("triton", reason="triton is not installed")

SCRIPT = Path(__file__).with_name("compile_kernels.py")
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
pytestmark = pytest.mark.skipif(not CUOBJDUMP.exists(), reason="triton comes without cuobjdump")

# Shared memory that one program may use, in bytes (CUDA programming guide, compute capabilities).
SHARED_MEMORY = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
# The tree kernel in float32, with vectors of 256 and an additive mask, spills 24 bytes per thread on sm_89.
STACK_BYTES = {89: 24}


def compile_kernels(arch, profile, folder):
    """What the compiler reports of every variant."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder)}
    command = [sys.executable, str(SCRIPT), str(arch), profile]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def assert_fits(reports, arch):
    for report in reports:
        assert report["REG"] > 16  # the report was read
        assert report["SHARED"] <= SHARED_MEMORY[arch], report
    most = STACK_BYTES.get(arch, 0)
    assert [report for report in reports if report["STACK"] > most or report["LOCAL"]] == []


@pytest.mark.parametrize("arch", [90, *(pytest.param(arch, marks=pytest.mark.soak) for arch in (80, 100))])
def test_no_spills(arch, tmp_path):
    reports = compile_kernels(arch, "short", tmp_path)
    assert_fits(reports, arch)
    assert [report["kernel"] for report in reports] == ["prefix"] * 3 + ["tree"] * 2 + ["combine"]


@pytest.mark.soak
@pytest.mark.parametrize("arch", list(SHARED_MEMORY))
def test_no_spills_in_any_configuration(arch, tmp_path):
    reports = compile_kernels(arch, "all", tmp_path)
    assert_fits(reports, arch)
    assert len(reports) == 77


def test_the_report_shows_a_spill(tmp_path):
    (report,) = compile_kernels(90, "spilling", tmp_path)
    assert report["STACK"] > 0


def test_the_smallest_gpu_gets_smaller_tiles():
    large = prefix_config(64, 128, 128, 2, SHARED_MEMORY[90])
    small = prefix_config(64, 128, 128, 2, SHARED_MEMORY[89])
    assert (large.block_keys, small.block_keys) == (64, 32)
    assert small == large._replace(block_keys=32)
