"""Settings of all drafts: what is refused, with the value, the rule and the remedy; nodes of a tree; what is saved."""

import json

import pytest
import torch
from transformers import AutoModel, GenerationConfig

from hf_longspec import (
    Eagle3DraftModel,
    LongSpecDraftModel,
    NgramDraftModel,
    PlainDraftModel,
    QuestDraftModel,
    SpecAttnDraftModel,
    TokenRecyclingDraftModel,
    TokenSwiftDraftModel,
)
from hf_longspec.generation.cache import SpeculativeCache
from hf_longspec.generation.drafter import Binding
from hf_longspec.generation.target import TargetView
from hf_longspec.modeling import loading
from hf_longspec.testing import tiny_target

E, L, N = Eagle3DraftModel, LongSpecDraftModel, NgramDraftModel
Q, R, S, T = QuestDraftModel, TokenRecyclingDraftModel, SpecAttnDraftModel, TokenSwiftDraftModel


@pytest.fixture(scope="module")
def model():
    return tiny_target("llama")


REFUSED = [
    (E, "tree_widths", [3, 0], r"tree_widths=\[3, 0\]: expected a list of positive integers"),
    (E, "window", 0, "window=0: expected an integer of at least 1, 'trained' for the length that the draft was"),
    (E, "window", "all", "window='all': expected an integer of at least 1"),
    (E, "sinks", -1, "sinks=-1: expected an integer of at least 0"),
    (E, "rope_theta", 0, "rope_theta=0: expected None for the draft's own, or a number above 0"),
    (E, "target_layer_ids", [1, 2], r"target_layer_ids=\[1, 2\]: expected a list of 3 integers, as many as fc"),
    (E, "target_layer_ids", [1, 2, 3], "layer 3: LlamaForCausalLM has 2 layers. Pass indices from 0 to 2"),
    (E, "norm_output", "yes", "norm_output='yes': expected None, True or False"),
    (L, "tree_widths", [], r"tree_widths=\[\]: expected a list of positive integers"),
    (L, "tree_widths", 5, r"tree_widths=5: expected a list of positive integers"),
    (L, "tree_widths", [1] * 511, "tree_widths has 511 levels, and window=512 allows at most 510"),
    (L, "cross_attention_window", 0, "cross_attention_window=0: expected an integer of at least 1"),
    (L, "ngram_candidates", -1, "ngram_candidates=-1: expected an integer of at least 0"),
    (S, "ngram_num_tokens", 0, "ngram_num_tokens=0: expected an integer of at least 1"),
    (S, "ngram_source", "all", "ngram_source='all'"),
    (S, "selection", "pages", "selection='pages': expected one of two_rows, all_rows"),
    (S, "selection", "best", "selection='best': expected one of two_rows, all_rows"),
    (S, "score", "probabilities", "score='probabilities': expected one of logits, weights"),
    (S, "granularity", "head", "granularity='head': expected one of layer, kv_head"),
    (S, "acceptance", "typical", "acceptance='typical': expected one of rejection, coupled"),
    (S, "num_assistant_tokens", 0, "num_assistant_tokens=0: expected an integer of at least 1"),
    (S, "sparse_min_tokens", -1, "sparse_min_tokens=-1: expected an integer of at least 1"),
    (S, "sparse_ratio", 0.0, r"sparse_ratio=0\.0: expected a number in \(0, 1\]"),
    (S, "sparse_ratio", 7, r"sparse_ratio=7: expected a number in \(0, 1\]"),
    (S, "sparse_ration", 0.2, r"unknown settings \['sparse_ration'\].*sparse_ratio"),
    (Q, "num_assistant_tokens", 0, "num_assistant_tokens=0: expected an integer of at least 1"),
    (Q, "page_size", 0, "page_size=0: expected an integer of at least 1"),
    (Q, "num_dense_layers", -1, "num_dense_layers=-1: expected an integer of at least 0"),
    (Q, "sparse_min_tokens", True, "sparse_min_tokens=True: expected an integer of at least 1"),
    (Q, "sparse_ratio", "all", r"sparse_ratio='all': expected a number in \(0, 1\]"),
    (Q, "acceptance", "typical", "acceptance='typical': expected one of rejection, coupled"),
    (N, "num_assistant_tokens", 0, "num_assistant_tokens=0: expected an integer of at least 1"),
    (N, "ngram_candidates", 0, "ngram_candidates=0: expected an integer of at least 1"),
    (N, "ngram_size", 17, "ngram_size=17: expected an integer from 1 to 16"),
    (N, "ngram_source", "web", "ngram_source='web': expected one of both, pool, lookup"),
    (N, "ngram_preload", 1, "ngram_preload=1: expected True or False"),
    (T, "self_draft", "hidden", "self_draft='hidden': expected one of verify_hidden, partial_kv"),
    (T, "partial_kv_policy", "sliding", "partial_kv_policy='sliding': expected one of dynamic, static, full"),
    (T, "partial_kv_recent", -1, "partial_kv_recent=-1: expected an integer of at least 0"),
    (T, "partial_kv_budget", 72, r"partial_kv_budget=72.*at least 73, for 4 sinks, partial_kv_recent=64 and the 5"),
    (T, "tree_branching", 3, "tree_branching=3: expected a list of integers from 1 to 128"),
    (T, "tree_branching", [1, 0], r"tree_branching=\[1, 0\]: expected a list of integers from 1 to 128"),
    (T, "tree_branching", [1, 129], r"tree_branching=\[1, 129\]: expected a list of integers from 1 to 128"),
    (T, "tree_branching", [1, 2.5], r"tree_branching=\[1, 2\.5\]: expected a list of integers"),
    (T, "tree_branching", [1], r"has 1 entries, expected 2 to 4: one for.*num_heads=3 heads.*train more heads"),
    (T, "tree_branching", [1, 2, 2, 2, 2], "has 5 entries, expected 2 to 4"),
    (R, "num_nodes", 1, "num_nodes=1: expected an integer from 2 to 512"),
    (R, "max_depth", 0, "max_depth=0: expected an integer from 1 to 32"),
    (R, "num_candidates", 17, "num_candidates=17: expected an integer from 1 to 16"),
    (R, "num_nodes", 0, "num_nodes=0: expected an integer from 2 to 512"),
    (PlainDraftModel, "tree_widths", [[1]], "unknown settings"),
]


@pytest.mark.parametrize(("cls", "setting", "value", "message"), REFUSED)
def test_refused_settings(model, cls, setting, value, message):
    """When the draft is made, and, if the setting is changed later, before anything runs."""
    with pytest.raises(ValueError, match=message):
        cls.from_target(model, **{setting: value})
    draft = cls.from_target(model)
    setattr(draft.generation_config, setting, value)
    with pytest.raises(ValueError, match=message):
        model.generate(torch.tensor([[5, 6, 7]]), assistant_model=draft, max_new_tokens=4)
    assert draft.last_speculation is None


@pytest.mark.parametrize(
    ("cls", "facts", "message"),
    [
        (L, {"tree_widths": [2, 2, 2], "window": 4}, "tree_widths has 3 levels, and window=4 allows at most 2"),
        (L, {"kv_layer": 2}, "kv_layer=2: the target has layers 0 to 1"),
        (L, {"windows": 8}, "unknown settings"),
        (T, {"num_heads": 0}, "num_heads=0: expected at least 1"),
        (T, {"heads": 3}, r"unknown settings \['heads'\]"),
        (T, {"chained": False, "sequential": True}, r"chained=False, sequential=True: .*Leave out chained=False"),
    ],
)
def test_refused_facts_of_a_new_draft(model, cls, facts, message):
    with pytest.raises(ValueError, match=message):
        cls.from_target(model, **facts)


def test_latent_caches():
    """MLA has no heads of its own to select by or to cross-attend, and no pages of keys."""
    target = tiny_target("deepseek_v3")
    with pytest.raises(ValueError, match=r"kv_head.*MLA.*granularity='layer'"):
        S.from_target(target, granularity="kv_head")
    assert S.from_target(target).setting("granularity") == "layer"
    for cls in (L, Q):
        with pytest.raises(ValueError, match=r"MLA.*SpecAttnDraftModel"):
            cls.from_target(target)


@pytest.mark.parametrize(
    ("cls", "settings", "nodes"),
    [
        (L, {"tree_widths": [2, 2]}, 5),
        (L, {"tree_widths": [2], "ngram_candidates": 2}, 3 + 2 * 8),
        (S, {"num_assistant_tokens": 3}, 4),
        (S, {"num_assistant_tokens": 2, "ngram_candidates": 3, "ngram_num_tokens": 5}, 3 + 15),
        (S, {"num_assistant_tokens": 2, "selection": "window"}, 3),
        (N, {"num_assistant_tokens": 3, "ngram_candidates": 7}, 22),
        (Q, {"num_assistant_tokens": 6, "ngram_candidates": 2, "ngram_num_tokens": 5}, 7 + 10),
        (R, {"num_nodes": 9}, 9),
        (T, {}, 40),
        (T, {"self_draft": "partial_kv"}, 41),
        (T, {"num_heads": 1}, 4),
        (T, {"num_heads": 2, "self_draft": "partial_kv", "partial_kv_recent": 9}, 14),
        (T, {"num_heads": 5}, 40),
        (T, {"self_draft": "partial_kv", "tree_branching": [4]}, 5),
        (T, {"tree_branching": [1, 2, 1]}, 5),
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
    assert all(json.dumps(loaded.setting(n)) == json.dumps(v) for n, v in settings.items() if n in cls.settings)


def test_ngrams_are_off_by_default(model):
    binding = Binding(TargetView(model), SpeculativeCache(model.config, 1, 50), None, 50)
    for cls in (S, L):
        draft = cls.from_target(model)
        assert draft.settings["ngram_candidates"] == 0
        assert draft.num_tree_nodes(binding.target) == draft.max_nodes(binding.target)
        assert type(draft.drafter(binding)) is type(draft.make_drafter(binding))


@pytest.mark.parametrize(("value", "warnings"), [(None, 0), ([[1, 1]], 1)])
def test_a_removed_setting_of_a_saved_draft_is_ignored(model, tmp_path, monkeypatch, value, warnings):
    """Drafts that an earlier version saved hold `tree_choices`; one warning names it unless it was null."""
    said = []
    monkeypatch.setattr(loading.logger, "warning", lambda text, *values: said.append(text % values))
    S.from_target(model).save_pretrained(tmp_path)
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tree_choices": value}))
    draft = AutoModel.from_pretrained(tmp_path)
    ids = torch.tensor([[5, 6, 7]])
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, assistant_model=draft)
    assert len(said) == warnings and all(f"tree_choices={value!r}" in line for line in said)
    draft.save_pretrained(tmp_path)
    assert "tree_choices" not in json.loads(path.read_text())


def test_settings_that_are_not_given_are_the_defaults(model, tmp_path):
    """Without the file, with a file from before a setting existed, with another object, and with another draft."""
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
    path.unlink()
    default = S.settings["num_assistant_tokens"]
    assert S.from_pretrained(tmp_path).generation_config.num_assistant_tokens == default != 2
    assert S.from_target(model).generation_config.num_assistant_tokens == default
    first.generation_config = GenerationConfig()
    assert first.setting("selection") == "two_rows"
