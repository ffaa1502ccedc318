"""The way into the loop: one patch that can be put on twice and taken off, and the ways without it."""

import copy
import json

import pytest
import torch
from transformers import GenerationMixin

from hf_longspec import SpecAttnDraftModel
from hf_longspec.generation import route
from tests.robustness.drafts import make_draft
from tests.tiny_targets import tiny_prompts, tiny_target
from tests.watching import after, before


@pytest.fixture(autouse=True)
def installed():
    """Every test starts and ends with the patch in place."""
    assert hasattr(GenerationMixin._assisted_decoding, route._STOCK)
    yield
    route.install()


def test_importing_installs_it_once_and_uninstalling_restores_the_very_function():
    stock = route._stock("_assisted_decoding")
    assert stock.__module__ == "transformers.generation.utils" and stock.__qualname__.endswith("_assisted_decoding")
    for _ in range(3):
        route.install()
        assert route._stock("_assisted_decoding") is stock
    # one layer, not four
    assert not hasattr(stock, route._STOCK)
    assert getattr(GenerationMixin._assisted_decoding, route._STOCK) is stock
    for _ in range(2):
        route.uninstall()
        assert GenerationMixin._assisted_decoding is stock
        assert not any(hasattr(getattr(owner, name), route._STOCK) for name, owner in route._OWNERS.items())


def test_several_samples_of_each_prompt():
    """They are the rows of a batch that repeats the prompts. Other assistants are refused as by transformers."""
    model = tiny_target("llama")
    draft = SpecAttnDraftModel.from_target(model, acceptance="coupled", sparse_min_tokens=4)
    input_ids, mask = tiny_prompts(128, (9, 5))
    options = {"do_sample": True, "max_new_tokens": 12, "pad_token_id": 0}
    texts = []
    for repeats in (1, 3):
        rows = [part.repeat_interleave(repeats, 0) for part in (input_ids, mask)]
        options |= {"attention_mask": rows[1], "num_return_sequences": 3 // repeats}
        torch.manual_seed(3)
        texts.append(model.generate(rows[0], assistant_model=draft, **options))
    assert texts[0].shape[0] == 6 and torch.equal(*texts)
    assert len({tuple(row) for row in texts[0].tolist()}) == 6
    with pytest.raises(ValueError, match="num_return_sequences has to be 1"):
        model.generate(input_ids, assistant_model=tiny_target("llama"), do_sample=True, num_return_sequences=3)


def test_other_assistants_take_the_stock_function_and_drafts_do_not(plain_run, monkeypatch):
    """A spy takes the place of the stock function, and the patch is put over it anew."""
    run, calls = plain_run("llama", (21,), max_new_tokens=8), []
    assistant, draft = tiny_target("llama", seed=1), run.draft("specattn")
    monkeypatch.setattr(GenerationMixin, "_assisted_decoding", route._stock("_assisted_decoding"))
    note = lambda *_, assistant_model=None, **__: calls.append(assistant_model)  # noqa: E731
    before(monkeypatch, GenerationMixin, "_assisted_decoding", note)
    route.install()
    for options in ({"assistant_model": assistant}, {"prompt_lookup_num_tokens": 3}, {"assistant_model": draft}):
        assert run.model.generate(**run.inputs, **options).tolist() == run.sequences.tolist()
    assert calls == [assistant, None] and draft.last_speculation.num_forwards > 0


def test_custom_generate_without_the_patch(plain_run):
    """The documented way for people who forbid patching."""
    run = plain_run("gpt_oss", (33, 3, 13), max_new_tokens=8, repetition_penalty=1.2)
    draft = run.draft("specattn")
    route.uninstall()
    out = run.model.generate(**run.inputs, custom_generate=draft.custom_generate, return_dict_in_generate=True)
    assert out.sequences.tolist() == run.sequences.tolist()
    assert out.speculation is draft.last_speculation and out.speculation.num_forwards > 0


def test_without_the_route_a_draft_is_refused(plain_run):
    """Transformers' own assisted decoding would take it for a small language model."""
    run = plain_run("llama", (21,), max_new_tokens=6)
    draft = run.draft("tree")
    route.uninstall()
    with pytest.raises(ValueError, match=r"is not installed\. Call hf_longspec\.generation"):
        run.again(draft)
    with pytest.raises(ValueError, match="is not installed"):
        draft.generate(input_ids=torch.tensor([[5, 6, 7]]))
    assert draft.last_speculation is None
    other = tiny_target("llama")  # made without the route
    route.install()
    for model in (run.model, other):
        assert model.generate(**run.inputs, assistant_model=draft).tolist() == run.sequences.tolist()
        assert draft.last_speculation.num_forwards > 0


class TestNames:
    """`assistant_model="org/draft"`: a saved draft by its folder or id, loaded once for each target."""

    @pytest.fixture
    def run(self, plain_run):
        return plain_run(tiny_target("llama"), (21, 8), max_new_tokens=6)

    @pytest.mark.parametrize("kind", ["specattn", "longspec"])
    def test_the_draft_is_loaded_once(self, run, kind, tmp_path, monkeypatch):
        draft = make_draft(kind, run.model)
        draft.save_pretrained(tmp_path / "saved")
        loaded = []
        after(monkeypatch, type(draft), "from_pretrained", lambda made, *_, **__: loaded.append(made))
        for name in (str(tmp_path / "saved"), tmp_path / "saved"):
            out = run.again(name, return_dict_in_generate=True)
            assert torch.equal(out.sequences, run.sequences) and out.speculation is loaded[0].last_speculation
        other = tiny_target("llama")
        assert torch.equal(other.generate(**run.inputs, assistant_model=name), run.sequences)
        assert len(loaded) == 2 and type(loaded[0]) is type(draft)

    def test_what_is_no_draft_is_refused(self, run, tmp_path):
        run.model.save_pretrained(tmp_path / "model")
        before = copy.deepcopy(run.model.generation_config.to_dict()), sorted(vars(run.model))
        for name, error, message in (
            (str(tmp_path / "model"), ValueError, "model'? has model_type='llama'.*AssistantDraftModel"),
            (tmp_path / "missing", OSError, r"missing'? cannot be loaded \("),
            (SpecAttnDraftModel, ValueError, r"is the class SpecAttnDraftModel"),
            (type(run.model), ValueError, "is the class LlamaForCausalLM"),
        ):
            with pytest.raises(error, match=message):
                run.again(name)
        tiny_draft = SpecAttnDraftModel.from_target(tiny_target("llama", vocab_size=100))
        tiny_draft.save_pretrained(tmp_path / "other")
        for _ in range(2):
            with pytest.raises(ValueError, match="made for a target with vocab_size=100"):
                run.again(str(tmp_path / "other"))
        assert (run.model.generation_config.to_dict(), sorted(vars(run.model))) == before

    @pytest.mark.parametrize("kind", ["specattn", "unknown_kind"])
    def test_the_code_of_a_repository_is_not_run(self, run, kind, tmp_path):
        SpecAttnDraftModel.from_target(run.model).save_pretrained(tmp_path)
        (tmp_path / "code.py").write_text("raise SystemExit('the code was run')")
        config = json.loads((tmp_path / "config.json").read_text())
        config |= {"model_type": kind, "auto_map": {"AutoConfig": "code.Config", "AutoModel": "code.Model"}}
        (tmp_path / "config.json").write_text(json.dumps(config))
        if kind == "specattn":  # a class of this package
            assert torch.equal(run.again(str(tmp_path)), run.sequences)
        else:
            with pytest.raises(ValueError, match="model_type='unknown_kind'"):
                run.again(str(tmp_path))
