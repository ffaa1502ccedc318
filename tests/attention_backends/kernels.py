"""What the tests of single Triton kernels share: where they run, and the compiler's report on them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy
import torch

from hf_longspec.attention_backends import triton_runtime

ROOT = Path(__file__).resolve().parents[2]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CAPABILITIES = (80, 90, 100)
# 3.6 calls int() on an array of one number, which numpy refuses from 2.4 on.
BROKEN_INTERPRETER = (
    triton_runtime.INTERPRETED
    and triton_runtime.triton.__version__.startswith("3.6.")
    and numpy.lib.NumpyVersion(numpy.__version__) >= "2.4.0"
)


def python(*arguments, **environment):
    """Standard output of a Python process of its own, in which Triton compiles."""
    command = [sys.executable, *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "0"} | environment
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def compiled(module, calls, folder):
    """What aot.py says about the launches of `module.calls`, compiled afresh into an empty folder."""
    arguments = ("tests/attention_backends/aot.py", module, calls, *CAPABILITIES)
    return [json.loads(line) for line in python(*arguments, TRITON_CACHE_DIR=str(folder)).splitlines()]
