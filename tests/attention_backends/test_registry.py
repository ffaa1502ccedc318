"""Choosing a backend, and explaining why there is none."""

import pytest
import torch

from hf_longspec.attention_backends import registry
from hf_longspec.attention_backends.registry import AttentionBackend, AttentionCall, register_backend, select
from hf_longspec.attention_backends.torch_backend import TORCH_BACKEND
from tests.attention_backends.reference import REFERENCE_BACKEND

CALL = AttentionCall(torch.device("cpu"), torch.bfloat16, 96, 96)


@pytest.fixture
def shelf(monkeypatch):
    """A registry of our own."""
    for name in ("_backends", "_priorities"):
        monkeypatch.setattr(registry, name, {})
    select.cache_clear()
    yield
    select.cache_clear()


def backend(name, reason=None):
    def why_not(call):
        return reason(call) if callable(reason) else reason

    return AttentionBackend(name, *[lambda: None] * 4, why_not)


def test_the_highest_priority_that_accepts_runs(shelf):
    register_backend(backend("slow"), priority=1)
    register_backend(backend("fast", lambda call: "cannot apply softcap" if call.softcap else None), priority=5)
    register_backend(backend("by_name_only"))
    assert registry.backend_names() == ["fast", "slow", "by_name_only"]
    assert select(CALL).name == "fast"
    assert select(CALL._replace(softcap=30.0)).name == "slow"
    assert select(CALL, "by_name_only").name == "by_name_only"
    register_backend(backend("faster"), priority=9)
    assert select(CALL).name == "faster"  # what was chosen before is not remembered for ever


def test_the_error_says_everything(shelf):
    register_backend(backend("hf_longspec_torch", "cannot apply softcap"), priority=1)
    register_backend(backend("hf_longspec_triton", "needs a GPU"), priority=5)
    register_backend(backend("hf_longspec_reference"))
    with pytest.raises(ValueError) as error:
        select(AttentionCall(torch.device("cpu"), torch.bfloat16, 96, 96, softcap=50.0, sinks=True))
    assert str(error.value).splitlines() == [
        "no attention backend supports this call "
        "(device=cpu, dtype=bfloat16, head_dim=96, value_dim=96, softcap=50.0, sinks=True):",
        "  hf_longspec_triton: needs a GPU",
        "  hf_longspec_torch: cannot apply softcap",
        "Load the model in float32, float16 or bfloat16, call generate() without assistant_model, or add a backend: "
        "see the kernel recipe in CONTRIBUTING.md.",
    ]


def test_unknown_and_duplicate_names(shelf):
    fast = register_backend(backend("fast"), priority=5)
    assert register_backend(fast, priority=5) is fast  # importing twice is no error
    with pytest.raises(ValueError, match=r"'quick' is not an attention backend\. Choose one of fast"):
        select(CALL, "quick")
    with pytest.raises(ValueError, match="named 'fast' exists already"):
        register_backend(backend("fast"))


def test_the_reference_runs_only_by_name():
    assert select(CALL) is TORCH_BACKEND
    assert select(CALL, "hf_longspec_reference") is REFERENCE_BACKEND
    with pytest.raises(
        ValueError, match=r"hf_longspec_torch: dtype is torch\.float8_e5m2, expected one of torch\.float16"
    ):
        select(CALL._replace(dtype=torch.float8_e5m2))
