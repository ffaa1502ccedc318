"""AutoDraft: what it finds for a target, the trial that decides, and calls after it."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_longspec import AutoDraft, NgramDraftModel, PlainDraftModel, SpecAttnDraftModel, auto
from tests.modeling.calls import LENGTHS, generate
from tests.tiny_targets import random_tokenswift_draft, tiny_target

pytestmark = pytest.mark.usefixtures("every_step_speculates")


@pytest.fixture
def target(tmp_path):
    """A target in a folder, beside a saved draft."""
    model = tiny_target("llama")
    SpecAttnDraftModel.from_target(model, acceptance="coupled").save_pretrained(tmp_path / "draft")
    model.save_pretrained(tmp_path / "target")
    return type(model).from_pretrained(tmp_path / "target")


@pytest.fixture
def named(target, tmp_path):
    """The target, with a card that names the draft."""
    (tmp_path / "target" / "README.md").write_text("---\ndraft_model: ../draft\n---\n# A target\n")
    return target


@pytest.fixture
def speeds(monkeypatch):
    """Speeds by draft in place of measured ones, and the arguments of the trials."""
    told, asked = {}, []

    def speed(model, draft, ids, options):
        asked.append((draft.config.short_name(), ids.tolist(), options))
        return told.get(draft.config.short_name(), 1.0)

    monkeypatch.setattr(auto, "trial_speed", speed)
    return told, asked


@pytest.mark.parametrize("best", ["ngram", "specattn"])
def test_the_fastest_draft_decodes_all_calls(named, tmp_path, speeds, best):
    told, asked = speeds
    told |= {best: 3.0, "plain": 2.0}
    lines = []
    draft = AutoDraft.from_target(named, report=lines.append)
    for options in ({}, {"do_sample": True, "temperature": 0.7}):
        texts = []
        for assistant in (PlainDraftModel.from_target(named), draft):
            torch.manual_seed(1)
            texts.append(generate(named, assistant, **options))
        assert torch.equal(*texts)
        assert draft.last_speculation.method == draft.chosen.config.short_name() == best
        assert draft.last_speculation.num_spec_steps > 0
    assert [name for name, *_ in asked] == ["plain", "specattn", "ngram"]  # once
    names = {"ngram": "ngram", "specattn": str(tmp_path / "draft")}
    other = names["ngram" if best == "specattn" else "specattn"]
    assert lines == [draft.choice]
    assert draft.choice == (f"draft: {names[best]}, 3 tokens/s on this text (1 with {other}, 2 without a draft)")


def test_the_trial_reads_the_end_of_the_longest_row_and_samples_as_the_call(named, speeds, monkeypatch):
    monkeypatch.setattr(auto, "TRIAL_PROMPT", 20)
    draft, (_, asked) = AutoDraft.from_target(named), speeds
    out = generate(named, draft, lengths=(5, 33), do_sample=True, temperature=0.7, top_k=9)
    (_, ids, options), *_ = asked
    assert ids == [out[1, 13:33].tolist()]
    sampling = {"do_sample": True, "temperature": 0.7, "top_k": 9, "top_p": 1.0, "repetition_penalty": 1.0}
    assert options == sampling | {"eos_token_id": 999, "pad_token_id": 0}


@pytest.mark.parametrize("entry", ["assistant_model", "custom_generate"])
def test_a_measured_trial_changes_neither_the_text_nor_the_draft(named, entry):
    draft = AutoDraft.from_target(named, gate=True, check_target=False)
    texts = []
    for assistant in (NgramDraftModel.from_target(named), draft):
        torch.manual_seed(1)
        how = {"assistant_model": assistant} if entry == "assistant_model" else {"assistant_model": None}
        how |= {"custom_generate": assistant.custom_generate} if entry == "custom_generate" else {}
        ids = torch.arange(2, 40)[None]
        texts.append(named.generate(ids, max_new_tokens=16, do_sample=True, pad_token_id=0, **how))
    assert torch.equal(*texts)
    assert all(f" {word} " in draft.choice for word in ("tokens/s", "with", "without"))
    assert draft.chosen.setting("gate") and not draft.chosen.setting("check_target")
    assert draft.last_speculation.num_spec_steps + draft.last_speculation.num_plain_steps > 0


def test_a_target_without_more_has_ngrams_without_a_trial(target, speeds, tmp_path):
    draft = AutoDraft.from_target(target)
    with pytest.raises(ValueError, match="no draft is chosen before the first call"):
        draft.save_pretrained(tmp_path / "saved")
    generate(target, draft)
    assert draft.choice == "draft: ngram, as no other exists for this model" and not speeds[1]
    draft.save_pretrained(tmp_path / "saved")
    assert isinstance(NgramDraftModel.from_pretrained(tmp_path / "saved", target=target), NgramDraftModel)


@pytest.mark.parametrize("candidates", [0, 2])
def test_ngrams_that_join_the_named_draft_are_no_candidate(named, tmp_path, speeds, candidates):
    """The gate verifies them alone where that is faster, so there is nothing to try."""
    heads = random_tokenswift_draft(named, ngram_candidates=candidates)
    heads.save_pretrained(tmp_path / "draft")
    draft = AutoDraft.from_target(named)
    kinds = [candidate.config.short_name() for candidate in draft._candidates.values()]
    assert kinds == ["tokenswift"] + ["ngram"] * (not candidates)
    assert torch.equal(generate(named, draft), generate(named, None))
    assert bool(speeds[1]) == (not candidates)
    if candidates:
        assert draft.choice == f"draft: {tmp_path / 'draft'}, with n-grams, as no other exists for this model"


def test_without_a_text_the_first_candidate_decodes(named, speeds):
    draft = AutoDraft.from_target(named)
    draft.choose(named, torch.empty(1, 0, dtype=torch.long))
    assert draft.chosen.config.short_name() == "specattn" and "without a comparison" in draft.choice
    assert not speeds[1]


def test_a_slower_draft_is_left_to_the_gate(named, speeds):
    speeds[0]["plain"] = 9.0
    draft = AutoDraft.from_target(named)
    generate(named, draft)
    assert draft.choice.endswith("9 without a draft); the gate pauses it while it is slower")


@pytest.mark.parametrize(
    ("card", "kinds"),
    [
        ("---\ndraft_model: ../draft\n---\n", ["specattn", "ngram"]),
        ("---\ndraft_model: 7\n---\n", ["ngram"]),
        ("---\ndraft_model: [\n---\n", ["ngram"]),
        ("# No metadata\n", ["ngram"]),
        ("---\ndraft_model: ../target\n---\n", ["assistant", "ngram"]),  # a small model
        ("---\ndraft_model: ./nowhere/at/all\n---\n", ["ngram"]),
    ],
    ids=str,
)
def test_cards(target, tmp_path, card, kinds, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "target" / "README.md").write_text(card)
    found = AutoDraft.from_target(target)._candidates
    assert [draft.config.short_name() for draft in found.values()] == kinds


def test_mtp_layers_of_the_checkpoint_are_a_candidate(speeds):
    target = AutoModelForCausalLM.from_pretrained(Path(__file__).parent / "modeling/mtp/fixtures/glm4_moe").eval()
    speeds[0]["mtp"] = 2.0
    draft = AutoDraft.from_target(target)
    assert torch.equal(generate(target, draft), generate(target, None))
    assert draft.last_speculation.method == "mtp" and draft.last_speculation.num_spec_steps > 0
    assert draft.choice == "draft: mtp, 2 tokens/s on this text (1 with ngram, 1 without a draft)"


def test_its_settings_are_those_of_all_drafts(target):
    with pytest.raises(ValueError, match=r"unknown settings .'num_assistant_tokens'"):
        AutoDraft.from_target(target, num_assistant_tokens=3)
    draft = AutoDraft.from_target(target)
    generate(target, draft)
    draft.generation_config.on_unsupported = "error"
    with pytest.raises(ValueError, match="cache"):
        generate(target, draft, LENGTHS, cache_implementation="quantized")


@pytest.mark.parametrize(
    "value", [{"a": 1}, "x" * 400, "a\0b", "../" * 300, "[" * 100_000], ids=lambda value: str(value)[:9]
)
@pytest.mark.parametrize("place", ["card", "config"])
def test_a_name_of_any_kind_is_one_line(target, tmp_path, value, place, caplog):
    if place == "config":
        target.config.draft_model = value
    else:
        text = value if isinstance(value, str) and value.startswith("[") else json.dumps(value)
        (tmp_path / "target" / "README.md").write_text(f"---\ndraft_model: {text}\n---\n")
    with caplog.at_level("WARNING"):
        assert [*AutoDraft.from_target(target)._candidates] == ["ngram"]
    lines = [record.getMessage() for record in caplog.records if "draft_model" in record.getMessage()]
    assert len(lines) == (place == "config" or not text.startswith("[[")) and "\n" not in "".join(lines)
