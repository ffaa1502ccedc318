# Published with a draft by hf_longspec, Apache-2.0.
"""What the Triton kernels of this package share: the guarded import, the interpreter, and how they are launched.

Without triton the kernel files still import, as plain functions that nobody calls. They postpone their annotations
(`from __future__ import annotations`), because `tl.constexpr` does not exist then.

With TRITON_INTERPRET=1 in the environment before the first import, kernels run on a CPU, slowly, for tests. The
interpreter keeps bfloat16 as bit patterns and multiplies those, without an error: `upcast` says when kernels have to
convert what they load to float32 first.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

try:
    import triton
    from triton import language
except ImportError:
    triton = language = None

tl: Any = language

INSTALLED = triton is not None
INTERPRETED = INSTALLED and bool(triton.knobs.runtime.interpret)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Ampere. Older ones have neither bfloat16 nor asynchronous copies, and 64 KB of shared memory.
MIN_CAPABILITY = (8, 0)
# Shared memory of one program on the smallest GPUs of that age (RTX 30 and 40, L4). Every configuration fits in it
# where the device does not have more.
SHARED_MEMORY = 99 * 1024
# The namespace of the operators. A copy of this file from the Hub gets its own: registering an operator a second time
# would pull the first one from under the package.
LIBRARY = "hf_longspec" if __name__.startswith("hf_longspec.") else "hf_longspec_" + __name__.replace(".", "_")


def jit(**options: Any) -> Callable[[Any], Any]:
    """`triton.jit(**options)`, or without triton a decorator that does nothing."""
    return (lambda function: function) if triton is None else triton.jit(**options)


def constant(number: float) -> Any:
    """A number that kernels may use by its name: a compiled kernel reads no other globals."""
    return number if triton is None else tl.constexpr(number)


def upcast(tensor: torch.Tensor) -> bool:
    """Whether kernels must convert this tensor's numbers to float32 before they calculate with them."""
    return INTERPRETED and tensor.dtype == torch.bfloat16


def output_dtype(value: torch.Tensor) -> torch.dtype:
    """What a kernel writes: the interpreter truncates where a GPU rounds, so that bfloat16 is rounded by torch."""
    return torch.float32 if upcast(value) else value.dtype


def launching_on(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which under `device_map="auto"` need not be that of the tensors."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may use."""
    return _shared_memory_of_gpu(device) if device.type == "cuda" else SHARED_MEMORY


@cache
def _shared_memory_of_gpu(device: torch.device) -> int:
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", SHARED_MEMORY)


def why_not_device(device: torch.device) -> str | None:
    """None if kernels run on this device, or the reason why not."""
    if triton is None:
        return "triton is not installed: pip install hf_longspec[triton]"
    if INTERPRETED and device.type in ("cpu", "cuda"):
        return None
    if device.type != "cuda":
        return f"device is {device.type}, expected cuda (with TRITON_INTERPRET=1 set before the import, cpu for tests)"
    if torch.version.hip is not None:
        return "this is ROCm, where the configurations were never tried"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        return f"compute capability is {capability[0]}.{capability[1]}, expected at least 8.0"
    return None
