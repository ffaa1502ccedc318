"""Sweeps, and ways to choose tokens."""

import pytest

from hf_longspec.bench.calls import Decoding
from hf_longspec.bench.matrix import draft_points, grid, read_value, split_axes, written
from hf_longspec.cli import CommandError
from hf_longspec.cli.options import parse_sweeps

SPECATTN = {"sparse_ratio": 0.07, "num_assistant_tokens": 4, "selection": "two_rows", "ngram_preload": True}
LONGSPEC = {"tree_widths": [4, 4, 4, 3]}


def test_a_draft_takes_the_keys_that_it_has():
    axes = parse_sweeps(["sparse_ratio=0.03,0.07", "tree_widths=1+1,4+4+2"])
    assert [written(point) for point in draft_points(axes, LONGSPEC)] == ["tree_widths=1+1", "tree_widths=4+4+2"]
    assert draft_points(axes, {}) == [()] == grid({})


def test_axes_are_sorted_by_what_they_change():
    axes = parse_sweeps(["temperature=0,1", "penalty=1.2", "window=64,128", "context=1k", "sparse_ratio=0.1"])
    decoding, drafts, contexts = split_axes(axes, {"specattn": SPECATTN})
    assert decoding == {"temperature": [0.0, 1.0], "penalty": [1.2], "window": [64, 128]}
    assert (drafts, contexts) == ({"sparse_ratio": ["0.1"]}, ["1k"])


def test_unknown_keys_are_refused_with_those_that_exist():
    with pytest.raises(ValueError, match=r"--sweep sparse_rate: .*\(a has selection; b has"):
        split_axes({"sparse_rate": ["1"]}, {"a": {"selection": "x"}, "b": LONGSPEC})


@pytest.mark.parametrize("texts", [["sparse_ratio"], ["=1,2"], ["a="], ["a=1,,2"], ["a=1,1"], ["a=1", "a=2"]])
def test_malformed_sweeps_are_refused(texts):
    with pytest.raises(CommandError, match="--sweep"):
        parse_sweeps(texts)


def test_values_take_the_type_of_the_default():
    assert read_value("ngram_preload", "false", True) is False
    assert read_value("num_assistant_tokens", "6", 4) == 6
    assert read_value("selection", "window", "two_rows") == "window"
    for like, text in ((True, "maybe"), (4, "x"), ([1], "4-4"), (0.1, "a")):
        with pytest.raises(ValueError, match=f"--sweep key={text}: expected"):
            read_value("key", text, like)


def test_ways_to_choose_tokens_are_checked():
    assert Decoding(temperature=0.0).options() == {"do_sample": False}
    assert Decoding(penalty=1.2, window=64).to_dict() == {"penalty": 1.2, "window": 64}
    assert Decoding(penalty=1.2).to_dict() == {"penalty": 1.2, "window": 1024}
    with pytest.raises(ValueError, match="window=64 "):
        Decoding(window=64)
    for values in ({"temperature": -1.0}, {"top_p": 0.0}, {"penalty": 0.0}):
        with pytest.raises(ValueError, match="expected"):
            Decoding(**values)
