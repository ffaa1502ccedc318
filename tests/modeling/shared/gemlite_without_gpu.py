"""gemlite without a GPU: its kernels in Triton's interpreter, or compiled for a GPU that need not be there.

    python gemlite_without_gpu.py short|all   one line of JSON per kernel that 1 and 8 vectors need

gemlite asks torch and Triton's driver for the GPU while it is imported. Compiling has to be a process of its own,
without TRITON_INTERPRET, as in tests/attention_backends/triton/aot.py.
"""

import json
import sys
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget

SHARED_MEMORY = 227 * 1024  # bytes that one program may use on sm_90
# Rows and columns: of a layer of Llama-3.1-8B, and such that no block divides; the other layers.
SHORT = ((4096, 4096), (576, 640))
MORE = ((1024, 4096), (14336, 4096), (4096, 14336))


class AbsentGpu:
    """The answers of Triton's driver on an H100. A timing runs its function once."""

    utils = SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": SHARED_MEMORY})

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_benchmarker(self):
        def once(function, **options):
            function()
            return [1.0, 1.0, 1.0]

        return once


@contextmanager
def without_gpu():
    """A context in which gemlite can be imported, and takes the first configuration of each kernel."""
    properties = SimpleNamespace(name="NVIDIA H100", multi_processor_count=132)
    tuner = triton.runtime.autotuner.Autotuner
    pruned, driver = tuner.prune_configs, triton.runtime.driver
    with ExitStack() as stack:
        for name, value in (("get_device_capability", (9, 0)), ("get_device_properties", properties)):
            stack.enter_context(mock.patch.object(torch.cuda, name, lambda device=None, value=value: value))
        first = lambda self, *args, **options: pruned(self, *args, **options)[:1]  # noqa: E731
        stack.enter_context(mock.patch.object(tuner, "prune_configs", first))
        stack.enter_context(mock.patch.object(driver, "_active", AbsentGpu()))
        yield


def main(shapes):
    run, compiled = triton.runtime.JITFunction.run, {}

    def compile_only(self, *args, **kwargs):
        kernel = run(self, *args, **kwargs | {"warmup": True})
        compiled.setdefault(kernel.hash, (self.__name__, kernel))

    triton.runtime.JITFunction.run = compile_only
    with without_gpu():
        from hf_longspec.modeling.shared.low_bit_products import GemliteProduct, random_vectors, random_weights

        for rows, columns in shapes:
            product = GemliteProduct(*random_weights(rows, columns, torch.device("cpu")))
            for vectors in (1, 8):
                compiled.clear()
                product(random_vectors(vectors, columns, torch.device("cpu")))
                for name, kernel in compiled.values():
                    line = {"rows": rows, "columns": columns, "vectors": vectors, "kernel": name}
                    line |= {"cubin": len(kernel.asm["cubin"]), "shared": kernel.metadata.shared}
                    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(SHORT + MORE * (sys.argv[1] == "all"))
