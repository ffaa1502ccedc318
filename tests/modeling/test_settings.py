"""Settings of all drafts: what is refused, with the value, the rule and the remedy; nodes of a tree; what is saved."""

import json

import pytest
import torch
from transformers import AutoModel, GenerationConfig

from hf_longspec import (
    AssistantDraftModel,
    Eagle3DraftModel,
    LongSpecDraftModel,
    NgramDraftModel,
    SpecAttnDraftModel,
    TokenSwiftDraftModel,
)
from hf_longspec.generation.target import TargetView
from hf_longspec.modeling.register_draft import DRAFTS
from hf_longspec.modeling.settings import COMMON, NGRAMS
from tests.tiny_targets import made_for, tiny_target

A, E, L, N = AssistantDraftModel, Eagle3DraftModel, LongSpecDraftModel, NgramDraftModel
S, T = SpecAttnDraftModel, TokenSwiftDraftModel


@pytest.fixture(scope="module")
def model():
    return tiny_target("llama")


# Values next to the bounds of a setting, by its kind.
LISTS = [[], [3, 0], [2, 2.5], [True], 5, "4"], [[1], (2, 3)]


def values_of(setting):
    """Values that are refused, and values that are not."""
    refused, allowed = {
        None: ([True, "none of them"], [*setting.choices]),
        bool: (["auto", 1, 0], [True, False]),
        int: ([setting.least - 1, True, 2.5, "four"], [setting.least, *setting.choices]),
        float: ([setting.above, -1.0, True, "all", float("nan")], [setting.above + 1e-3, *setting.choices]),
        list: LISTS,
    }[setting.kind]
    if setting.most is not None:
        refused, allowed = [*refused, setting.most + 1], [*allowed, setting.most]
    return ([*refused, None], allowed) if setting.default is not None else (refused, [*allowed, None])


CASES = [
    (draft.model, name)
    for draft in DRAFTS.values()
    for name, setting in draft.model.declared.items()
    # those of all drafts, of one of them; a setting that declares nothing is the draft's to check
    if (name not in COMMON | NGRAMS or draft.model is T) and (setting.kind or setting.choices)
]


@pytest.mark.parametrize(("cls", "name"), CASES, ids=str)
def test_ranges(model, cls, name):
    """When the draft is made, and, if the setting is changed later, before anything runs."""
    draft, (refused, allowed) = made_for(cls, model), values_of(cls.declared[name])
    for value in refused:
        if value is not None:  # which stands for the default
            with pytest.raises(ValueError, match=rf"(^|\W){name}=.*expected .*"):
                made_for(cls, model, **{name: value})
            setattr(draft.generation_config, name, value)
            with pytest.raises(ValueError, match=rf"(^|\W){name}=.*expected .*"):
                model.generate(torch.tensor([[5, 6, 7]]), assistant_model=draft, max_new_tokens=4)
            assert draft.last_speculation is None
    assert not any(map(cls.declared[name].allows, refused)) and all(map(cls.declared[name].allows, allowed))


def test_a_default_alone_is_a_setting_that_takes_anything():
    """As drafts of other packages declare theirs; a subclass with another default keeps the range."""

    class Fast(SpecAttnDraftModel):
        settings = {"num_assistant_tokens": 9, "mood": "calm"}

    assert Fast.settings == S.settings | {"num_assistant_tokens": 9, "mood": "calm"}
    assert Fast.declared["mood"].allows(object()) and not Fast.declared["num_assistant_tokens"].allows(0)


@pytest.mark.parametrize(
    ("cls", "facts", "message"),
    [
        (L, {"tree_widths": [2, 2, 2], "window": 4}, r"tree_widths has 3 levels, .*window=4"),
        (L, {"kv_layer": 2}, "kv_layer=2: the target has layers 0 to 1"),
        (L, {"windows": 8}, "unknown settings"),
        (T, {"chained": False, "sequential": True}, "chained=False with sequential=True"),
        (T, {"tree_branching": [1, 129]}, "tree_branching=.* at most 128 children"),
        (T, {"tree_branching": [1]}, "has 1 entries, expected 2 to 4"),
        (T, {"partial_kv_budget": 72}, "partial_kv_budget=72: expected an integer of at least 73"),
        (E, {"target_layer_ids": [0, 1, "2"]}, "target_layer_ids=.*expected a list of 3 integers"),
    ],
)
def test_refused_facts_of_a_new_draft(model, cls, facts, message):
    with pytest.raises(ValueError, match=message):
        cls.from_target(model, **facts)


def test_one_latent_for_all_heads_is_not_selected_per_head():
    with pytest.raises(ValueError, match=r"granularity='kv_head': .*MLA"):
        S.from_target(tiny_target("deepseek_v3"), granularity="kv_head")


@pytest.mark.parametrize(
    ("cls", "settings", "nodes"),
    [
        (E, {"tree_widths": [2, 2], "window": None}, 5),  # `None` does not become the default again
        (L, {"tree_widths": [2], "ngram_candidates": 2}, 3 + 2 * 8),
        (S, {"num_assistant_tokens": 2, "ngram_candidates": 3, "ngram_num_tokens": 5}, 3 + 15),
        (N, {"num_assistant_tokens": 3, "ngram_candidates": 7}, 22),
        (T, {"num_heads": 1}, 4),
        (T, {"self_draft": "partial_kv", "tree_branching": [4]}, 5),
    ],
    ids=str,
)
def test_the_largest_tree_fits_and_settings_are_saved(model, cls, settings, nodes, tmp_path):
    draft = cls.from_target(model, **settings)
    assert draft.num_tree_nodes(TargetView(model)) == nodes
    draft.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path)
    assert loaded.num_tree_nodes(TargetView(model)) == nodes
    for name in cls.settings:
        assert json.dumps(loaded.setting(name)) == json.dumps(draft.setting(name))  # tuples become lists
    assert all(getattr(loaded.generation_config, n) == v for n, v in settings.items() if n in cls.settings)


def test_drawn_tokens_are_refused_beside_ngrams_and_in_a_tree(model):
    """When sampling, before anything runs; greedily, they are not drawn."""
    small = tiny_target("llama", 5, num_hidden_layers=1)
    inputs = {"inputs": torch.tensor([[5, 6, 7]]), "max_new_tokens": 3}
    for draft, setting in (
        (S.from_target(model, ngram_candidates=2), "ngram_candidates=2"),
        (A.from_model(small, model, acceptance="rejection", tree_widths=[2, 2]), r"tree_widths=\[2, 2\]"),
    ):
        with pytest.raises(ValueError, match=f"acceptance='rejection' with {setting}"):
            model.generate(**inputs, assistant_model=draft, do_sample=True)
        assert draft.last_speculation is None
        model.generate(**inputs, assistant_model=draft, do_sample=False)


def test_default_widths_follow_the_device(model, tmp_path):
    """A chain on a CPU, 16 nodes elsewhere; values of the user and of a saved draft stay."""
    draft, other = L.from_target(model), L.from_target(model, tree_widths=[4, 4, 4, 3])
    assert draft.setting("tree_widths") == [1, 1, 1, 1] and draft.num_tree_nodes(TargetView(model)) == 5
    for one, name in ((draft, "new"), (other, "set")):
        one.save_pretrained(tmp_path / name)
        loaded = AutoModel.from_pretrained(tmp_path / name)
        assert loaded.generation_config.tree_widths == one.generation_config.tree_widths
    assert other.setting("tree_widths") == draft.to("meta").setting("tree_widths") == [4, 4, 4, 3]


def test_settings_that_are_not_given_are_the_defaults(model, tmp_path):
    """With a file from before a setting existed, and with another object."""
    first = S.from_target(model, num_assistant_tokens=2)
    first.save_pretrained(tmp_path)
    path = tmp_path / "generation_config.json"
    saved = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in saved.items() if not name.startswith("ngram")}))
    loaded = S.from_pretrained(tmp_path)
    loaded.generation_config.update(ngram_candidates=2)  # skips attributes that a GenerationConfig does not have
    assert (loaded.setting("ngram_candidates"), loaded.setting("num_assistant_tokens")) == (2, 2)
    path.write_text(json.dumps(saved | {"tree_height": 3}))
    with pytest.raises(ValueError, match=r"unknown settings \['tree_height'\]; SpecAttnDraftModel has"):
        model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2, assistant_model=AutoModel.from_pretrained(tmp_path))
    first.generation_config = GenerationConfig()
    assert (first.setting("selection"), first.setting("score")) == ("two_rows", "logits")  # as in the paper
