"""The settings that a draft is loaded with; what its files may have wrong is tested in tests/robustness."""

import json

import pytest

from hf_longspec import SpecAttnDraftModel
from hf_longspec.testing import tiny_target


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama")


def test_without_generation_config_the_defaults_stand(target, tmp_path):
    SpecAttnDraftModel.from_target(target, num_assistant_tokens=2).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    loaded = SpecAttnDraftModel.from_pretrained(tmp_path)
    assert loaded.generation_config.num_assistant_tokens == SpecAttnDraftModel.settings["num_assistant_tokens"]


def test_a_draft_published_before_a_setting_existed_has_its_default(target, tmp_path):
    """So that `update`, which skips attributes that a GenerationConfig does not have, can change it."""
    SpecAttnDraftModel.from_target(target, num_assistant_tokens=2).save_pretrained(tmp_path)
    path = tmp_path / "generation_config.json"
    saved = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in saved.items() if not name.startswith("ngram")}))
    loaded = SpecAttnDraftModel.from_pretrained(tmp_path)
    loaded.generation_config.update(ngram_candidates=2)
    assert (loaded.setting("ngram_candidates"), loaded.setting("num_assistant_tokens")) == (2, 2)
