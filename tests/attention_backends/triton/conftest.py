"""Fixtures of the tests of Triton kernels."""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch

from hf_longspec.attention_backends.triton import config, launch
from tests.attention_backends.triton.machine import BROKEN_INTERPRETER, DEVICE

# A program that tests start.
collect_ignore = ["aot.py"]


@pytest.fixture(scope="session")
def kernel_device():
    """Where kernels run: compiled on a GPU, interpreted on the CPU, or nowhere."""
    device = torch.device(DEVICE)
    if BROKEN_INTERPRETER:
        pytest.skip("the interpreter of triton 3.6 does not work with numpy 2.4")
    reason = config.why_not_device(device)
    if reason is not None:
        pytest.skip(reason)
    return device


@pytest.fixture
def small_tiles(monkeypatch):
    """Splits of 64 slots in blocks of 32: a prefix of 100 has full, partial and empty ones."""

    def small(choose):
        return lambda *args: choose(*args)._replace(block_keys=32, split_keys=64)

    monkeypatch.setattr(launch, "BLOCK_STATES", 32)
    monkeypatch.setattr(launch, "BLOCK_PARTS", 2)
    monkeypatch.setattr(launch, "prefix_config", small(config.prefix_config))
    monkeypatch.setattr(launch, "tree_config", small(config.tree_config))


@pytest.fixture
def poisoned_memory():
    """Everything torch allocates is NaN at first: what a kernel does not write shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.ones(1).new_empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(scope="session")
def kernel_copy():
    """`kernel_copy(package, module)`: a module of the kernels once more, under another package name."""

    def load(package, module):
        if package not in sys.modules:
            sys.modules[package] = ModuleType(package)
            sys.modules[package].__path__ = [str(Path(config.__file__).parent)]
        return import_module(f"{package}.{module}")

    return load
