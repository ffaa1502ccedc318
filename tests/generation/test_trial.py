"""The trial forward on two tokens finds windows, causality, positions, and the layers that call the backend."""

import pytest
import torch

from hf_longspec import PlainDraftModel
from hf_longspec.generation.special_cases import trial
from hf_longspec.generation.target import TargetView
from tests.robustness.enumeration import build
from tests.tiny_targets import TINY_TARGETS, WINDOW, tiny_prompts, tiny_target

pytestmark = pytest.mark.usefixtures("every_step_speculates")


def check_text(plain_run, model):
    """A branching draft leaves the text of stock `generate`."""
    run = plain_run(model, (23, 9, 40), max_new_tokens=12, eos_token_id=None, pad_token_id=0)
    draft = run.draft("tree")
    assert torch.equal(run.again(draft), run.sequences)
    assert draft.last_speculation.num_accepted_draft_tokens > 0


class TestWindows:
    def test_of_every_tiny_target(self, target):
        found = {name: TargetView(target(name)).windows for name in TINY_TARGETS}
        none = {name for name, windows in found.items() if set(windows) == {None}}
        assert none == set(TINY_TARGETS) - {"mistral", "gemma2", "gemma3", "gpt_oss", "cohere2"}
        assert found["mistral"] == (WINDOW,) * 2
        assert found["gemma2"] == found["gpt_oss"] == found["cohere2"] == (WINDOW, None)
        assert found["gemma3"] == (WINDOW, None, WINDOW)

    @pytest.mark.parametrize(
        ("name", "settings", "windows"),
        [
            (
                "qwen2_moe",
                {"use_sliding_window": True, "layer_types": ["sliding_attention", *["full_attention"] * 3]},
                (WINDOW, None, None, None),
            ),
            ("phimoe", {}, (WINDOW,) * 4),
        ],
    )
    def test_that_only_the_mask_contains(self, plain_run, name, settings, windows):
        model = build(name, sliding_window=WINDOW, **settings)
        assert TargetView(model).windows == windows
        check_text(plain_run, model)

    def test_left_over_in_the_config(self, plain_run):
        """transformers' cache applies it and the model does not: the text without a cache is another one."""
        model = tiny_target("llama", sliding_window=WINDOW)
        view = TargetView(model)
        assert view.windows == (None,) * 2 and not view.sliding_layers
        assert view.why_not() == view.why_not(WINDOW) == []  # no text is known yet; no cache forgets anything
        (reason,) = view.why_not(WINDOW + 1)
        assert f"sliding_window={WINDOW}, which its attention does not apply" in reason
        draft = PlainDraftModel.from_target(model)
        with pytest.raises(ValueError, match=r"set config\.sliding_window to None"):
            model.generate(tiny_prompts(128, (9,))[0], max_length=WINDOW + 1, assistant_model=draft)
        for remedy in (None, 52):  # the config is compared, so the remedy helps: a text has up to 40 and 12 tokens
            model.config.sliding_window = remedy
            check_text(plain_run, model)


def test_positions_that_nothing_depends_on(plain_run):
    check_text(plain_run, tiny_target("smollm3", no_rope_layers=[0, 0]))


class TestTheTrial:
    def test_it_runs_once_per_model(self, monkeypatch):
        calls, run = [], trial._run
        monkeypatch.setattr(trial, "_run", lambda *args, **kwargs: calls.append(args) or run(*args, **kwargs))
        model = tiny_target("llama")
        for _ in range(2):
            assert TargetView(model).why_not() == []
        assert len(calls) == 3
        assert TargetView(tiny_target("llama")).why_not() == [] and len(calls) == 6

    def test_a_failure_is_tried_again(self):
        model = build("xmod", default_language=None)
        assert "set_default_language" in TargetView(model).why_not()[0]
        model.set_default_language("en_XX")
        assert TargetView(model).why_not() == []

    def test_it_leaves_the_model_as_it_was(self):
        model = tiny_target("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
        before = {name: tensor.clone() for name, tensor in model.named_buffers()}
        implementation, attributes = model.config._attn_implementation, set(vars(model))
        TargetView(model).why_not()
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.named_buffers())
        assert model.config._attn_implementation == implementation and set(vars(model)) == attributes
