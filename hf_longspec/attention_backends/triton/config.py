"""The devices and dtypes that the kernels run on, and what their launches need of torch.

The interpreter keeps bfloat16 as bit patterns and multiplies those, without an error. `upcast` returns whether kernels
have to convert what they load to float32 first.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

from .language import INSTALLED, INTERPRETED
from .tiles import Gpu

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Ampere. Older ones have neither bfloat16 nor asynchronous copies, and 64 KB of shared memory.
MIN_CAPABILITY = (8, 0)
# Hopper, and Blackwell of data centers: warpgroups multiply from shared memory. On other GPUs single warps do.
WARPGROUP_CAPABILITIES = (9, 10)
# Shared memory of one program on the smallest GPUs of that age (RTX 30 and 40, L4). Every configuration fits in it
# where the device does not have more.
SHARED_MEMORY = 99 * 1024
# The namespace of the operators. A copy of this file from the Hub gets its own: registering an operator a second time
# would pull the first one from under the package.
LIBRARY = "hf_longspec" if __name__.startswith("hf_longspec.") else "hf_longspec_" + __name__.replace(".", "_")


def upcast(tensor: torch.Tensor) -> bool:
    """Return whether kernels must convert this tensor's numbers to float32 before they calculate with them."""
    return INTERPRETED and tensor.dtype == torch.bfloat16


def output_dtype(value: torch.Tensor) -> torch.dtype:
    """Return what a kernel writes: the interpreter truncates where a GPU rounds, so torch rounds to bfloat16."""
    return torch.float32 if upcast(value) else value.dtype


def launching_on(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Make the tensor's device current: Triton launches there, and under `device_map="auto"` it may be another one."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def why_not_device(device: torch.device) -> str | None:
    """Return None if kernels run on this device, or the reason for refusing it."""
    if not INSTALLED:
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


def gpu_of(device: torch.device) -> Gpu:
    """Return what tiles depend on; for the interpreter that of the smallest GPUs."""
    return _gpu(device) if device.type == "cuda" else Gpu(SHARED_MEMORY, False)


@cache
def _gpu(device: torch.device) -> Gpu:
    shared_memory = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", SHARED_MEMORY)
    return Gpu(shared_memory, torch.cuda.get_device_capability(device)[0] in WARPGROUP_CAPABILITIES)
