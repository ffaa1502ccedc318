"""EAGLE-3 checkpoints of other projects: layouts, flags, conventions, refusals, a round trip through their format."""

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_longspec import Eagle3DraftModel
from hf_longspec.modeling.eagle3.convert_eagle3 import save_speculators
from tests.modeling.checkpoints import changed_copy, check_round_trip, devices_of_refusal
from tests.tiny_targets import tiny_target

FIXTURES = Path(__file__).with_name("fixtures")
SPECULATORS = sorted(path.name for path in FIXTURES.iterdir() if not path.name.startswith("original"))


@pytest.fixture(scope="module")
def model():
    return tiny_target("llama", vocab_size=97, hidden_size=32, num_hidden_layers=6)


@pytest.fixture
def copy_of(tmp_path):
    """A checkpoint with other values in config.json, other names, and other tensors."""

    def copy(name, *rename, **changes):
        return changed_copy(FIXTURES / name, tmp_path, *rename, **changes)

    return copy


def levels_of(draft):
    expected = load_file(FIXTURES / "llama_plain" / "expected.safetensors")
    with torch.no_grad():
        return draft(aux_hidden_states=expected["taps"][None], tokens=expected["tokens_after"][None], steps=3)


def assert_same_logits(left, right):
    for one, other in zip(levels_of(left), levels_of(right), strict=True):
        assert torch.equal(one, other)


def as_original(name):
    return name.replace("layers.0.", "midlayer.")


def below_model(name):
    return f"model.{name}"


def with_old_norms(name):
    for index, old in enumerate(("low", "mid", "high")):
        name = name.replace(f"fc_norm.{index}.", f"aux_norm_{old}.")
    return name


@pytest.mark.parametrize(
    ("name", "rename"),
    [
        ("llama_norm_before_residual", as_original),
        ("llama_eagle31", below_model),
        ("llama_eagle31", with_old_norms),
        ("original_theta_5000", lambda name: name),
    ],
)
def test_the_same_draft_in_another_layout(copy_of, name, rename):
    folder = copy_of(name, rename)
    unused = {"verifier_norm.weight": torch.ones(32), "midlayer.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file(load_file(folder / "model.safetensors") | unused, folder / "model.safetensors")
    draft = Eagle3DraftModel.from_pretrained(folder)
    assert_same_logits(draft, Eagle3DraftModel.from_pretrained(FIXTURES / name))


def test_a_flat_config_and_the_nested_one_say_the_same(copy_of):
    raw = json.loads((FIXTURES / "llama_norm_before_residual" / "config.json").read_text())
    layer = raw["transformer_layer_config"]
    nested = {"norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": [1, 3, 4]}
    removed = dict.fromkeys(raw, ...)
    wanted = {"eagle_config": nested, "truncated_vocab_size": 40}
    folder = copy_of(
        "llama_norm_before_residual",
        as_original,
        **(removed | layer | {"architectures": ["LlamaForCausalLMEagle3"]}),
        **wanted,
    )
    draft = Eagle3DraftModel.from_pretrained(folder)
    assert list(draft.config.target_layer_ids) == [2, 4, 5]
    assert_same_logits(draft, Eagle3DraftModel.from_pretrained(FIXTURES / "llama_norm_before_residual"))


IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("top", "nested", "expected"),
    [
        ([1, 2, 3], None, (1, 2, 3)),  # inputs, as they are
        (None, [1, 2, 3], (2, 3, 4)),  # outputs
        (None, [2, 4, 6], (2, 4, 6)),  # with the number of layers among them they can only be inputs
        (None, None, (2, 3, 3)),  # 6 layers: 2, n // 2, n - 3
        ([1, 2, 6], [1, 2, 3], (1, 2, 6)),
    ],
)
def test_conventions_of_layers(copy_of, model, top, nested, expected):
    changes = {IDS: ... if top is None else top} | ({} if nested is None else {"eagle_config": {IDS: nested}})
    draft = Eagle3DraftModel.from_pretrained(copy_of("llama_plain", **changes), target=model)
    assert draft.layers_of(model.config) == expected


def test_positions_are_the_drafts_own(copy_of, caplog):
    def theta_of(name, **changes):
        draft = Eagle3DraftModel.from_pretrained(copy_of(name, **changes))
        return draft.config.rope_parameters, draft.config.trained_max_length

    assert theta_of("original_no_theta") == ({"rope_type": "default", "rope_theta": 10000.0}, 64)
    assert theta_of("original_theta_5000")[0]["rope_theta"] == 5000.0
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama3 |= {"original_max_position_embeddings": 8192}
    found, length = theta_of("original_theta_5000", rope_scaling=llama3, max_position_embeddings=131072)
    assert found == llama3 | {"rope_theta": 5000.0} and length == 2048
    yarn = {"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 2048}
    with caplog.at_level(logging.WARNING):
        found, length = theta_of("original_theta_5000", rope_scaling=yarn, max_position_embeddings=65536)
    assert found["rope_theta"] == 10000.0 and "rope_theta=5000.0 with yarn" in caplog.text
    assert length == 65536  # such drafts are trained on long texts


@pytest.mark.parametrize("name", SPECULATORS)
def test_a_round_trip_through_the_format_of_speculators(name, tmp_path):
    draft = Eagle3DraftModel.from_pretrained(FIXTURES / name)
    check_round_trip(draft, save_speculators, FIXTURES / name, tmp_path)
    assert_same_logits(draft, Eagle3DraftModel.from_pretrained(tmp_path))


OTHERS = [
    ("llama_plain", {"speculators_model_type": "dflash"}, "speculators_model_type='dflash'"),
    ("llama_plain", {"drop": ("fc.weight",)}, r"missing tensors \['fc.weight'\]"),
    ("llama_eagle31", {"fc_norm": False}, r"unknown tensors \['fc_norm.0.weight'"),
    ("llama_norm_before_residual", {"draft_vocab_size": 41}, r"(d2t|lm_head.weight) has shape \(40"),
    ("llama_norm_before_residual", {"tensors": {"d2t": torch.arange(40) * -1}}, "d2t maps to 1 tokens"),
    (
        "llama_norm_before_residual",
        {"tensors": {"d2t": torch.full((40,), 90)}, "drop": ("t2d",)},
        "d2t .* from 90 to 129, .* below 97",
    ),
    ("llama_norm_before_residual", {"tensors": {"t2d": torch.ones(97).bool()}}, "those that t2d marks"),
    ("original_no_theta", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
    ("original_no_theta", {"model_type": "llama4"}, "model_type='llama4'"),
    ("original_no_theta", {"eagle_config": {"use_mtp_layernorm": True}}, "use_mtp_layernorm=True"),
]


@pytest.mark.parametrize(("name", "changes", "message"), OTHERS, ids=range(len(OTHERS)))
def test_refusals_in_one_line(copy_of, name, changes, message, monkeypatch):
    """Before any tensor but d2t and its like is read."""
    devices = devices_of_refusal(Eagle3DraftModel, copy_of(name, **changes), message, monkeypatch)
    assert "cpu" not in devices or "2d" in message or message.startswith("d2t")


def test_the_first_eagle_and_a_pickle_of_code_are_refused(tmp_path):
    """The first one's fc joins embedding and state, and its layer is an ordinary one."""
    (tmp_path / "config.json").write_text((FIXTURES / "original_no_theta" / "config.json").read_text())
    weights = {"fc.weight": torch.ones(32, 64), "embed_tokens.weight": torch.ones(97, 32)}
    weights |= {f"layers.0.self_attn.{part}_proj.weight": torch.ones(32, 32) for part in "qkvo"}
    torch.save(weights, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"missing tensors \['d2t', 'layers.0.hidden_norm.weight'"):
        Eagle3DraftModel.from_pretrained(tmp_path)
    torch.save({"fc.weight": print}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin cannot be read \(UnpicklingError\)"):
        Eagle3DraftModel.from_pretrained(tmp_path)


def test_other_targets_are_refused(model):
    for other, message in (
        (tiny_target("llama", vocab_size=96, hidden_size=32), "vocab_size=97, .* 96"),
        (tiny_target("llama", vocab_size=97), r"fc.weight has shape \(32, 96\).*Pass the target"),
    ):
        with pytest.raises(ValueError, match=message):
            Eagle3DraftModel.from_pretrained(FIXTURES / "llama_norm_before_residual", target=other)
    shallow = tiny_target("llama", vocab_size=97, hidden_size=32, num_hidden_layers=4)
    with pytest.raises(ValueError, match="layer 5: LlamaForCausalLM has 4 layers"):
        Eagle3DraftModel.from_pretrained(FIXTURES / "llama_plain", target=shallow)
    with pytest.raises(ValueError, match=r"target_layer_ids=\[1\]: expected a list of 3 integers"):
        Eagle3DraftModel.from_pretrained(FIXTURES / "llama_plain", target=model, target_layer_ids=[1])
