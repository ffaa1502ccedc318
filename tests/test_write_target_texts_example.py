"""Texts that a target writes itself: rows that begin with the stream and go on as the target does."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from hf_longspec.testing import tiny_target

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
LENGTH, PROMPT = 24, 7


@pytest.fixture
def written(monkeypatch, tmp_path):
    """`written(seed)`: the text of the script after two streams."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    tiny_target("llama").save_pretrained(tmp_path / "target")
    (tmp_path / "streams").mkdir()
    for name, low in (("novels", 3), ("modules", 60)):
        stream = np.random.default_rng(low).integers(low, low + 50, 300).astype(np.uint16)
        np.save(tmp_path / "streams" / f"{name}.npy", stream)

    def write(seed):
        arguments = (
            f"--target {tmp_path}/target --streams {tmp_path}/streams --output {tmp_path}/out --rows 5 --batch 3 "
        )
        arguments += f"--length {LENGTH} --prompt {PROMPT} --seed {seed}"
        monkeypatch.setattr(sys, "argv", ["write_target_texts.py", *arguments.split()])
        importlib.import_module("write_target_texts").main()
        files = [np.load(tmp_path / "out" / f"{mode}.npy") for mode in ("greedy", "sampled")]
        assert all(file.dtype == np.uint16 for file in files)
        return [file.reshape(5, LENGTH).astype(np.int64) for file in files]

    return write


def test_rows_are_the_streams_and_then_the_target(written, tmp_path):
    greedy, sampled = written(0)
    streams = [np.load(path).astype(np.int64) for path in (tmp_path / "streams").glob("*.npy")]
    places = [stream[start : start + PROMPT].tolist() for stream in streams for start in range(300 - PROMPT + 1)]
    for row in (*greedy, *sampled):
        assert row[:PROMPT].tolist() in places
    model = tiny_target("llama", dtype=torch.bfloat16)
    logits = model(torch.from_numpy(greedy)).logits[:, PROMPT - 1 : -1].float()
    chosen = logits.gather(2, torch.from_numpy(greedy[:, PROMPT:])[..., None]).squeeze(2)
    # bfloat16 rounds differently with and without a cache: near-ties may swap
    assert (logits.max(-1).values - chosen).max() < 0.1
    assert len({tuple(row) for row in sampled.tolist()}) == 5 and not np.array_equal(greedy, sampled)


def test_a_seed_says_what_is_written(written):
    first, again, other = written(1), written(1), written(2)
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(first, again, strict=True))
    assert not np.array_equal(first[1], other[1])


def test_a_folder_without_streams_is_named(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(
        sys, "argv", ["write_target_texts.py", "--streams", str(tmp_path), "--output", str(tmp_path / "out")]
    )
    with pytest.raises(SystemExit, match=r"has no \*\.npy: run examples/train_tiny_target.py"):
        importlib.import_module("write_target_texts").main()
    assert not (tmp_path / "out").exists()
