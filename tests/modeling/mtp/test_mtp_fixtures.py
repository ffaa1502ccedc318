"""MTP layers of six families against the outputs of their publishers' code."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_longspec import MtpDraftModel
from hf_longspec.modeling.mtp import modeling_mtp
from hf_longspec.modeling.mtp.generation_mtp import MtpDrafter
from tests.modeling.calls import LENGTHS, check_text, generate, watch_levels
from tests.robustness.shrunk_configs import shrunk_config
from tests.robustness.test_targets import adapted

FIXTURES = Path(__file__).parent / "fixtures"
# The targets of the last two have recurrent layers.
FAMILIES = ("deepseek_v3", "glm4_moe", "mimo_derived", "ernie4_5_derived", "qwen3_next", "qwen3_5")
# Wide, as the weights are random.
SETTINGS = {"tree_widths": [12, 6], "window": 8, "sinks": 2, "gate": False, "on_unsupported": "error"}
# float32 sums in another order
CLOSE = {"atol": 1e-4, "rtol": 0}


@torch.no_grad()
def chain_logits(draft, states, tokens, steps, target):
    """Logits `(1, T - 1, V)` of the entries of a text, and `(1, 1, V)` of each step of the greedy chain after it.

    State p is joined with token p + 1.
    """
    states, tokens = states[:, :-1], tokens[:, 1:]
    logits = draft(states, tokens, target)
    for step in range(1, steps + 1):
        tokens = torch.cat([tokens, logits[-1][:, -1:].argmax(-1)], 1)
        logits.append(draft(states, tokens, target, step + 1)[-1][:, -1:])
    return logits


def target_of(folder):
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_publisher(family):
    folder = FIXTURES / family
    target = target_of(folder)
    draft, expected = MtpDraftModel.from_target(target), load_file(folder / "expected.safetensors")
    ids = expected["ids"].view(1, -1)
    states = expected["target_hidden"].view(1, ids.shape[1], -1)
    rows = 0
    for number in (0, 1):
        wanted = expected[f"round_{number}_logits"].view(-1, target.config.vocab_size)
        rows += len(wanted)
        got = chain_logits(draft, states[:, : rows + 1], ids[:, : rows + 1], 2, target)
        torch.testing.assert_close(got[0][0, -len(wanted) :], wanted, **CLOSE)
        for step in (1, 2):
            chained = expected[f"round_{number}_chain_{step}_logits"].view(-1)
            torch.testing.assert_close(got[step].view(-1), chained, **CLOSE)
    wrong = expected["target_before_norm"].view_as(states)
    assert not torch.allclose(chain_logits(draft, wrong, ids, 0, target)[0][0, : len(wanted)], wanted, **CLOSE)


@pytest.mark.parametrize(
    ("family", "widths"), [("qwen3_5", [1, 1, 1]), ("mimo_derived", [2, 2]), ("deepseek_v3", [2, 2])]
)
def test_drafting_is_a_forward_over_the_text(family, widths, monkeypatch):
    """Of the most likely token of every level, after a text of any length; so of rings, rejections and prompts."""
    target, drafted = target_of(FIXTURES / family), watch_levels(monkeypatch, MtpDrafter)
    settings = SETTINGS | {"tree_widths": widths, "window": "all", "sinks": 0}
    draft = MtpDraftModel.from_target(target, **settings)
    text, compared = generate(target, draft), 0
    assert torch.equal(text, generate(target, None))
    for row, length in enumerate(LENGTHS):
        ids = text[row : row + 1, max(LENGTHS) - length :]
        with torch.no_grad():
            states = target.model(ids).last_hidden_state
        for ends, levels in drafted:
            known = ends[row] + 2  # with the root, whose state is not read
            if known >= ids.shape[1]:  # the row has ended
                continue
            expected = chain_logits(draft, states[:, :known], ids[:, :known], len(levels) - 1, target)
            for (logits, *_), wanted in zip(levels, expected, strict=True):
                torch.testing.assert_close(logits[row, 0], wanted[0, -1], **CLOSE)
                compared += 1
    assert compared > 40


@pytest.mark.parametrize("family", ["qwen3_next", "deepseek_v3"])
def test_a_target_with_an_adapter(family):
    """The layers are those of the checkpoint, whether they are read before or after the adapter was added."""
    target = target_of(FIXTURES / family)
    plain, draft = generate(target, None), MtpDraftModel.from_target(target, **SETTINGS)
    lora = adapted(target, ["o_proj"])
    assert not torch.equal(generate(lora, None), plain)
    check_text(lora, draft)
    check_text(lora, MtpDraftModel.from_target(lora, **SETTINGS))


def test_a_saved_draft_needs_no_files_of_the_target(tmp_path):
    folder = shutil.copytree(FIXTURES / "deepseek_v3", tmp_path / "target")
    target = target_of(folder)
    MtpDraftModel.from_target(target, **SETTINGS).save_pretrained(tmp_path / "draft")
    shutil.rmtree(folder)
    check_text(target, MtpDraftModel.from_pretrained(tmp_path / "draft"))
    with pytest.raises(ValueError, match="checkpoint="):
        MtpDraftModel.from_target(target)


@pytest.mark.parametrize(
    ("field", "value", "message", "checkpoint"),
    [
        ("_name_or_path", "", "checkpoint=", None),  # a target in memory
        ("model_type", "mellum", "mellum.*not been compared", None),
        ("model_type", "step3p5", "step3p5.*disagree", None),
        ("is_encoder_decoder", True, "cannot be used with assistant_model=MtpDraftModel", "no/folder"),
    ],
)
def test_targets_that_are_refused_before_files_are_read(field, value, message, checkpoint):
    target = target_of(FIXTURES / "glm4_moe")
    setattr(target.config, field, value)
    with pytest.raises(ValueError, match=message):
        MtpDraftModel.from_target(target, checkpoint)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("falcon_h1", "type hybrid, which keeps recurrent states"),
        ("bamba", "made with layer_type"),
        ("gemma4_text", "takes per_layer_input, shared_kv_states"),
        ("deepseek_v32", "whose indexer keeps keys of its own"),
        ("gpt_neox", "takes layer_past"),
        ("longcat_flash", "4 layers, and its config counts 8"),
        ("llama4_text", "no function of its own to rotate"),
        ("gpt_neox_japanese", "AttentionInterface"),
        ("mllama", "no class for its language model alone"),
    ],
)
def test_targets_whose_layers_need_more_than_an_mtp_layer_gets(model_type, reason):
    """They are refused by name before a checkpoint is looked for."""
    fields = {"global_head_dim": 32} if model_type.startswith("gemma4") else {}
    with torch.device("meta"):
        target = AutoModelForCausalLM.from_config(shrunk_config(model_type, **fields))
    with pytest.raises(ValueError, match=f"layer of model_type='{model_type}.*{reason}.*Use another draft"):
        MtpDraftModel.from_target(target, "no/folder")


def test_a_class_that_cannot_be_built_of_its_config_is_refused(monkeypatch):
    """A class of another project may raise any error."""

    def fails(*args, **kwargs):
        raise TypeError("sizes per layer")

    target = target_of(FIXTURES / "glm4_moe")
    monkeypatch.setattr(modeling_mtp.AutoModel, "from_config", fails)
    with pytest.raises(ValueError, match=r"cannot be built of config alone \(TypeError: sizes per layer\)"):
        MtpDraftModel.from_target(target)


def test_tensors_that_are_no_weights_are_refused(tmp_path):
    folder = shutil.copytree(FIXTURES / "glm4_moe", tmp_path / "target")
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if name.endswith("eh_proj.weight"))
    save_file(weights | {name: weights[name].to(torch.int8)}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"type torch.int8 in .*, expected floating point"):
        MtpDraftModel.from_target(target_of(FIXTURES / "glm4_moe"), str(folder))


def test_several_layers_are_refused(tmp_path):
    folder, target = shutil.copytree(FIXTURES / "deepseek_v3", tmp_path / "target"), target_of(FIXTURES / "deepseek_v3")
    weights, first = load_file(folder / "model.safetensors"), target.config.num_hidden_layers
    second = {name.replace(f"layers.{first}.", f"layers.{first + 1}."): x.clone() for name, x in weights.items()}
    save_file(second | weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="has several MTP layers: expected one"):
        MtpDraftModel.from_target(target, str(folder))


def test_an_index_of_no_files_is_refused(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": null}')
    with pytest.raises(ValueError, match=r"index\.json cannot be read \(TypeError: weight_map is None\)"):
        MtpDraftModel.from_target(target_of(FIXTURES / "glm4_moe"), str(tmp_path))
