"""Drafted tokens of transformers' own generators, which read the same files, after every prefix that they come to."""

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator, MTPCandidateGenerator

from hf_longspec import DFlashDraftModel, MtpDraftModel
from tests.modeling.calls import GREEDY
from tests.modeling.dflash.test_modeling_dflash import FIXTURES as OF_DFLASH
from tests.modeling.mtp.test_mtp_fixtures import FIXTURES as OF_MTP
from tests.tiny_targets import tiny_prompts, tiny_target

OPTIONS = GREEDY | {"max_new_tokens": 16}


def compare(monkeypatch, kind, draft, target, **options):
    """Generate with transformers' generator, and compare its tokens with those of the draft; return the rounds."""
    ours, theirs, rounds = draft.candidate_generator(target, 128), kind.get_candidates, []

    def candidates(self, input_ids, *args, **kwargs):
        drafted, logits = theirs(self, input_ids, *args, **kwargs)
        if drafted.shape[1] > input_ids.shape[1]:
            assert ours.get_candidates(input_ids)[0].tolist() == drafted.tolist()
            rounds.append(drafted.shape[1] - input_ids.shape[1])
        return drafted, logits

    monkeypatch.setattr(kind, "get_candidates", candidates)
    ids = tiny_prompts(target.config.vocab_size, (13,))[0]
    text = target.generate(ids, **OPTIONS, **options)
    monkeypatch.undo()
    assert torch.equal(text, target.generate(ids, **OPTIONS))
    return rounds


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_mtp(family, monkeypatch):
    target = AutoModelForCausalLM.from_pretrained(OF_MTP / family).eval()
    # transformers looks for the layer under the number that it has in the published models
    first = target.config.num_hidden_layers
    target._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{first}\..*"]
    draft = MtpDraftModel.from_target(target, tree_widths=[1], window="all", sinks=0)
    rounds = compare(monkeypatch, MTPCandidateGenerator, draft, target, use_mtp=True)
    assert len(rounds) > 12 and set(rounds) == {1}


def test_dflash(monkeypatch):
    """With layers that slide, on texts of more tokens than their window."""
    target = tiny_target("llama", vocab_size=97, hidden_size=32, num_hidden_layers=8)
    assistant = AutoModel.from_pretrained(OF_DFLASH / "muse_sliding").eval()
    draft = DFlashDraftModel.from_pretrained(OF_DFLASH / "muse_sliding", target=target, window=None)
    rounds = compare(
        monkeypatch, DFlashTokenCandidateGenerator, draft, target, assistant_model=assistant, speculation_type="dflash"
    )
    assert len(rounds) > 12 and set(rounds) == {draft.config.block_size - 1}
