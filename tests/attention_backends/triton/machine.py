"""Where the tests of Triton kernels run, and processes of their own."""

import inspect
import os
import subprocess
import sys
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from unittest import mock

import numpy
import torch
from torch.utils._pytree import tree_map_only

from hf_longspec.attention_backends.triton import config

ROOT = Path(__file__).resolve().parents[3]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# 3.6 calls int() on an array of one number, which numpy refuses from 2.4 on.
BROKEN_INTERPRETER = (
    config.INTERPRETED
    and config.triton.__version__.startswith("3.6.")
    and numpy.lib.NumpyVersion(numpy.__version__) >= "2.4.0"
)


def on(device, *values):
    """Tensors, and those in containers, on the device; everything else as it is."""
    return tree_map_only(torch.Tensor, lambda x: x.to(device), values)


def counted(kernel, launches):
    """A kernel that notes its launches: `(options, grid)`."""

    class Counted:
        def __getitem__(self, grid):
            def run(*args, **options):
                launches.append((options, grid))
                return kernel[grid](*args, **options)

            return run

    return Counted()


@contextmanager
def language_listed_once():
    """Triton's interpreter lists its whole language for every call of a function in a kernel, a third of its time."""
    interpreter, names = import_module("triton.runtime.interpreter"), {}

    def patch_builtin(package, builder, *scope):
        if package not in names:  # before anything in it is replaced
            listed = inspect.getmembers(package)
            names[package] = [name for name, member in listed if interpreter.tl.core.is_builtin(member)]
        for name in names[package]:
            if interpreter.tl.core.is_builtin(member := getattr(package, name)):
                interpreter._patch_attr(package, name, member, builder, *scope)

    with mock.patch.object(interpreter, "_patch_builtin", patch_builtin):
        yield


def python(*arguments, **environment):
    """Standard output of a Python process of its own, in which Triton compiles."""
    command = [sys.executable, *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "0"} | environment
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout
