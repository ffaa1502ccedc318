"""Settings of TokenSwift: defaults that fit the heads, what is refused, with the value, the rule and the remedy."""

import pytest
from transformers import AutoModel

from hf_longspec import TokenSwiftDraftModel
from hf_longspec.generation.target import TargetView
from hf_longspec.testing import tiny_prompts, tiny_target


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama")


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("self_draft", "hidden", "self_draft='hidden': expected one of verify_hidden, partial_kv"),
        ("partial_kv_policy", "sliding", "partial_kv_policy='sliding': expected one of dynamic, static, full"),
        ("partial_kv_recent", -1, "partial_kv_recent=-1: expected an integer of at least 0"),
        ("partial_kv_recent", 2.0, r"partial_kv_recent=2\.0: expected an integer"),
        ("partial_kv_budget", 72, r"partial_kv_budget=72.*at least 73, for 4 sinks, partial_kv_recent=64 and the 5"),
        ("partial_kv_budget", True, "partial_kv_budget=True: expected an integer"),
        ("tree_branching", 3, "tree_branching=3: expected a list of integers from 1 to 128"),
        ("tree_branching", [1, 0], r"tree_branching=\[1, 0\]: expected a list of integers from 1 to 128"),
        ("tree_branching", [1, 129], r"tree_branching=\[1, 129\]: expected a list of integers from 1 to 128"),
        ("tree_branching", [1, 2.5], r"tree_branching=\[1, 2\.5\]: expected a list of integers"),
        ("tree_branching", [1], r"has 1 entries, expected 2 to 4: one for.*num_heads=3 heads.*train more heads"),
        ("tree_branching", [1, 2, 2, 2, 2], "has 5 entries, expected 2 to 4"),
    ],
)
def test_refused_settings(target, setting, value, message):
    with pytest.raises(ValueError, match=message):
        TokenSwiftDraftModel.from_target(target, **{setting: value})


def test_settings_that_were_changed_later_are_refused_before_anything_runs(target):
    draft = TokenSwiftDraftModel.from_target(target)
    draft.generation_config.tree_branching = [1, 3, 3, 3, 3]
    input_ids, _ = tiny_prompts(128, [9])
    with pytest.raises(ValueError, match="has 5 entries, expected 2 to 4"):
        target.generate(input_ids, assistant_model=draft, max_new_tokens=4)


@pytest.mark.parametrize(
    ("num_heads", "settings", "branching", "nodes"),
    [
        (3, {}, [1, 3, 3, 3], 40),
        (3, {"self_draft": "partial_kv"}, [1, 3, 3, 3], 41),
        (1, {}, [1, 3], 4),
        (2, {"self_draft": "partial_kv"}, [1, 3, 3], 14),
        (5, {}, [1, 3, 3, 3], 40),
        (3, {"self_draft": "partial_kv", "tree_branching": [4]}, [4], 5),
        (3, {"tree_branching": [1, 2, 1]}, [1, 2, 1], 5),
    ],
)
def test_trees_and_their_nodes(target, num_heads, settings, branching, nodes):
    draft = TokenSwiftDraftModel.from_target(target, num_heads=num_heads, **settings)
    assert draft.setting("tree_branching") == branching
    assert draft.max_nodes(TargetView(target)) == nodes


def test_settings_are_saved_with_the_heads(target, tmp_path):
    draft = TokenSwiftDraftModel.from_target(target, num_heads=2, self_draft="partial_kv", tree_branching=[2, 1])
    draft.generation_config.partial_kv_recent = 9
    draft.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path)
    for name in TokenSwiftDraftModel.settings:
        assert loaded.setting(name) == draft.setting(name)
    assert TokenSwiftDraftModel.settings["tree_branching"] == [1, 3, 3, 3]
