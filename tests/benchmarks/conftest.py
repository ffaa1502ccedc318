"""A tiny target with prefilled prompts, and drafts for it."""

import pytest
import torch

import hf_longspec
from benchmarks.decoder import prefill
from hf_longspec.cli.measuring import PLAIN, endless
from tests import example_drafts  # noqa: F401 - the benchmarks import them, which shall register them in no other test
from tests.tiny_targets import tiny_prompts, tiny_target


@pytest.fixture(scope="session")
def target():
    return endless(tiny_target("llama", attn_implementation="sdpa"))


@pytest.fixture(scope="session")
def prompts(target):
    tokens, _ = tiny_prompts(target.config.vocab_size, [60, 60, 60])
    return prefill(target, torch.as_tensor(tokens))


def specattn(model, **settings):
    """A draft that reads part of the short prompts, and so is wrong at times."""
    settings = {"num_assistant_tokens": 3, "sparse_min_tokens": 8} | settings
    return hf_longspec.SpecAttnDraftModel.from_target(model, **settings)


def make_drafts(model):
    """Our loop without a draft and with one, under their names in the results."""
    return {PLAIN: hf_longspec.PlainDraftModel.from_target(model), "SpecAttn": specattn(model)}
