"""MTP layers of six families against the outputs of their publishers' code."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hf_longspec import MtpDraftModel
from tests.tiny_targets import write_mtp_layers

FIXTURES = Path(__file__).parent / "fixtures"
# Their targets have recurrent layers.
HYBRID = ("qwen3_next", "qwen3_5")
FAMILIES = ("deepseek_v3", "glm4_moe", "mimo_derived", "ernie4_5_derived")
# float32 sums in another order
CLOSE = {"atol": 1e-4, "rtol": 0}


@pytest.mark.parametrize("family", FAMILIES + HYBRID)
def test_logits_are_those_of_the_publisher(family):
    folder = FIXTURES / family
    target = AutoModelForCausalLM.from_pretrained(folder)
    draft, expected = MtpDraftModel.from_target(target), load_file(folder / "expected.safetensors")
    ids = expected["ids"].view(1, -1)
    states = expected["target_hidden"].view(1, ids.shape[1], -1)
    rows = 0
    for number in (0, 1):
        wanted = expected[f"round_{number}_logits"].view(-1, target.config.vocab_size)
        rows += len(wanted)
        got = draft.chain_logits(states[:, : rows + 1], ids[:, : rows + 1], 2)
        torch.testing.assert_close(got[0][0, -len(wanted) :], wanted, **CLOSE)
        for step in (1, 2):
            chained = expected[f"round_{number}_chain_{step}_logits"].view(-1)
            torch.testing.assert_close(got[step].view(-1), chained, **CLOSE)
    wrong = expected["target_before_norm"].view_as(states)
    assert not torch.allclose(draft.chain_logits(wrong, ids, 0)[0][0, : len(wanted)], wanted, **CLOSE)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_that_of_the_target(family):
    target = AutoModelForCausalLM.from_pretrained(FIXTURES / family).eval()
    draft = MtpDraftModel.from_target(target, tree_widths=[4, 2], window=8, sinks=2, on_unsupported="error")
    prompt = torch.arange(1, 12)[None]
    options = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = target.generate(prompt, **options)
    assert torch.equal(target.generate(prompt, assistant_model=draft, **options), expected)


def test_a_target_in_memory_is_refused():
    target = AutoModelForCausalLM.from_pretrained(FIXTURES / "glm4_moe")
    target.config._name_or_path = ""
    with pytest.raises(ValueError, match="checkpoint="):
        MtpDraftModel.from_target(target)


def test_a_saved_draft_needs_no_files_of_the_target(tmp_path):
    target = AutoModelForCausalLM.from_pretrained(FIXTURES / "deepseek_v3")
    draft = MtpDraftModel.from_target(target)
    draft.save_pretrained(tmp_path)
    loaded = MtpDraftModel.from_pretrained(tmp_path)
    assert loaded.state_dict().keys() == draft.state_dict().keys()
    assert all(torch.equal(value, draft.state_dict()[name]) for name, value in loaded.state_dict().items())


@pytest.mark.parametrize("family", HYBRID)
def test_recurrent_targets_are_refused(family):
    target = AutoModelForCausalLM.from_pretrained(FIXTURES / family).eval()
    draft = MtpDraftModel.from_target(target, on_unsupported="error")
    with pytest.raises(ValueError, match=type(target).__name__):
        target.generate(torch.arange(1, 9)[None], assistant_model=draft, max_new_tokens=3, pad_token_id=0)


def test_layers_in_turn(tmp_path):
    target = AutoModelForCausalLM.from_pretrained(FIXTURES / "deepseek_v3").eval()
    write_mtp_layers(target, tmp_path, count=2)
    draft = MtpDraftModel.from_target(target, str(tmp_path), tree_widths=[4, 2], window=8, on_unsupported="error")
    prompt = torch.arange(1, 25).view(2, 12)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = target.generate(prompt, **options)
    assert torch.equal(target.generate(prompt, assistant_model=draft, **options), expected)
    with pytest.raises(ValueError, match="2 layers"):
        MtpDraftModel.from_target(target, str(tmp_path), tree_widths=[4, 2, 2])
