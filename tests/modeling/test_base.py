"""Drafts as Hugging Face models: loading, what users do to models, refusals."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModel

from hf_longspec import SpecAttnDraftModel
from hf_longspec.modeling.register_draft import DRAFTS
from tests.tiny_targets import tiny_target


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama")


@pytest.fixture
def draft(target):
    draft = SpecAttnDraftModel.from_target(target, target_name_or_path="org/name")
    draft.generation_config.num_assistant_tokens = 3
    draft.generation_config.selection = "window"
    return draft


def test_config_records_the_target(draft, target, tmp_path):
    draft.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.vocab_size == target.config.vocab_size
    assert config.eos_token_id == target.config.eos_token_id
    assert config.target_name_or_path == "org/name"
    assert config.target["num_hidden_layers"] == target.config.num_hidden_layers
    assert "SpecAttnDraftModel" in json.loads((tmp_path / "config.json").read_text())["architectures"]


def test_what_users_do_to_models_in_general(draft, tmp_path):
    """Arguments and methods that make sense for weights do no harm where there are none."""
    draft.save_pretrained(tmp_path)
    for kwargs in ({"dtype": "auto"}, {"dtype": torch.bfloat16}, {"device_map": "cpu"}, {"use_safetensors": True}):
        loaded = AutoModel.from_pretrained(tmp_path, **kwargs)
        assert loaded.generation_config.to_dict() == draft.generation_config.to_dict()
    assert draft.device == torch.device("cpu") and draft.dtype == torch.float32
    moved = draft.to("cpu").to(torch.bfloat16).eval()
    assert moved is draft and not draft.training and draft.num_parameters() == 0 and draft.state_dict() == {}
    with pytest.raises(NotImplementedError, match="assistant_model=draft"):
        draft(torch.zeros(1, 1, dtype=torch.long))
    # loaded with a config at hand, as AutoModel does
    assert SpecAttnDraftModel.from_pretrained(tmp_path, config=draft.config).config is draft.config


@pytest.mark.parametrize("kind", DRAFTS)
def test_only_a_loaded_model_is_a_target(kind):
    """Not its name, its class or its config, for a draft that is made and for one that is loaded."""
    draft, model = DRAFTS[kind].model, tiny_target("llama")
    for given, shown in (("org/model", "'org/model'"), (None, "None"), (type(model), "Llama"), (model.config, "Llama")):
        with pytest.raises(ValueError, match=rf"got .*{shown}.*AutoModelForCausalLM.from_pretrained"):
            draft.from_target(given)
    with pytest.raises(ValueError, match="got 'org/model'"):
        draft.from_pretrained("org/draft", target="org/model")
