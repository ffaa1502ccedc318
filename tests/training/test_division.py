"""How a step is divided over batches, accumulation and processes changes rounding and nothing else."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.training.divided import ROWS_PER_STEP, STEPS, history, make_trainer

ROOT = Path(__file__).resolve().parents[2]
# Gradients of size 1, summed in float32 in another order, and three steps of SGD with them.
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    trainer = make_trainer(tmp_path_factory.mktemp("one"), ROWS_PER_STEP, 1)
    trainer.train()
    return trainer


def assert_same_history(steps, reference):
    assert len(steps) == STEPS
    for step, expected in zip(steps, history(reference), strict=True):
        assert step == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("rows", "accumulation"), [(1, 8), (2, 4), (4, 2)])
def test_accumulation_is_exact(reference, tmp_path, rows, accumulation):
    trainer = make_trainer(tmp_path, rows, accumulation)
    trainer.train()
    assert_same_history(history(trainer), reference)
    other = reference.draft.state_dict()
    for name, tensor in trainer.draft.state_dict().items():
        torch.testing.assert_close(tensor, other[name], rtol=TOLERANCE, atol=TOLERANCE, msg=name)


def test_two_processes_are_one(reference, tmp_path):
    """With two rows of a step in each of two micro-batches of each of two processes."""
    # --multi_gpu: with --cpu alone, accelerate starts one process; where each runs is said by use_cpu in the script
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    command = [*launch, "--main_process_port", "0", str(ROOT / "tests/training/divided.py"), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    logged = json.loads((tmp_path / "history.json").read_text())
    assert_same_history(logged["steps"], reference)
    other = reference.draft.state_dict()
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        torch.testing.assert_close(tensor, other[name], rtol=TOLERANCE, atol=TOLERANCE, msg=name)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["trained_max_length"] == reference.method.longest_position
    expected = reference.evaluate()
    for name in ("eval_acceptance_gap_1", "eval_acceptance_gap_5"):  # 24 rows in batches of 8: uneven for two
        assert logged["metrics"][name] == pytest.approx(expected[name])
