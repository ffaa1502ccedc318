"""What `hf-longspec bench` compares: drafts by name, their settings and their names in the results."""

import pytest

from hf_longspec.cli import CommandError
from hf_longspec.cli.bench_methods import TRAINING_FREE, load_draft, load_drafts, points_of
from hf_longspec.testing import tiny_target


@pytest.fixture
def target():
    return tiny_target("llama")


def test_the_gate_is_off_where_there_is_one(target, monkeypatch):
    kind = TRAINING_FREE["ngram"]
    monkeypatch.setattr(kind, "settings", kind.settings | {"gate": True})
    assert load_draft("ngram", target).setting("gate") is False


def test_a_method_for_every_point_of_the_settings_that_a_draft_has(target):
    drafts = load_drafts(["specattn", "ngram"], target)
    axes = {"sparse_ratio": ["0.5", "1"], "ngram_candidates": ["2"]}
    methods = points_of(drafts, axes, target)
    assert [method.name for method in methods] == [
        "specattn, sparse_ratio=0.5, ngram_candidates=2",
        "specattn, sparse_ratio=1.0, ngram_candidates=2",
        "ngram, ngram_candidates=2",
    ]
    assert [method.how for method in methods] == [drafts["specattn"], drafts["specattn"], drafts["ngram"]]
    with pytest.raises(CommandError, match=r"--sweep: specattn, sparse_ratio=7\.0: .*sparse_ratio"):
        points_of(drafts, {"sparse_ratio": ["7"]}, target)


def test_folders_of_one_name_cannot_be_told_apart(tmp_path, target):
    folders = [tmp_path / part / "draft" for part in "ab"]
    for folder in folders:
        folder.mkdir(parents=True)
    with pytest.raises(CommandError, match="two are called 'draft'"):
        load_drafts([*map(str, folders), "ngram"], target)
