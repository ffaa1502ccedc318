"""Every decoder of transformers: the text of the stock `generate` under every draft, or a refusal with a known reason.

A type that fails here for the first time belongs into `FAILED_ONCE`. `make soak` runs everything; `make test` one draft
on half of those types, `make test-min` on the other half, and both on a few of the others, which change every day:
ARCHITECTURE_ROTATION=<number> chooses them.
"""

import os
import re

import pytest
import transformers
from packaging.version import Version

from tests.robustness.architecture_variants import VARIANTS
from tests.robustness.enumeration import TYPES, UNBUILDABLE, Unbuildable, known_reason, outcomes, quiet, stock_of

# Types on which a draft once wrote another text, or failed without a reason; without those that other tests name.
FAILED_ONCE = [
    "beam", "bigbird_pegasus", "blenderbot", "blenderbot-small", "gemma3n_text", "gemma4_text", "gemma4_unified_text",
    "gpt_neox", "gpt_neox_japanese", "hrm_text", "jetmoe", "kolibri1", "llama4", "marian", "mbart", "mimo_v2_flash",
    "mllama", "moshi", "nemotron", "opt", "pegasus", "persimmon", "phi", "plbart", "qwen3_5_moe", "qwen3_5_moe_text",
    "qwen4_exp_text", "roberta", "solar_open", "stablelm", "whisper", "zaya",
]  # fmt: skip
SHARE = 32
ROTATION = int(os.environ["ARCHITECTURE_ROTATION"])  # set by tests/conftest.py
OTHERS = [name for name in TYPES if name not in FAILED_ONCE][ROTATION % SHARE :: SHARE]

IS_OLD = Version(transformers.__version__) < Version("5.20")  # that of `make test-min`
SAMPLE = [name for name in FAILED_ONCE if name in TYPES][(ROTATION + IS_OLD) % 2 :: 2] + OTHERS


def stock(model_type, **overrides):
    with quiet():
        return stock_of(model_type, **overrides)


def failures(made, **which):
    with quiet():
        found = {f"{kind}, {batch}": outcome for kind, batch, outcome in outcomes(made, **which)}
    if any(outcome.kind == "identical" for outcome in found.values()):
        assert made.poor is None, f"the stock text proves nothing: {made.poor}"
    return {name: f"{outcome.kind}: {outcome.detail}" for name, outcome in found.items() if outcome.failed}


def built(model_type):
    """The stock of a type, or None if transformers cannot make it for the reason that is listed."""
    try:
        return stock(model_type)
    except Unbuildable as error:
        if not re.search(UNBUILDABLE.get(model_type, "$^"), str(error)):
            raise
        return None


@pytest.mark.parametrize("model_type", SAMPLE)
def test_a_tree_on_types_that_failed_once_and_on_a_few_of_the_others(model_type):
    made = built(model_type)
    found = {} if made is None else failures(made, drafts=("tree",), batches=("ragged",))
    assert not found, f"{found}, ARCHITECTURE_ROTATION={ROTATION}"


@pytest.mark.soak
@pytest.mark.parametrize("model_type", TYPES)
def test_every_draft_on_every_type(model_type):
    made = built(model_type)
    assert made is None or not failures(made)


@pytest.mark.soak
@pytest.mark.parametrize("label", VARIANTS)
def test_every_draft_on_every_variant(label):
    model_type, overrides = VARIANTS[label]
    assert not failures(stock(model_type, **overrides))


def test_an_error_that_names_no_reason_is_a_failure():
    assert known_reason("The size of tensor a (5) must match the size of tensor b (37)") is None
    assert known_reason("it is an encoder-decoder model, and the loop runs decoder-only models") is not None
