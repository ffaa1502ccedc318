"""Refusals before a run, saved drafts, checkpoints and adapters, with LongSpec drafts."""

import pytest
import torch
from safetensors.torch import load_file

from hf_longspec import LongSpecDraftModel, SpecAttnDraftModel
from hf_longspec.training import DraftTrainer, DraftTrainingArguments, TokenWindows
from hf_longspec.training.checkpoints import last_complete_checkpoint
from tests.tiny_targets import tiny_prompts, tiny_target, unpacked


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def refuse(match, make, **settings):
    with pytest.raises(ValueError, match=match) as caught:
        make(**settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_target_is_moved_unless_it_is_quantized(make_trainer, target, monkeypatch, is_packed):
    """By its layers, as a flag stays when weights are unpacked."""
    moved = []
    monkeypatch.setattr(target, "to", moved.append)
    unpacked(target).unused = torch.nn.Linear(2, 2).to(torch.float8_e4m3fn if is_packed else torch.float32)
    trainer = make_trainer()
    assert moved == [] if is_packed else moved == [trainer.args.device]


class TestRefusals:
    """Each gives the value, the rule and the remedy in one line."""

    def test_datasets_without_rows_or_columns(self, make_trainer, tokenizer):
        refuse("train_dataset", make_trainer, dataset=[])
        refuse("eval_dataset", make_trainer, eval_dataset=iter(()))
        refuse(r"\['content', 'id'\].*text_column='text'", make_trainer, dataset=[{"content": "x", "id": 1}])
        refuse("text_column='body'", make_trainer, dataset=[{"text": "x"}], text_column="body", tokenizer=tokenizer)
        refuse("processing_class", make_trainer, dataset=[{"text": "x"}])

    def test_lengths_beyond_the_target(self, make_trainer, tokens, draft, heads):
        for model in (draft, heads):
            refuse("513 tokens.*512.*max_length", make_trainer, max_length=513, model=model)
            trainer = make_trainer(dataset=TokenWindows(tokens, 600), model=model)
            refuse("600 tokens.*512", trainer.train)

    @pytest.mark.parametrize(
        ("settings", "match"),
        [
            ({"loss": "mse"}, "loss='mse': expected one of kl, ce"),
            ({"anchors": -1}, "anchors=-1: expected an integer of at least 0"),
            ({"max_length": 1}, "max_length=1: .* A row needs"),
            ({"remove_unused_columns": True}, "remove_unused_columns"),
            ({"push_to_hub": True}, "push_to_hub=True"),
            ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1.*Leave it out"),
        ],
    )
    def test_settings(self, tmp_path, settings, match):
        refuse(match, DraftTrainingArguments, output_dir=str(tmp_path), use_cpu=True, **settings)

    @pytest.mark.parametrize("name", ["compute_metrics", "preprocess_logits_for_metrics", "compute_loss_func"])
    def test_functions_that_would_not_be_called(self, draft, target, tmp_path, name):
        args = DraftTrainingArguments(str(tmp_path), use_cpu=True)
        refuse(f"{name}=.*would not be called", DraftTrainer, model=draft, target=target, args=args, **{name: print})

    def test_reentrant_checkpoints(self, draft):
        enable = draft.gradient_checkpointing_enable
        refuse("use_reentrant=True", enable, gradient_checkpointing_kwargs={"use_reentrant": True})
        assert not draft.is_gradient_checkpointing

    def test_uploads(self, make_trainer):
        refuse("draft.push_to_hub", make_trainer().push_to_hub)

    def test_models_that_do_not_fit_together(self, make_trainer, make_draft, target):
        target.train()
        refuse("bfloat16.*draft.float", make_trainer, model=make_draft().bfloat16())
        refuse("requires a gradient", make_trainer, model=make_draft().requires_grad_(False))
        refuse(r"noise_range=\[3, 2\]", make_trainer, model=make_draft(noise_range=[3, 2]))
        args = DraftTrainingArguments("unused", use_cpu=True)
        refuse("hidden_size=64, and this target has hidden_size=32", DraftTrainer, model=make_draft(), args=args,
               target=tiny_target("llama", vocab_size=260, hidden_size=32))  # fmt: skip
        for model in (SpecAttnDraftModel.from_target(target), target):
            refuse(f"{type(model).__name__}.*Eagle3.*LongSpec.*TokenSwiftDraftModel", make_trainer, model=model)
        # a refusal changes nothing
        assert target.training and all(parameter.requires_grad for parameter in target.parameters())


def test_a_loss_of_nan_ends_the_run_before_it_reaches_the_weights(make_trainer, draft):
    trainer = make_trainer(max_steps=5)
    with torch.no_grad():
        draft.block.mlp.down_proj.weight[0, 0] = float("nan")
    before = weights(draft)
    with pytest.raises(FloatingPointError, match=r"step 1 is nan.*learning_rate"):
        trainer.train()
    assert all(
        tensor.equal(before[name]) or name.endswith("down_proj.weight") for name, tensor in draft.state_dict().items()
    )


def test_the_last_complete_checkpoint_is_used(tmp_path):
    with pytest.raises(ValueError, match="no complete checkpoint"):
        last_complete_checkpoint(tmp_path)
    for step in (2, 10, 30):
        (tmp_path / f"checkpoint-{step}").mkdir()
    for step in (2, 10):
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
    assert last_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")


def test_only_the_adapter_is_saved_and_it_loads_and_drafts(make_trainer, draft, target, tmp_path):
    """LoRA on an existing draft."""
    peft = pytest.importorskip("peft")
    draft.save_pretrained(tmp_path / "base")
    base = weights(draft)
    config = peft.LoraConfig(r=3, target_modules=["q_proj", "o_proj", "down_proj"])
    trainer = make_trainer(peft_config=config, max_steps=4)
    trainer.train()
    trainer.save_model(tmp_path / "adapter")
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert saved and all("lora_" in name for name in saved)
    fresh = LongSpecDraftModel.from_pretrained(tmp_path / "base")
    assert all(tensor.equal(base[name]) for name, tensor in fresh.state_dict().items())
    loaded = peft.PeftModel.from_pretrained(fresh, tmp_path / "adapter")
    prompt, mask = tiny_prompts(target.config.vocab_size, [19])
    settings = {"attention_mask": mask, "max_new_tokens": 21, "do_sample": False, "return_dict_in_generate": True}
    plain = target.generate(prompt, **settings)
    fresh.generation_config.gate = False  # it is kept, and a second call may begin with plain steps
    for assistant in (loaded, loaded.merge_and_unload()):
        out = target.generate(prompt, assistant_model=assistant, **settings)
        assert out.sequences.tolist() == plain.sequences.tolist()
        assert out.speculation.num_draft_tokens > 0
