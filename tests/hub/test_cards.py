"""Model cards: facts from the draft, given facts, and missing facts."""

import pytest
from huggingface_hub import ModelCard

from hf_longspec.hub.repository import Card, render

from .conftest import DRAFTS

FACTS = {
    "base_model": "org/tiny-target",
    "license": "mit",
    "language": "en",
    "datasets": ["org/books"],
    "settings": "A narrow tree pays here.",
    "acceptance": "| mode | tau at 1024 |\n|---|---|\n| greedy | 2.50 ± 0.10 |",
    "training": "900 steps.",
    "command": "hf-longspec train --config recipe.yaml",
    "commit": "abc123",
    "limits": "Knows English only.",
}


def card_of(draft, **facts):
    return render(draft, Card(**facts).complete(draft, "org/longspec-draft"))


@pytest.mark.parametrize("kind", DRAFTS)
def test_given_facts_are_on_the_card_once_and_the_hub_reads_the_metadata(make_draft, kind):
    draft = make_draft(kind)
    text = card_of(draft, **FACTS)
    trained = () if draft.weightless else ("900 steps.", "hf-longspec train --config", "Commit of the code: abc123")
    for fact in ("A narrow tree pays here.", "2.50 ± 0.10", "Knows English only.", *trained):
        assert text.count(fact) == 1, fact
    assert "ot measured" not in text and "not recorded" not in text and "not stated" not in text
    assert "{" not in text.split("## Usage")[0]
    for name in draft.settings:
        assert f"`{name}={getattr(draft.generation_config, name)!r}`" in text
    data = ModelCard(text).data
    assert data.library_name == "transformers" and data.base_model == "org/tiny-target"
    assert data.license == "mit" and data.language == "en" and data.datasets == ["org/books"]
    assert {"speculative-decoding", "long-context", kind.replace("_", "-")} <= set(data.tags)


@pytest.mark.parametrize("kind", ["longspec", "specattn"])  # with weights, and without
def test_a_card_states_missing_facts(make_draft, kind):
    draft = make_draft(kind)
    text = card_of(draft, base_model="org/tiny-target")
    assert "Not measured." in text and "tau at" not in text
    assert ("## Training" in text) == (not draft.weightless)
    assert text.count("not recorded") == (0 if draft.weightless else 2)
    assert ("license of the weights was not stated" in text) == (not draft.weightless)
    assert ModelCard(text).data.license == ("apache-2.0" if draft.weightless else None)
    assert "\n\n\n" not in text and text.endswith("\n")


def test_the_target_is_the_recorded_one(make_draft, tmp_path, monkeypatch):
    draft = make_draft("longspec_plain")
    draft.config.target_name_or_path = "org/recorded"
    assert 'from_pretrained("org/recorded")' in card_of(draft)
    assert 'from_pretrained("org/other")' in card_of(draft, base_model="org/other")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "target").mkdir(parents=True)
    for unknown in (None, str(tmp_path / "runs"), "runs/target"):
        draft.config.target_name_or_path = unknown
        with pytest.raises(ValueError, match="base_model"):
            card_of(draft)


@pytest.mark.parametrize(
    ("facts", "complaint"),
    [
        ({"licence": "mit"}, "licence"),
        ({"limits": 3}, "limits=3"),
        ({"datasets": "org/books"}, "datasets='org/books'"),
    ],
    ids=str,
)
def test_unknown_facts_and_facts_of_a_wrong_type_are_refused(facts, complaint):
    with pytest.raises(ValueError, match=complaint):
        Card.read(facts)
    assert Card.read({"license": None, "language": ["en", "de"]}).language == ["en", "de"]
