"""Settings of SpecAttn that are refused, with the value and what would be right."""

import pytest

from hf_longspec import SpecAttnDraftModel
from hf_longspec.testing import tiny_target


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("selection", "best", "selection='best': expected one of two_rows, all_rows"),
        ("score", "probabilities", "score='probabilities': expected one of logits, weights"),
        ("granularity", "head", "granularity='head': expected one of layer, kv_head"),
        ("acceptance", "typical", "acceptance='typical': expected one of rejection, coupled"),
        ("num_assistant_tokens", 0, "num_assistant_tokens=0: expected an integer of at least 1"),
        ("num_assistant_tokens", 2.5, r"num_assistant_tokens=2\.5: expected an integer"),
        ("sparse_min_tokens", -1, "sparse_min_tokens=-1: expected an integer of at least 1"),
        ("sparse_ratio", 0.0, r"sparse_ratio=0\.0: expected a number in \(0, 1\]"),
        ("sparse_ratio", 7, r"sparse_ratio=7: expected a number in \(0, 1\]"),
    ],
)
def test_refused_settings(setting, value, message):
    with pytest.raises(ValueError, match=message):
        SpecAttnDraftModel.from_target(tiny_target("llama"), **{setting: value})


def test_latent_caches_are_selected_per_layer():
    target = tiny_target("deepseek_v3")
    with pytest.raises(ValueError, match=r"kv_head.*MLA.*granularity='layer'"):
        SpecAttnDraftModel.from_target(target, granularity="kv_head")
    assert SpecAttnDraftModel.from_target(target).setting("granularity") == "layer"
