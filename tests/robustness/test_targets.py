"""Targets that are not a plain model in memory: adapters, offloading, pipelines."""

from itertools import cycle
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, pipeline

from hf_longspec import PlainDraftModel
from tests.pairwise import few
from tests.robustness.drafts import ALL_KINDS, make_draft
from tests.tiny_targets import generate as generate_text
from tests.tiny_targets import tiny_target

LENGTHS = (33, 3, 13)
# A checkpoint of another project, and what it needs of its target.
PUBLISHED = Path(__file__).parents[1] / "modeling" / "eagle3" / "fixtures" / "llama_plain"
PUBLISHED_TARGET = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 6}


def generate(model, draft=None):
    return generate_text(model, draft, LENGTHS, max_new_tokens=10).tolist()


def check(model, draft):
    """The text is the same with the draft, and came from verifications."""
    text = generate(model)
    assert generate(model, draft) == text
    assert draft.last_speculation.num_spec_steps > 0
    return text


def adapted(model, modules):
    """A LoRA adapter that is felt: its second matrix does not begin at 0."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=modules, init_lora_weights=False)
    return peft.get_peft_model(model, config).eval()


@pytest.mark.parametrize(("kind", "modules"), [("longspec", ["q_proj", "down_proj"]), ("tokenswift", ["linear"])])
def test_lora_draft(kind, modules):
    """As it comes from training an adapter."""
    target = tiny_target("llama")
    lora = adapted(make_draft(kind, target), modules)
    assert generate(target, lora) == generate(target)
    assert lora.base_model.model.last_speculation.num_draft_tokens > 0


def test_device_map(tmp_path):
    """Weights that wait on a disk are read in for every forward, also by drafts that use the target's own modules."""
    whole = tiny_target("llama")
    whole.save_pretrained(tmp_path / "target")
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    places |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "disk"}
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "target", device_map=places, offload_folder=tmp_path / "offload", dtype=torch.float32
    ).eval()
    assert model.get_parameter("model.layers.1.mlp.up_proj.weight").device.type == "meta"  # it waits on the disk
    assert check(model, make_draft("longspec", model)) == generate(whole)


def test_pipeline(tokenizer, tmp_path):
    """With drafts as objects, and by the names of saved and of published ones."""
    model, texts = tiny_target("llama", **PUBLISHED_TARGET), ["a longer text, padded", "short"]
    options = {"tokenizer": tokenizer, "batch_size": len(texts), "device": "cpu"}
    call = {"do_sample": False, "max_new_tokens": 9, "suppress_tokens": [*range(len(tokenizer), 97)]}
    expected = pipeline("text-generation", model=model, **options)(texts, **call)
    draft = make_draft("longspec", model, tree_widths=[20, 20])
    draft.save_pretrained(tmp_path / "saved")
    draft.config.eos_token_id = 5  # which says nothing about the tokenizer of a draft
    for assistant in (draft, str(tmp_path / "saved"), tmp_path / "saved", str(PUBLISHED)):
        drafted = pipeline("text-generation", model=model, assistant_model=assistant, **options)
        assert drafted(texts, **call) == expected
        assert drafted.assistant_model.last_speculation.num_forwards > 0
        assert drafted.assistant_tokenizer is None


def test_the_small_model_of_a_pipeline_is_loaded_as_before(tokenizer, tmp_path):
    model = tiny_target("llama", vocab_size=len(tokenizer))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    drafted = pipeline("text-generation", model=model, assistant_model=str(tmp_path), tokenizer=tokenizer, device="cpu")
    assert type(drafted.assistant_model) is type(model)
    with pytest.raises(OSError, match="missing"):
        pipeline("text-generation", model=model, assistant_model=str(tmp_path / "missing"), tokenizer=tokenizer)


# One of them is the target without an adapter.
ADAPTERS = ["one", "__base__", "two"]


MODULES = [["q_proj", "v_proj", "down_proj"], ["o_proj", "embed_tokens", "lm_head"]]


@pytest.mark.parametrize(("kind", "modules"), few([*zip(ALL_KINDS, cycle(MODULES))], 6), ids=str)
def test_an_adapter_for_each_row(kind, modules, monkeypatch):
    """Greedy, and at equal seed; every check and trial of the target runs anew under these rows."""
    peft = pytest.importorskip("peft")
    settings = {"acceptance": "coupled"} if kind == "specattn" else {}
    bare = tiny_target("llama")
    draft, plain = make_draft(kind, bare, **settings), PlainDraftModel.from_target(bare)
    torch.manual_seed(0)
    lora = peft.get_peft_model(bare, peft.LoraConfig(r=4, target_modules=modules, init_lora_weights=False), "one")
    lora.add_adapter("two", peft.LoraConfig(r=3, target_modules=modules, init_lora_weights=False))

    def text(assistant, names=ADAPTERS, **options):
        return generate_text(
            lora.eval(), assistant, LENGTHS, max_new_tokens=10, adapter_names=names, **options
        ).tolist()

    assert text(draft) == text(None) != text(None, ADAPTERS[::-1])
    assert draft.last_speculation.num_spec_steps > 0
    assert text(draft, do_sample=True) == text(plain, do_sample=True)
