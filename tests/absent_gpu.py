"""A plugin of pytest: tests run as on a machine with a GPU, as far as they get without one.

    python -m pytest -p tests.absent_gpu -k triton tests/attention_backends/triton

`torch.cuda.is_available()` is true and Triton compiles, so the first tensor that goes to the GPU ends the test. Such a
test is reported as skipped. Any other failure would also happen on a GPU, such as a tensor of the CPU in a compiled
kernel.
"""

import os
from types import SimpleNamespace

import pytest
import torch

# Of torch without CUDA, and of torch with CUDA on a machine without its driver.
NO_GPU = ("not compiled with CUDA", "Found no NVIDIA driver")


def pytest_load_initial_conftests():
    """Change torch before any test is imported, and not when this file is imported for its examples."""
    os.environ["TRITON_INTERPRET"] = "0"
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(shared_memory_per_block_optin=227 * 1024)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.excinfo is not None and any(reason in str(call.excinfo.value) for reason in NO_GPU):
        report.outcome = "skipped"
        report.longrepr = str(item.path), item.location[1], "it reached the GPU"
    return report
