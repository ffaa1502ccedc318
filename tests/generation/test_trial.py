"""The trial forward on two tokens finds windows, causality, positions, and the layers that call the backend."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hf_longspec import PlainDraftModel, SpecAttnDraftModel
from hf_longspec.generation import traits
from hf_longspec.generation.target import TargetView
from hf_longspec.modeling.plain.modeling_plain import PlainConfig
from tests.generation.tiny_models import SIZES, peaked, vision_language_model
from tests.tiny_targets import TINY_TARGETS, WINDOW, RandomTreeDraftModel, tiny_prompts, tiny_target

pytestmark = pytest.mark.usefixtures("every_step_speculates")

DECODERS = {
    "d_model": 64,
    "decoder_layers": 2,
    "encoder_layers": 2,
    "num_hidden_layers": 2,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_ffn_dim": 96,
    "encoder_ffn_dim": 96,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
SHARED = {"shared_expert_intermediate_size": 48}
IN_THE_MASK_ALONE = {
    "qwen2_moe": {"use_sliding_window": True, "max_window_layers": 1, **EXPERTS, **SHARED},
    "phimoe": EXPERTS,
}


def build(name, **settings):
    config = AutoConfig.for_model(name, **(SIZES | settings))
    return peaked(lambda: AutoModelForCausalLM.from_config(config))


def check_text(model, lengths=(23, 9, 40)):
    """A branching draft leaves the text of stock `generate`."""
    input_ids, mask = tiny_prompts(128, lengths)
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    options["pad_token_id"] = 0
    plain = model.generate(input_ids, **options)
    config = PlainDraftModel.from_target(model).config
    draft = RandomTreeDraftModel(PlainConfig(**config.to_dict()), hints=plain[:, max(lengths) :].tolist())
    assert torch.equal(model.generate(input_ids, **options, assistant_model=draft), plain)
    assert draft.last_speculation.num_accepted_draft_tokens > 0
    return plain


class TestWindows:
    def test_of_every_tiny_target(self, target):
        found = {name: TargetView(target(name)).windows for name in TINY_TARGETS}
        none = {name for name, windows in found.items() if set(windows) == {None}}
        assert none == set(TINY_TARGETS) - {"mistral", "gemma2", "gemma3", "gpt_oss", "cohere2"}
        assert found["mistral"] == (WINDOW,) * 2
        assert found["gemma2"] == found["gpt_oss"] == found["cohere2"] == (WINDOW, None)
        assert found["gemma3"] == (WINDOW, None, WINDOW)

    @pytest.mark.parametrize(("name", "windows"), [("qwen2_moe", (16, None, None)), ("phimoe", (16, 16, 16))])
    def test_that_only_the_mask_contains(self, name, windows):
        model = build(name, sliding_window=16, **IN_THE_MASK_ALONE[name])
        assert TargetView(model).windows == windows
        check_text(model)

    def test_that_only_the_mask_contains_in_sparse_steps(self):
        """SpecAttn reads these layers densely and with their window."""
        model = build("phimoe", sliding_window=16, **EXPERTS)
        input_ids, mask = tiny_prompts(128, (40, 23))
        options = {"attention_mask": mask, "max_new_tokens": 11, "do_sample": False, "eos_token_id": None}
        draft = SpecAttnDraftModel.from_target(model)
        drafted = model.generate(input_ids, **options, pad_token_id=0, assistant_model=draft)
        assert torch.equal(drafted, model.generate(input_ids, **options, pad_token_id=0))
        # all layers are dense, so that the draft is the target itself
        assert draft.last_speculation.num_accepted_draft_tokens == draft.last_speculation.num_draft_tokens > 0

    @pytest.mark.parametrize("length", [1, 5000])
    def test_of_one_token_and_longer_than_the_longest_text(self, length):
        assert TargetView(tiny_target("mistral", sliding_window=length)).windows == (length,) * 2

    def test_left_over_in_the_config(self):
        """transformers' cache applies it and the model does not: the text without a cache is another one."""
        model = tiny_target("llama", sliding_window=WINDOW)
        view = TargetView(model)
        assert view.windows == (None,) * 2 and not view.sliding_layers
        assert view.why_not() == []  # no text is known yet
        (reason,) = view.why_not(WINDOW + 1)
        assert f"sliding_window={WINDOW}, which its attention does not apply" in reason
        draft = PlainDraftModel.from_target(model)
        with pytest.raises(
            ValueError, match=r"set config\.sliding_window to None or to the length of the longest text"
        ):
            model.generate(tiny_prompts(128, (9,))[0], max_length=WINDOW + 1, assistant_model=draft)
        model.config.sliding_window = None
        assert TargetView(model).why_not(WINDOW + 1) == []  # the config is compared, so the remedy helps
        check_text(model)

    def test_left_over_and_longer_than_the_text(self):
        """No cache forgets anything then."""
        model = tiny_target("llama", sliding_window=52)
        assert len(TargetView(model).why_not(53)) == 1
        assert TargetView(model).why_not(52) == []
        check_text(model)  # 40 and 12 tokens


class TestPositions:
    @pytest.mark.parametrize("name", ["bart", "bigbird_pegasus"])
    def test_counted_by_the_cache(self, name):
        model = build(name, **DECODERS)
        reasons = TargetView(model).why_not()
        assert reasons[-1].startswith("it takes positions from the length of its cache")
        assert len(reasons) == 1 or name == "bigbird_pegasus"  # whose attention is marked as not causal as well

    @pytest.mark.parametrize(
        ("name", "settings"),
        [
            ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
            ("gpt_neox", {}),
            ("smollm3", {"no_rope_layers": [0, 0, 0]}),  # nothing depends on position_ids, and nothing has to
            # its positions begin after its padding index, but `generate` hands it positions from 0
            ("roberta", {"is_decoder": True, "num_key_value_heads": 4}),
        ],
    )
    def test_of_other_kinds(self, name, settings):
        check_text(build(name, **settings))


class TestCausality:
    def test_attention_in_both_directions(self):
        model = tiny_target("gemma3", use_bidirectional_attention=True)
        reasons = TargetView(model).why_not()
        assert any("0, 1, 2 attend to later tokens" in reason for reason in reasons)
        assert any("have a mask that is neither causal nor a sliding window" in reason for reason in reasons)
        draft = PlainDraftModel.from_target(model)
        with pytest.raises(ValueError, match=r"its layers 0, 1, 2 attend to later tokens.*Call generate\(\) without"):
            model.generate(tiny_prompts(128, (9,))[0], max_new_tokens=3, assistant_model=draft)

    def test_an_encoder(self):
        assert TargetView(build("bert", num_key_value_heads=4)).why_not() == [
            "its layers 0, 1, 2 attend to later tokens"
        ]

    def test_a_mask_that_depends_on_the_values(self):
        reasons = TargetView(build("doge")).why_not()
        assert reasons == ["its layers 0, 1, 2 add values of their own to the scores"]


class TestCaches:
    def test_more_layers_than_the_config_declares(self):
        model = build("whisper", **DECODERS | {"encoder_layers": 1, "num_hidden_layers": 1}, num_mel_bins=8)
        (reason, *_) = TargetView(model).why_not()
        assert reason.startswith("its layers 1 cache keys, but config.num_hidden_layers is 1")

    def test_inputs_that_are_missing(self):
        (reason,) = TargetView(vision_language_model("idefics")).why_not()
        assert reason.startswith("a forward of two tokens failed under its attention: ValueError: Exactly 1 of pixel")


class TestTheTrial:
    def test_it_runs_once_per_model(self, monkeypatch):
        calls, run = [], traits._run
        monkeypatch.setattr(traits, "_run", lambda *args, **kwargs: calls.append(args) or run(*args, **kwargs))
        model = tiny_target("llama")
        for _ in range(2):
            assert TargetView(model).why_not() == []
        assert len(calls) == 3
        assert TargetView(tiny_target("llama")).why_not() == [] and len(calls) == 6

    def test_a_failure_is_tried_again(self):
        model = build("xmod", num_key_value_heads=4, is_decoder=True, languages=["en_XX"])
        assert "set_default_language" in TargetView(model).why_not()[0]
        model.set_default_language("en_XX")
        assert TargetView(model).why_not() == []

    def test_a_compiled_forward_is_not_compiled_for_it(self):
        def fail(graph, inputs):
            raise AssertionError("a graph was compiled")

        model = tiny_target("llama")
        model.forward = torch.compile(model.forward, backend=fail, fullgraph=True)
        assert TargetView(model).why_not() == []

    def test_it_leaves_the_model_as_it_was(self):
        model = tiny_target("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
        before = {name: tensor.clone() for name, tensor in model.named_buffers()}
        implementation, attributes = model.config._attn_implementation, set(vars(model))
        TargetView(model).why_not()
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.named_buffers())
        assert model.config._attn_implementation == implementation and set(vars(model)) == attributes

    def test_the_claimed_prefix_needs_no_memory(self):
        cache = traits.DummyCache(2, 1 << 40)
        keys, _ = cache.update(torch.ones(1, 2, 2, 8), torch.ones(1, 2, 2, 8), 1)
        assert keys.shape == (1, 2, (1 << 40) + 2, 8) and keys.untyped_storage().nbytes() == 128
        assert cache.updated == {1} and cache.get_seq_length() == 1 << 40

    def test_models_without_a_longest_text(self):
        model = tiny_target("mistral")
        del model.config.max_position_embeddings
        assert TargetView(model).windows == (WINDOW,) * 2
