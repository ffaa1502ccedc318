"""The models that come with the repository: their size, their cards' usage, and what their speculation achieves."""

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import hf_longspec

ROOT = Path(__file__).resolve().parents[1]
TARGET, DRAFT = ROOT / "hub_cards" / "tiny-target", ROOT / "hub_cards" / "tiny-longspec"

# Measured with torch 2.13 on a CPU. Another order of float sums can turn a near-tie in the draft, and a step or two.
BUNDLED_TAU, TAU_TOLERANCE = 1.73, 0.1


@pytest.fixture(scope="module")
def target():
    return AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)


@pytest.fixture(scope="module")
def prompt():
    """English that neither model was trained on, the same on every machine."""
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    return tokenizer(text, return_tensors="pt")["input_ids"][:, :1500]


def folder_bytes(folder):
    return sum(path.stat().st_size for path in folder.iterdir())


def test_sizes():
    assert folder_bytes(TARGET) < 12_000_000
    assert folder_bytes(DRAFT) < 4_000_000


@pytest.mark.parametrize("folder", [TARGET, DRAFT], ids=lambda folder: folder.name)
def test_the_usage_on_the_card_runs(folder, monkeypatch):
    monkeypatch.chdir(ROOT)
    (usage,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    names: dict = {}
    exec(usage, names)  # noqa: S102 - what readers of the card are told to run
    assert "out" not in names or names["out"].shape[1] > 32


@pytest.mark.parametrize("folder", [TARGET, DRAFT], ids=lambda folder: folder.name)
def test_nothing_names_a_folder_of_the_machine_that_made_it(folder):
    for path in (*folder.glob("*.json"), folder / "README.md"):
        assert not re.search(r"/(home|root|tmp|work|users)/", path.read_text(encoding="utf-8"), re.IGNORECASE), path
    stored = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert not stored.get("target_name_or_path", "").startswith("/")


def test_the_bundled_draft(target, prompt):
    """float32 greedy: the text is plain generate's, and tau is what it was when the draft was published."""
    draft = AutoModel.from_pretrained(DRAFT, dtype=torch.float32)
    assert type(draft) is hf_longspec.LongSpecDraftModel
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 96, "do_sample": False}
    options["eos_token_id"] = None
    out = target.generate(prompt, assistant_model=draft, **options)
    assert torch.equal(out, target.generate(prompt, **options))
    assert draft.last_speculation.mean_acceptance_length == pytest.approx(BUNDLED_TAU, rel=TAU_TOLERANCE)
