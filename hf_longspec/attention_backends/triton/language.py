"""The guarded import of Triton, and whether its kernels are interpreted. It needs neither torch nor a GPU.

Without triton the kernel files still import, as plain functions that are never called. With TRITON_INTERPRET=1 in the
environment before the first import, kernels run on a CPU, slowly, for tests.
"""

from collections.abc import Callable
from typing import Any

try:
    import triton
    from triton import language
except ImportError:
    triton = language = None

tl: Any = language

INSTALLED = triton is not None
INTERPRETED = INSTALLED and bool(triton.knobs.runtime.interpret)


def jit(**options: Any) -> Callable[[Any], Any]:
    """Return `triton.jit(**options)`, or without triton a decorator that does nothing."""
    return (lambda function: function) if triton is None else triton.jit(**options)


def constant(number: float) -> Any:
    """Return a number that kernels may use by its name: a compiled kernel reads no other globals."""
    return number if triton is None else tl.constexpr(number)
