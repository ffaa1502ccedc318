"""Compiles what a launcher would launch on a GPU, without one, and reports what the compiler made of it.

    python aot.py module calls 80 90 100

`calls` is a function of `module` that yields `(label, launch)`. Every kernel that `launch()` starts, with the arguments
it starts it with, is compiled for every compute capability; one JSON line each goes to standard output. It has to be a
process of its own: the interpreter and the compiler exclude each other.
"""

import importlib
import json
import re
import sys

import triton
from compiler_report import usage
from triton.backends.compiler import GPUTarget


class AbsentGpu:
    """What Triton asks its driver before a launch."""

    def __init__(self, capability):
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return self.target.arch

    def get_current_stream(self, device):
        return 0


def has_barrier(compiled):
    """Whether a barrier stands between the last load and the first store."""
    accesses = re.findall(r"\b(ld\.global|bar\.sync|st\.global)", compiled.asm["ptx"])
    last_load = len(accesses) - 1 - accesses[::-1].index("ld.global")
    return accesses[last_load + 1] == "bar.sync"


def main(module, calls, *capabilities):
    run = triton.runtime.JITFunction.run
    compiled = []

    def compile_only(self, *args, **kwargs):
        compiled.append((self.__name__, run(self, *args, **kwargs | {"warmup": True})))

    triton.runtime.JITFunction.run = compile_only
    for capability in map(int, capabilities):
        triton.runtime.driver.set_active(AbsentGpu(capability))
        for label, launch in getattr(importlib.import_module(module), calls)():
            launch()
            for name, kernel in compiled:
                report = {"sm": capability, "call": label, "kernel": name, "BARRIER": has_barrier(kernel)}
                print(json.dumps(report | usage(kernel)), flush=True)
            compiled.clear()


if __name__ == "__main__":
    main(*sys.argv[1:])
