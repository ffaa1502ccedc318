"""DFlash checkpoints of other projects: layouts, refusals, a round trip through the format of speculators."""

import json
import shutil

import pytest
import torch

from hf_longspec import DFlashDraftModel, Eagle3DraftModel
from hf_longspec.modeling.dflash.convert_dflash import save_speculators
from hf_longspec.modeling.eagle3.convert_eagle3 import save_speculators as save_eagle3
from hf_longspec.modeling.register_draft import convert, draft_class_of
from tests.interop import CHAIN, VARIANTS
from tests.interop import DRAFTS as INTEROP
from tests.modeling.checkpoints import changed_copy, check_round_trip, devices_of_refusal, weights_of
from tests.modeling.dflash.test_modeling_dflash import FIXTURES, NAMES, TOLERANCE, error_of, expected_of
from tests.tiny_targets import tiny_target

PEAGLE = FIXTURES.parents[1] / "eagle3" / "peagle_llama"
SIZES = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 8}


@pytest.fixture
def copy_of(tmp_path):
    """A checkpoint with other values in config.json, other names, and other tensors."""

    def copy(name, tensors=None, **changes):
        return changed_copy(PEAGLE if name == "peagle_llama" else FIXTURES / name, tmp_path, tensors=tensors, **changes)

    return copy


@pytest.mark.parametrize("name", NAMES)
def test_a_config_chooses_its_class_and_converts(name, tmp_path):
    """The code that a folder may contain is never run; the saved draft has the logits of the published one."""
    raw = json.loads((FIXTURES / name / "config.json").read_text())
    assert draft_class_of(raw) is DFlashDraftModel
    model = tiny_target("llama", **SIZES)
    model.config.save_pretrained(tmp_path / "target")
    folder = shutil.copytree(FIXTURES / name, tmp_path / "theirs")
    (folder / "config.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    draft = convert(str(folder), str(tmp_path / "target"))
    assert draft.config.target["num_hidden_layers"] == 8
    draft.save_pretrained(tmp_path / "draft")
    loaded = DFlashDraftModel.from_pretrained(tmp_path / "draft", target=model, window=None)
    assert error_of(loaded, expected_of(name)) < TOLERANCE
    assert not (tmp_path / "ran").exists()
    with pytest.raises(ValueError, match="made for a target with"):
        DFlashDraftModel.from_pretrained(tmp_path / "draft", target=tiny_target("qwen3", **SIZES))


@pytest.mark.parametrize("name", [*(name for name in NAMES if name.startswith("spec_")), "peagle_llama"])
def test_a_round_trip_through_the_format_of_speculators(name, tmp_path):
    cls, folder, save = DFlashDraftModel, FIXTURES / name, save_speculators
    if name == "peagle_llama":
        cls, folder, save = Eagle3DraftModel, PEAGLE, save_eagle3
    check_round_trip(cls.from_pretrained(folder), save, folder, tmp_path)


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "window"])
def test_vllm_finds_the_fields_that_it_reads(target, name, tmp_path):
    """In the drafts that `make interop` loads there: vLLM 0.32 refuses a config that lacks one of them."""
    kind, overrides, options = VARIANTS[name]
    cls, save = INTEROP[kind]
    widths = {"tree_widths": [1] * CHAIN} if kind == "eagle3" else {}
    model = target("llama", vocab_size=258, num_hidden_layers=7)
    save(cls.from_target(model, target_layer_ids=[1, 3, 5], **overrides, **widths), tmp_path, model)
    raw = json.loads((tmp_path / "config.json").read_text())
    written, given = raw["speculators_config"], {"peagle": "eagle3"}.get(raw["speculators_model_type"])
    assert (given or raw["speculators_model_type"]) == options["method"]
    assert (raw["speculators_model_type"] == "peagle") == options.get("parallel_drafting", False)
    (method,) = written["proposal_methods"]
    assert written["default_proposal_method"] == method["proposal_type"] == "greedy"
    assert method["speculative_tokens"] == CHAIN and "name_or_path" in written["verifier"]
    assert raw["transformer_layer_config"]["model_type"] == ("qwen3" if kind == "dflash" else "llama")
    ids = "aux_hidden_state_layer_ids" if kind == "dflash" else "eagle_aux_hidden_state_layer_ids"
    assert raw[ids] == [1, 3, 5] and raw["draft_vocab_size"] == 258
    assert raw.get("mask_token_id") == overrides.get("mask_token_id")
    assert not raw.get("sample_from_anchor", False)  # vLLM reads slot 0 as the last emitted token
    names = set(weights_of(tmp_path))
    assert ("mask_hidden" in names) == (name == "peagle")
    assert {"embed_tokens.weight", "lm_head.weight"} <= names or kind == "dflash"  # whose ends are the target's


@pytest.mark.parametrize("name", ["deepspec_dspark_vanilla", "zlab_full"])
def test_other_layouts_are_written_in_that_of_speculators(name, tmp_path):
    save_speculators(DFlashDraftModel.from_pretrained(FIXTURES / name), tmp_path)
    assert error_of(DFlashDraftModel.from_pretrained(tmp_path, window=None), expected_of(name)) < TOLERANCE


NESTED = {"mask_token_id": 96, "target_layer_ids": [1, 3]}
OWN = json.loads((FIXTURES / "zlab_full" / "config.json").read_text())["dflash_config"]


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"is_causal": True}, {"causal": True}),
        ({"is_causal": None}, {"causal": None}),
        ({"dflash_config": OWN | {"causal": False, "num_target_layers": 8}}, {"causal": False}),
        ({"dflash_config": OWN | {"causal_head": True, "mask_token": "<mask>"}}, {"causal": True}),
        ({"dflash_config": OWN | {"sample_from_anchor": True}}, {"sample_from_anchor": True}),
        (
            {"layer_types": ..., "dflash_config": OWN | {"use_swa": True, "swa_window_size": 5}},
            {"layer_windows": [5, 5]},
        ),
        ({"dflash_config": OWN | {"selector_rank": None}}, {"selector_rank": 0}),
    ],
)
def test_fields_that_other_engines_read(copy_of, changes, fields):
    config = DFlashDraftModel.from_pretrained(copy_of("zlab_full", **changes)).config
    assert {name: getattr(config, name) for name in fields} == fields


def test_sinks_and_the_factor_of_values_are_read(copy_of):
    """The factor of MiMo's values becomes a part of their projection."""
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    tensors = {f"layers.{layer}.self_attn.attention_sink_bias": sinks + layer for layer in range(2)}
    nested = OWN | {"attention_sink_bias": True, "attention_value_scale": 0.5}
    draft = DFlashDraftModel.from_pretrained(copy_of("zlab_full", tensors=tensors, dflash_config=nested))
    plain = DFlashDraftModel.from_pretrained(FIXTURES / "zlab_full")
    for index, (layer, other) in enumerate(zip(draft.layers, plain.layers, strict=True)):
        assert torch.equal(layer.self_attn.attention_sink_bias, sinks + index)
        assert torch.equal(layer.self_attn.v_proj.weight, 0.5 * other.self_attn.v_proj.weight)
    with pytest.raises(ValueError, match="missing tensors"):
        DFlashDraftModel.from_pretrained(copy_of("zlab_full", dflash_config=nested))


def test_what_the_format_of_speculators_cannot_say(target, tmp_path):
    model, make = target("llama"), DFlashDraftModel.from_target
    for draft, reason in (
        (DFlashDraftModel.from_pretrained(FIXTURES / "muse_sliding"), "windows that move with the slots"),
        (make(model, causal=True), "causal=True in layers without a window"),
        (make(model, attention_sink_bias=True), "attention_sink_bias=True"),
    ):
        with pytest.raises(ValueError, match=f"{reason}, .*cannot say"):
            save_speculators(draft, tmp_path)


OTHERS = [
    ("zlab_full", {"dflash_config": NESTED | {"projector_type": "domino"}}, "projector_type='domino'"),
    ("zlab_full", {"dflash_config": {"target_layer_ids": [1, 3]}}, "no mask_token_id"),
    ("zlab_full", {"dflash_config": {"mask_token_id": 97}}, r"mask_token_id=97: .*below 97"),
    ("zlab_full", {"quantization_config": {"bits": 4}}, "quantized drafts"),
    ("deepspec_dspark_vanilla", {"architectures": ["Gemma4DSparkModel"]}, "Gemma4DSparkModel"),
    ("deepspec_dspark_vanilla", {"target_layer_ids": ...}, "no target_layer_ids"),
    ("deepspec_dspark_vanilla", {"markov_head_type": "gated"}, "missing tensors"),
    ("spec_dspark_rnn", {"sample_from_anchor": False}, "markov_head_type='rnn' with sample_from_anchor=False"),
    ("spec_dflash_anchor", {"speculators_model_type": "xpress"}, "xpress"),
    ("spec_dflash2", {"draft_vocab_size": 40}, "selector_rank"),
]


@pytest.mark.parametrize(("name", "changes", "message"), OTHERS, ids=range(len(OTHERS)))
def test_refusals_in_one_line(copy_of, name, changes, message, monkeypatch):
    """Before any tensor but the map of the vocabulary is read."""
    devices = devices_of_refusal(DFlashDraftModel, copy_of(name, **changes), message, monkeypatch)
    assert "cpu" not in devices


@pytest.mark.parametrize("changes", [{"mask_token_id": ...}, {"pard_token": 3}, {"drop": ("mask_hidden",)}])
def test_refusals_of_p_eagle(copy_of, changes):
    with pytest.raises(ValueError, match=r"mask_token_id|pard_token|mask_hidden"):
        Eagle3DraftModel.from_pretrained(copy_of("peagle_llama", **changes))


def test_layers_follow_from_the_number_of_the_targets(copy_of):
    """z-lab: from layer 1 to the fourth last, at equal distances, one for each layer of the draft, by outputs."""
    nested, fc = {"mask_token_id": 96}, torch.ones(32, 64)
    folder = copy_of("zlab_full", {"fc.weight": fc}, dflash_config=nested, num_target_layers=..., num_hidden_layers=2)
    draft = DFlashDraftModel.from_pretrained(folder, target=tiny_target("llama", **SIZES))
    assert draft.config.target_layer_ids == [2, 6]
    with pytest.raises(ValueError, match="pass target=, whose number of layers"):
        DFlashDraftModel.from_pretrained(folder)
