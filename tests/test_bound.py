"""`bind`: every call of `generate` of a model drafts, whoever makes it, and its text is that without the draft."""

import copy
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
    pipeline,
)

import hf_longspec
from hf_longspec import NgramDraftModel
from hf_longspec.bound import generating_model
from tests.tiny_targets import tiny_target

VOCAB = 24
CARDS = Path(__file__).resolve().parents[1] / "hub_cards"
HOW = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


@pytest.fixture
def model():
    return tiny_target("llama", vocab_size=VOCAB)


@pytest.fixture
def draft(model):
    return NgramDraftModel.from_target(model, gate=False)


def prompts():
    ids = torch.randint(4, VOCAB, (2, 9), generator=torch.Generator().manual_seed(1)).repeat(1, 2)
    mask = torch.ones_like(ids)
    ids[1, :5], mask[1, :5] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def test_calls_draft_until_the_end_of_the_block(model, draft):
    expected = model.generate(**prompts(), **HOW)
    with hf_longspec.bind(model, draft) as bound:
        assert torch.equal(model.generate(**prompts(), **HOW), expected)
        assert bound.draft is draft and draft.last_speculation.num_accepted_draft_tokens > 0
        assert draft.last_speculation.reason is None
        other = NgramDraftModel.from_target(model)
        draft.last_speculation = None
        assert torch.equal(model.generate(**prompts(), **HOW, assistant_model=other), expected)
        assert draft.last_speculation is None and other.last_speculation is not None
        with pytest.raises(ValueError, match=r"bound or replaced already\. Undo that first"):
            hf_longspec.bind(model, draft)
    draft.last_speculation = None
    assert torch.equal(model.generate(**prompts(), **HOW), expected) and draft.last_speculation is None
    bound.undo()


def test_the_model_stays_as_it_was(model, draft, tmp_path):
    """Its weights, files and copies: a copy generates with its own weights, and without a draft."""
    before = list(model.state_dict())
    with hf_longspec.bind(model, draft):
        assert list(model.state_dict()) == before
        model.save_pretrained(tmp_path / "saved")
        copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        for one in copies:
            draft.last_speculation = None
            with torch.no_grad():
                one.lm_head.weight.mul_(-1)
            out = one.generate(**prompts(), **HOW)
            assert draft.last_speculation is None and not torch.equal(out, model.generate(**prompts(), **HOW))


def test_owners_of_a_model(model, draft):
    """A trainer, a pipeline, an adapter, wrappers of processes, and what has none."""
    trainer = Trainer(model, TrainingArguments(output_dir="unused", report_to=[], use_cpu=True))
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    for owner in (
        trainer,
        adapted,
        SimpleNamespace(module=model),
        SimpleNamespace(model=SimpleNamespace(module=adapted)),
    ):
        assert generating_model(owner) is model
    for owner in (object(), SimpleNamespace(model=None), torch.nn.Linear(1, 1)):
        with pytest.raises(ValueError, match="has no model that generates"):
            hf_longspec.bind(owner, draft)


def test_calls_through_an_adapter(model, draft):
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)).eval()
    expected = adapted.generate(**prompts(), **HOW)
    with hf_longspec.bind(adapted, draft):
        assert torch.equal(adapted.generate(**prompts(), **HOW), expected)
        assert draft.last_speculation.num_accepted_draft_tokens > 0


def test_what_cannot_be_served_is_decoded_without(model, draft):
    with hf_longspec.bind(model, draft):
        config = GenerationConfig(num_beams=2, **HOW)
        beams = model.generate(**prompts(), generation_config=config)
    assert torch.equal(beams, model.generate(**prompts(), generation_config=config))


def test_a_draft_by_its_folder_and_a_pipeline():
    """As `assistant_model` takes it."""
    target = AutoModelForCausalLM.from_pretrained(CARDS / "tiny-target", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(CARDS / "tiny-target")
    pipe, how = (
        pipeline("text-generation", model=target, tokenizer=tokenizer),
        {"max_new_tokens": 12, "do_sample": False},
    )
    expected = pipe("one two three, one two", **how)
    with hf_longspec.bind(pipe, CARDS / "tiny-longspec") as bound:
        assert pipe("one two three, one two", **how) == expected
        assert bound.draft.last_speculation.num_draft_tokens > 0


def test_predictions_of_a_sequence_trainer(model, draft, tmp_path):
    settings = {"predict_with_generate": True, "generation_max_length": 40, "report_to": [], "use_cpu": True}
    args = Seq2SeqTrainingArguments(str(tmp_path), per_device_eval_batch_size=2, disable_tqdm=True, **settings)
    model.generation_config.update(do_sample=False, pad_token_id=0, eos_token_id=None)
    columns = prompts() | {"labels": prompts()["input_ids"]}
    rows = [{name: value[row] for name, value in columns.items()} for row in range(2)]
    trainer = Seq2SeqTrainer(model, args)
    expected = trainer.predict(rows).predictions
    with hf_longspec.bind(trainer, draft):
        assert (trainer.predict(rows).predictions == expected).all()
    assert draft.last_speculation.num_accepted_draft_tokens > 0
