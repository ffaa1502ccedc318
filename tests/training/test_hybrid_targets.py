"""Training of drafts for a target with recurrent states: a few steps, and what the trained draft is good for."""

import pytest
import torch

from hf_longspec.training import TokenWindows
from tests.robustness.enumeration import build

OPTIONS = {"do_sample": False, "max_new_tokens": 30, "pad_token_id": 0, "eos_token_id": None}


@pytest.fixture(scope="session")
def pristine_target():
    """Three layers of the gated delta rule, and one with full attention, the last."""
    return build("qwen3_5_text")


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("longspec", {"max_offset": 0, "learning_rate": 2e-2}), ("eagle3", {"loss": "kl", "target_chunk_size": 8})],
)
def test_a_draft_learns_the_text_of_its_target(make_trainer, make_draft, make_eagle3, target, kind, settings):
    draft = {"longspec": make_draft, "eagle3": make_eagle3}[kind]()
    prompt = torch.randint(3, 30, (4, 9), generator=torch.Generator().manual_seed(1))
    text = target.generate(prompt, **OPTIONS)
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}

    def accepted():
        draft.generation_config.gate = False
        assert target.generate(prompt, **OPTIONS, assistant_model=draft).tolist() == text.tolist()
        return draft.last_speculation.draft_acceptance_rate

    untrained = accepted()
    rows = TokenWindows(text.flatten(), text.shape[1])
    make_trainer(model=draft, dataset=rows, max_steps=25, per_device_train_batch_size=4, **settings).train()
    assert accepted() > untrained + 0.1
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.state_dict().items())
    if kind == "longspec":
        assert draft.config.kv_layer == 3
