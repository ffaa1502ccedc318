"""The setting `tree_choices`: refusals, size of the largest tree, saving and loading."""

import pytest
import torch

from hf_longspec import LongSpecDraftModel, NgramDraftModel, PlainDraftModel, SpecAttnDraftModel, TokenSwiftDraftModel
from hf_longspec.generation.target import TargetView
from hf_longspec.testing import tiny_target


@pytest.fixture(scope="module")
def model():
    return tiny_target("llama")


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (
            LongSpecDraftModel,
            {"tree_choices": 3},
            r"tree_choices=3: expected None, or a list of at most 3 other values of",
        ),
        (LongSpecDraftModel, {"tree_choices": [[1], [2], [3], [4]]}, "expected None, or a list of at most 3"),
        (
            LongSpecDraftModel,
            {"tree_choices": [[2, 0]]},
            r"tree_choices: tree_widths=\[2, 0\]: expected a list of posit",
        ),
        (
            LongSpecDraftModel,
            {"tree_choices": [3]},
            "tree_choices: tree_widths=3: expected a list of positive integers",
        ),
        (
            LongSpecDraftModel,
            {"tree_choices": [[1] * 511]},
            "tree_widths has 511 levels, and window=512 allows at most",
        ),
        (
            SpecAttnDraftModel,
            {"tree_choices": [0]},
            "tree_choices: num_assistant_tokens=0: expected an integer of at l",
        ),
        (SpecAttnDraftModel, {"tree_choices": [[2]]}, r"num_assistant_tokens=\[2\]: expected an integer of at least 1"),
        (
            NgramDraftModel,
            {"tree_choices": [4]},
            r"tree_choices has 4: expected pairs of num_assistant_tokens and ngram",
        ),
        (NgramDraftModel, {"tree_choices": [[4, 0]]}, "ngram_candidates=0: expected an integer of at least 1"),
        (TokenSwiftDraftModel, {"tree_choices": [[1, -1]]}, r"tree_choices: tree_branching=\[1, -1\]: expected a list"),
        (TokenSwiftDraftModel, {"tree_choices": [[1] * 9]}, r"tree_choices: tree_branching=\[1, 1, .*has 9 entries"),
    ],
)
def test_invalid_trees_are_refused(model, kind, settings, message):
    with pytest.raises(ValueError, match=message):
        kind.from_target(model, **settings)
    draft = kind.from_target(model)
    draft.generation_config.update(**settings)
    with pytest.raises(ValueError, match=message):
        model.generate(torch.tensor([[1, 2, 3]]), assistant_model=draft, max_new_tokens=4)


@pytest.mark.parametrize(
    ("kind", "settings", "nodes"),
    [
        (LongSpecDraftModel, {"tree_widths": [2, 2], "tree_choices": [[1], [5, 1]]}, 7),
        (LongSpecDraftModel, {"tree_widths": [9], "tree_choices": [[1], (1, 1)]}, 10),
        (SpecAttnDraftModel, {"num_assistant_tokens": 3, "tree_choices": [5, 3, 5]}, 6),
        (NgramDraftModel, {"tree_choices": [[3, 7], [1, 1]]}, 22),
        (TokenSwiftDraftModel, {"tree_branching": [1, 2, 1], "tree_choices": [[1, 3]]}, 5),
        (LongSpecDraftModel, {"tree_widths": [2], "tree_choices": [[3]], "ngram_candidates": 2}, 4 + 2 * 8),
    ],
)
def test_the_largest_tree_fits_and_the_setting_is_saved(model, kind, settings, nodes, tmp_path):
    draft = kind.from_target(model, **settings)
    assert draft.num_tree_nodes(TargetView(model)) == nodes
    draft.save_pretrained(tmp_path)
    again = kind.from_pretrained(tmp_path)
    assert [list(tree) if isinstance(tree, tuple) else tree for tree in settings["tree_choices"]] == [
        *again.setting("tree_choices")
    ]
    assert again.num_tree_nodes(TargetView(model)) == nodes


def test_a_draft_without_a_tree_has_no_choices(model):
    assert "tree_choices" not in PlainDraftModel.settings
    with pytest.raises(ValueError, match="unknown settings"):
        PlainDraftModel.from_target(model, tree_choices=[[1]])
