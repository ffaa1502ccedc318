"""The models that come with the repository: their size, their cards' usage, and what their speculation achieves."""

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import hf_longspec
from benchmarks.acceptance_card import acceptance_section, records_of_draft
from tests.cli.conftest import run_command

pytestmark = pytest.mark.usefixtures("every_step_speculates")

ROOT = Path(__file__).resolve().parents[1]
CARDS = ROOT / "hub_cards"
TARGET, LONGSPEC, TOKENSWIFT = (CARDS / f"tiny-{name}" for name in ("target", "longspec", "tokenswift"))
EAGLE3, DFLASH, ASSISTANT = (CARDS / f"tiny-{name}" for name in ("eagle3", "dflash", "assistant"))
BUNDLED = [LONGSPEC, TOKENSWIFT, EAGLE3, DFLASH, ASSISTANT]
# Drafts for a model of the Hub, which tests do not have.
PUBLISHED = sorted(CARDS.glob("smollm2-*"))
# Measurements that the cards quote.
RESULTS = ROOT / "benchmarks/results/drafts.jsonl"
FOLDERS = pytest.mark.parametrize("folder", [TARGET, *BUNDLED], ids=lambda folder: folder.name)
DRAFTS = pytest.mark.parametrize("folder", [*BUNDLED, *PUBLISHED], ids=lambda folder: folder.name)

# Measured with torch 2.13 on a CPU. Another order of float sums can turn a near-tie in the draft, and a step or two.
BUNDLED_TAU = (
    (LONGSPEC, hf_longspec.LongSpecDraftModel, {}, 2.33),
    (EAGLE3, hf_longspec.Eagle3DraftModel, {"tree_widths": [4, 4, 4, 3]}, 2.63),
    (DFLASH, hf_longspec.DFlashDraftModel, {}, 1.62),
    (ASSISTANT, hf_longspec.AssistantDraftModel, {}, 1.97),
    (
        TOKENSWIFT,
        hf_longspec.TokenSwiftDraftModel,
        {"tree_branching": [1, 3, 3, 3], "self_draft": "partial_kv", "partial_kv_budget": 512},
        3.32,
    ),
)
TAU_TOLERANCE = 0.1


@pytest.fixture(scope="module")
def target():
    return AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)


@pytest.fixture(scope="module")
def prompt():
    """English that neither model was trained on, the same on every machine."""
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    return tokenizer(text, return_tensors="pt")["input_ids"][:, :900]


def files_of(folder):
    return {
        path.relative_to(folder).as_posix(): path
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def comparable(path):
    """Content, without the version of transformers that wrote it."""
    return re.sub(rb'"transformers_version": "[^"]*"', b"", path.read_bytes())


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with hub_cards as `make cards` builds it: complete repositories, beside the target."""
    cards = tmp_path_factory.mktemp("built") / "hub_cards"
    cards.mkdir()
    (cards / TARGET.name).symlink_to(TARGET)
    for folder in [*BUNDLED, *PUBLISHED]:
        measured = cards.with_name(f"{folder.name}.md")
        results = RESULTS if folder in BUNDLED else RESULTS.with_name(f"{folder.name}.jsonl")
        measured.write_text(acceptance_section(records_of_draft(results, folder.name)), encoding="utf-8")
        arguments = "--dry-run", "--output", cards / folder.name, "--acceptance", measured
        assert run_command("publish", folder, *arguments).exit_code == 0
    return cards


@DRAFTS
def test_the_folder_holds_what_publishing_would_write_without_the_package(folder, built):
    now, then = files_of(built / folder.name), files_of(folder)
    now = {name: path for name, path in now.items() if not name.startswith(("hf_longspec/", "custom_generate/"))}
    stale = sorted(now.keys() ^ then.keys())
    stale += [name for name in now.keys() & then.keys() if comparable(now[name]) != comparable(then[name])]
    assert not stale, (
        f"{folder.name} is stale: {', '.join(stale)}. Run `make cards` and copy them from build/hub_cards."
    )


@FOLDERS
def test_the_usage_on_the_card_runs(folder, monkeypatch):
    monkeypatch.chdir(ROOT)
    (usage,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    names: dict = {}
    exec(usage, names)  # noqa: S102 - what readers of the card are told to run
    assert "out" not in names or names["out"].shape[1] > 32


@pytest.mark.parametrize("folder", [TARGET, *BUNDLED, *PUBLISHED], ids=lambda folder: folder.name)
def test_a_folder_is_small_and_names_no_folder_of_the_machine_that_made_it(folder):
    assert sum(path.stat().st_size for path in files_of(folder).values()) < (
        26_000_000 if folder == TARGET else 9_000_000 if folder in PUBLISHED else 4_000_000
    )
    for path in (*folder.glob("*.json"), folder / "README.md"):
        assert not re.search(r"/(home|root|tmp|work|users)/", path.read_text(encoding="utf-8"), re.IGNORECASE), path
    stored = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert not stored.get("target_name_or_path", "").startswith("/")


def test_the_bundled_drafts(target, prompt):
    """float32 greedy: the text is plain generate's, and tau is what it was when the draft was published."""
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 64, "do_sample": False}
    options["eos_token_id"] = None
    plain = target.generate(prompt, **options)
    for folder, kind, settings, tau in BUNDLED_TAU:
        draft = AutoModel.from_pretrained(folder, dtype=torch.float32)
        assert type(draft) is kind
        draft.generation_config.update(gate=False, **settings)
        assert torch.equal(target.generate(prompt, assistant_model=draft, **options), plain)
        assert draft.last_speculation.mean_acceptance_length == pytest.approx(tau, rel=TAU_TOLERANCE)
