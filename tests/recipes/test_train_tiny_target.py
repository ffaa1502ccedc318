"""Training of the tiny target: its rows, its tokenizer, and a run on tiny stages."""

import argparse
import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests import scripts


@pytest.fixture(scope="module")
def script():
    return scripts.script("train_tiny_target")


@pytest.fixture
def tiny_run(script, tmp_path, monkeypatch):
    """Arguments of a run of three tiny stages, the last one with two layers instead of one."""
    stages = (
        script.Stage(32, 128, 2, 0.5, 0.0, 0.5, recall=16, layers=1),
        script.Stage(64, 192, 1, 0.2, 0.2, 0.2, layers=1),
        script.Stage(32, 64, 1, 0.2, 0.2, 0.2, jumps=1.0, layers=2),
    )
    config = script.model_config()
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 16}
    monkeypatch.setattr(script, "STAGES", stages)
    monkeypatch.setattr(script, "SHARES", {1: script.SHARES[6], 2: script.SHARES[12]})
    monkeypatch.setattr(script, "model_config", lambda: type(config)(**(config.to_dict() | small)))
    monkeypatch.setattr(script, "read_packages", lambda: [np.frombuffer(b"0123456789" * 40, np.uint8)])
    (tmp_path / "novels").mkdir()
    (tmp_path / "novels" / "one.txt").write_text("It was a dark and stormy night. " * 20)
    options = {"hours": None, "seed": 0, "parent": None, "threads": None}
    args = argparse.Namespace(novels=tmp_path / "novels", output=tmp_path / "run", **options)
    monkeypatch.setattr(script, "parse_arguments", lambda: args)
    return args


def test_a_run_grows_its_rows_and_layers_goes_on_and_writes_the_model(script, tiny_run):
    tiny_run.hours = 0.0
    with pytest.raises(SystemExit, match="give the command again"):
        script.main()
    first = torch.load(tiny_run.output / "checkpoint.pt", weights_only=True)["state"]
    assert first["steps"] == 1 and not (tiny_run.output / "model").exists()
    tiny_run.hours = None
    script.main()
    record = json.loads((tiny_run.output / "model" / "training.json").read_text())
    assert [entry["length"] for entry in record["history"]][-2:] == [64, 32]
    # a stage whose recall is not reached takes twice its tokens
    assert record["history"][-1]["tokens"] == 2 * 128 + 192 + 64 and record["bytes"]["source"] == 400
    model = AutoModelForCausalLM.from_pretrained(tiny_run.output / "model")
    assert model.dtype == torch.bfloat16 and model.config.vocab_size == 258
    assert len(model.model.layers) == 2 and model.model.layers[1].mlp.down_proj.weight.abs().max() > 0
    assert np.load(tiny_run.output / "novels.npy").tolist()[-2:] == [32, 256]
