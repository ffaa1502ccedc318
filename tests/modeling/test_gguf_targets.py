"""Targets that transformers loads from GGUF files: unpacked, and with the weights left in their blocks."""

import copy
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, GgufConfig

from hf_longspec import LongSpecDraftModel, NgramDraftModel, SpecAttnDraftModel, audit
from hf_longspec.generation.special_cases.forward_check import is_quantized
from hf_longspec.modeling.shared.draft_weights import rounded_layers
from tests.gguf_files import HIDDEN_SIZE, VOCAB_SIZE, write_tiny_gguf
from tests.tiny_targets import tiny_prompts

FREE = {"gate": False, "num_assistant_tokens": 3, "sparse_min_tokens": 8}


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """The model as transformers loads it by default without a kernel, and its matrices by the package gguf."""
    pytest.importorskip("gguf")
    matrices = write_tiny_gguf(file := tmp_path_factory.mktemp("models") / "tiny.gguf")
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    return SimpleNamespace(model=model.eval(), matrices=matrices, file=file)


@pytest.fixture
def in_blocks(unpacked, monkeypatch):
    """The model with MLPs in blocks, and kernels that unpack them; transformers keeps those of three architectures."""
    gguf = pytest.importorskip("gguf")
    utils = pytest.importorskip("transformers.integrations.gguf.utils")
    kernels = pytest.importorskip("transformers.integrations.gguf.kernels")
    kind = gguf.GGMLQuantizationType.Q8_0

    def product(weight, x, ggml_type, rows):
        return x @ utils.dequantize_blocks(weight, ggml_type, rows, x.shape[-1], x.dtype).T

    monkeypatch.setattr(utils, "mul_mat_vec", product)
    monkeypatch.setattr(kernels, "_gguf_kernel", False)
    model = copy.deepcopy(unpacked.model)
    for number, layer in enumerate(model.model.layers):
        for name in ("gate", "up", "down"):
            matrix = unpacked.matrices[f"blk.{number}.ffn_{name}"]
            packed = utils.GgufLinear(matrix.shape[1], matrix.shape[0], int(kind))
            packed.weight.data = torch.from_numpy(gguf.quants.quantize(matrix, kind))
            setattr(layer.mlp, f"{name}_proj", packed)
    return model


DRAFTS = {
    "ngram": lambda model: NgramDraftModel.from_target(model, gate=False),
    "specattn": lambda model: SpecAttnDraftModel.from_target(model, **FREE),
    "longspec": lambda model: LongSpecDraftModel.from_target(model, gate=False),
    "int4": lambda model: SpecAttnDraftModel.from_target(model, draft_weights="int4", **FREE),
}


def text_beside_stock(model, draft):
    """Assert that a batch of texts is that of stock generate, and that trees were verified."""
    ids, mask = tiny_prompts(VOCAB_SIZE, [40, 23])
    how = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, assistant_model=draft, **how), model.generate(ids, **how))
    assert draft.last_speculation.num_spec_steps > 0


@pytest.mark.parametrize("name", DRAFTS)
def test_unpacked_weights(unpacked, name):
    model = unpacked.model
    weight = model.model.layers[1].mlp.down_proj.weight
    assert torch.equal(weight, torch.from_numpy(unpacked.matrices["blk.1.ffn_down"]))
    assert not is_quantized(model)  # whatever the flags say
    text_beside_stock(model, DRAFTS[name](model))


@pytest.mark.parametrize("name", ["ngram", "specattn", "longspec"])
def test_weights_in_blocks(in_blocks, name):
    assert is_quantized(in_blocks)
    text_beside_stock(in_blocks, DRAFTS[name](in_blocks))


def test_blocks_are_not_rounded_again(in_blocks):
    with pytest.raises(ValueError, match=r"or load the target with quantization_config=GgufConfig\(dequantize=True\)"):
        DRAFTS["int4"](in_blocks)


def test_all_unpacked_layers_are_rounded(unpacked):
    assert HIDDEN_SIZE % 64 and len(list(rounded_layers(unpacked.model, 4))) == 14


def test_audit_of_unpacked_weights_and_of_blocks(unpacked, in_blocks):
    ids, _ = tiny_prompts(VOCAB_SIZE, [40])
    for model in (unpacked.model, in_blocks):
        draft = DRAFTS["specattn"](model)
        text = model.generate(ids, assistant_model=draft, max_new_tokens=8, do_sample=False)
        assert audit(model, text, ids.shape[1], pad_token_id=0).verdict == "exact"
        text[0, -1] = (text[0, -1] + 1) % VOCAB_SIZE
        assert audit(model, text, ids.shape[1], pad_token_id=0).verdict == "NOT lossless"


def test_a_draft_of_an_unpacked_target_is_saved(unpacked, tmp_path):
    """It does not say that its own weights are in blocks."""
    DRAFTS["longspec"](unpacked.model).save_pretrained(tmp_path)
    loaded = LongSpecDraftModel.from_pretrained(tmp_path)
    assert getattr(loaded.config, "quantization_config", None) is None and loaded.dtype == torch.float32
    plain = AutoModelForCausalLM.from_pretrained(
        unpacked.file.parent, gguf_file=unpacked.file.name, quantization_config=GgufConfig(dequantize=True)
    )
    loaded.generation_config.gate = False
    text_beside_stock(plain, loaded)
