"""Everything that is refused: the message says what and what to do, the model stays as it was, nothing is emitted."""

import pytest
import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_longspec import PlainDraftModel, SpecAttnDraftModel
from tests.robustness.enumeration import build
from tests.robustness.test_faults import state_of
from tests.tiny_targets import tiny_prompts, tiny_target
from tests.user_objects import Recorder


def refused(model, draft, message, **options):
    """`generate` raises ValueError with `message` and leaves no trace; returns the message."""
    inputs = {"max_new_tokens": 6, "do_sample": False, "streamer": Recorder()} | options
    if "input_ids" not in inputs:
        inputs["input_ids"], inputs["attention_mask"] = tiny_prompts(128, (9,))
        inputs |= {name: value for name, value in options.items() if name == "attention_mask"}
    before = state_of(model), state_of(draft)
    with pytest.raises(ValueError, match=message) as caught:
        model.generate(**inputs, assistant_model=draft)
    assert (state_of(model), state_of(draft)) == before
    assert len(inputs["streamer"].puts) <= 1  # `generate` sends the prompt before it calls any decoding
    assert draft.last_speculation is None or draft.last_speculation.num_emitted_tokens == 0
    return str(caught.value)


@pytest.fixture
def llama(target):
    return target("llama")


class TestTargets:
    @pytest.mark.parametrize(
        ("name", "settings", "reason"),
        [
            ("minimax", {}, "do not call the functions of transformers that keep states in a cache"),
            ("qwen4_exp_text", {}, r"it has (indexed|qwen_sparse)_attention layers, whose choice of keys"),
            ("bloom", {}, "does not go through transformers' Att.*; it takes positions from the length of its cache"),
            ("gpt_neo", {}, "its config has window_size=16, and its layers may count a window by slots"),
            ("doge", {}, "its layers 0, 1, 2, 3 add values of their own to the scores"),
            (
                "gemma3_text",
                {"use_bidirectional_attention": True},
                "neither causal nor a sliding window.*attend to later tokens",
            ),
        ],
    )
    def test_architectures(self, name, settings, reason):
        model = build(name, **settings)
        message = refused(model, PlainDraftModel.from_target(model), reason)
        assert type(model).__name__ in message and "Call generate() without assistant_model" in message

    def test_a_model_that_never_calls_the_backend(self):
        """It would swallow the tree and return plausible logits."""
        model = OldModel(OldConfig.from_dict(tiny_target("llama").config.to_dict())).eval()
        draft = PlainDraftModel.from_target(model)
        refused(model, draft, "OldModel cannot.*never called the attention backe.*AttentionInterface")

    @pytest.mark.parametrize(
        ("name", "change", "reason"),
        [
            ("deepseek_v32", lambda model: model.set_attn_implementation("hf_longspec"), "'hf_longspec' does not take"),
            ("qwen3_next", lambda model: setattr(model, "_use_kernels", True), "use_kernels=True replaces"),
        ],
        ids=["attention", "kernels"],
    )
    def test_what_changes_after_a_call_is_noticed(self, name, change, reason):
        """Reasons are remembered, and looked for again if what they depend on is another one."""
        model = build(name)
        draft = PlainDraftModel.from_target(model)
        model.generate(tiny_prompts(128, (9,))[0], max_new_tokens=3, pad_token_id=0, assistant_model=draft)
        assert draft.last_speculation.reason is None
        change(model)
        draft.last_speculation = None
        refused(model, draft, reason)

    def test_prompt_learning_adapter(self):
        peft = pytest.importorskip("peft")
        bare = tiny_target("llama")
        draft = PlainDraftModel.from_target(bare)
        config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
        model = peft.get_peft_model(bare, config).eval()
        refused(model, draft, "a prompt-learning PEFT adapter is active.*merge or drop it")


class OldConfig(PreTrainedConfig):
    model_type = "old_remote_code"


class OldModel(PreTrainedModel, GenerationMixin):
    """A model file from before the attention interface: it takes any keyword and ignores it."""

    config_class = OldConfig
    all_tied_weights_keys = {}

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size)

    def get_input_embeddings(self):
        return self.embed

    def forward(self, input_ids=None, past_key_values=None, attention_mask=None, **kwargs):
        hidden = self.embed(input_ids)
        return CausalLMOutputWithPast(logits=self.head(hidden.cumsum(1)), past_key_values=past_key_values)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"position_ids": torch.tensor([list(range(5, 14))])}, r"position_ids of shape \(1, 9\)"),
        ({"num_assistant_tokens": 2}, "num_assistant_tokens=2 .*draft.generation_config"),
        ({"dola_layers": "high"}, "dola_layers='high' .*draft.generation_config"),
    ],
    ids=["positions", "a setting of drafts", "DoLa"],
)
def test_options(llama, options, message):
    refused(llama, PlainDraftModel.from_target(llama), message, **options)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([[1, 1, 1, 1, 1, 1, 1, 0, 0]], r"attention_mask ends with 0 in the rows \[0\].*padding_side='left'"),
        ([[0] + [1] * 6], r"attention_mask has shape \(1, 7\), and input_ids"),
        (torch.ones(1, 1, 9, 9).tolist(), "attention_mask"),
    ],
    ids=["right-padded", "too short", "for every layer"],
)
def test_masks(llama, mask, message):
    """Not of ones alone: transformers drops such a mask."""
    refused(llama, PlainDraftModel.from_target(llama), message, attention_mask=torch.tensor(mask))


@pytest.mark.parametrize(
    ("name", "changes", "field"),
    [
        ("llama", {"vocab_size": 100}, "vocab_size=100, and this target has vocab_size=128"),
        ("llama", {"hidden_size": 32, "head_dim": 16}, "hidden_size=32.*hidden_size=64"),
        ("qwen2", {}, "model_type=qwen2, and this target has model_type=llama"),
    ],
    ids=str,
)
def test_drafts_for_other_targets(llama, name, changes, field):
    """Before transformers, which would ask for the tokenizers where vocabularies differ."""
    draft = SpecAttnDraftModel.from_target(tiny_target(name, **changes))
    refused(llama, draft, f"made for a target with {field}.*make one with from_target\\(target\\)")
    if "vocab_size" in changes:  # also if the config is doctored
        draft.config.vocab_size = 128
        refused(llama, draft, f"made for a target with {field}")


def test_what_the_model_came_with_is_no_wish(plain_run):
    model = tiny_target("llama")
    model.generation_config.num_assistant_tokens = 7
    run = plain_run(model, (9,), max_new_tokens=4)
    assert run.again(run.draft("tree")).tolist() == run.sequences.tolist()


def test_beam_search_runs_without_the_draft(llama):
    """Transformers decides so; a change shall be noticed."""
    draft = PlainDraftModel.from_target(llama)
    input_ids, attention_mask = tiny_prompts(128, (9, 5))
    options = {"attention_mask": attention_mask, "num_beams": 3, "do_sample": False, "max_new_tokens": 6}
    out = llama.generate(input_ids, **options, assistant_model=draft)
    assert out.tolist() == llama.generate(input_ids, **options).tolist()
    assert draft.last_speculation is None
