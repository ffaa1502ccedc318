"""Fixtures of the attention tests: backends in small tiles, the machine of flash-attn, Triton's kernels."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from hf_longspec.attention_backends import flash, torch_backend
from hf_longspec.attention_backends.flash import FLASH_BACKEND
from hf_longspec.attention_backends.torch_backend import TORCH_BACKEND
from hf_longspec.attention_backends.triton import config, launch
from hf_longspec.attention_backends.triton.backend import TRITON_BACKEND
from tests.attention_backends.flash_standins import PACKAGES, Machine
from tests.attention_backends.triton.machine import BROKEN_INTERPRETER, DEVICE, language_listed_once
from tests.simulated_cuda import SimulatedCuda

# A program that tests start.
collect_ignore = ["triton/aot.py"]


@pytest.fixture(autouse=True)
def without_a_gate(every_step_speculates):
    """Whether a step speculates shall not depend on the clock."""


@pytest.fixture(scope="session")
def kernel_device():
    """Where kernels run: compiled on a GPU, interpreted on the CPU, or nowhere."""
    device = torch.device(DEVICE)
    if BROKEN_INTERPRETER:
        pytest.skip("the interpreter of triton 3.6 does not work with numpy 2.4")
    reason = launch.why_not_device(device)
    if reason is not None:
        pytest.skip(reason)
    return device


@pytest.fixture(scope="session", autouse=True)
def faster_interpreter():
    with language_listed_once() if config.INTERPRETED else nullcontext():
        yield


@pytest.fixture
def small_tiles(monkeypatch):
    """Splits of 64 slots in blocks of 32: a prefix of 100 has full, partial and empty ones."""

    def small(choose):
        return lambda *args: choose(*args)._replace(block_keys=32, tree_keys=32, split_keys=64)

    monkeypatch.setattr(launch, "BLOCK_STATES", 32)
    monkeypatch.setattr(launch, "BLOCK_PARTS", 2)
    monkeypatch.setattr(launch, "BLOCK_SCORES", 4)
    monkeypatch.setattr(launch, "BLOCK_SLOTS", 32)
    monkeypatch.setattr(launch, "hybrid_config", small(config.hybrid_config))
    monkeypatch.setattr(launch, "tree_config", small(config.tree_config))


@pytest.fixture
def poisoned_memory():
    """Everything torch allocates is NaN at first: what a kernel does not write shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.ones(1).new_empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def machine(monkeypatch):
    """`machine(capability, *packages)`: as if this were such a GPU with flash-attn; returns the list of its calls."""
    yield Machine(monkeypatch)
    flash.flash_function.cache_clear()


@pytest.fixture(params=PACKAGES)
def calls(request, machine):
    """The calls of either version of flash-attn."""
    return machine(*PACKAGES[request.param])


@pytest.fixture
def simulated_device():
    """A CUDA device whose tensors are on the CPU."""
    with SimulatedCuda() as cuda:
        yield cuda.device


@pytest.fixture
def prepared(request, monkeypatch):
    """`prepared(name)`: a backend whose blocks are small, and the device that its tensors go to."""

    def prepare(name):
        if name == "triton":
            for fixture in ("small_tiles", "poisoned_memory"):
                request.getfixturevalue(fixture)
            return TRITON_BACKEND, request.getfixturevalue("kernel_device")
        if name == "torch_moved":  # contexts are copied to another device
            return TORCH_BACKEND, request.getfixturevalue("simulated_device")
        device = torch.device("cpu")
        if name.startswith("flash"):
            request.getfixturevalue("machine")(*PACKAGES[int(name[-1])])
            return FLASH_BACKEND, device
        monkeypatch.setattr(torch_backend, "BLOCK_KEYS", 64)
        monkeypatch.setattr(torch_backend, "BLOCK_QUERIES", 30)
        if name == "torch_apart":  # as after a long prefix
            monkeypatch.setattr(torch_backend, "DENSE_KEYS", 0)
        if name == "torch_unfused":  # as on CUDA: no position is read back, and no fused op takes a mask
            bounds = torch_backend._window_bounds
            monkeypatch.setattr(torch_backend, "can_fuse", lambda *args, masked=False: False)
            monkeypatch.setattr(
                torch_backend, "_window_bounds", lambda positions, *args: bounds(positions.to("meta"), *args)
            )
        return (replace(TORCH_BACKEND, hybrid_attention=None) if name == "torch_parts" else TORCH_BACKEND), device

    return prepare
