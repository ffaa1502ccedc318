"""A tiny target with a prefilled cache, shared by the benchmark tests."""

import pytest
import torch

from hf_longspec.bench.calls import endless
from hf_longspec.bench.prefill import prefill
from hf_longspec.testing import tiny_prompts, tiny_target


@pytest.fixture(scope="session")
def target():
    return endless(tiny_target("llama", attn_implementation="sdpa"))


@pytest.fixture(scope="session")
def prompts(target):
    tokens, _ = tiny_prompts(target.config.vocab_size, [60, 60, 60])
    return prefill(target, torch.as_tensor(tokens))
