"""Dividing a step over batches, accumulation and processes changes only the rounding."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.multiprocessing import start_processes

from tests.training.divided import MODES, ROWS_PER_STEP, STEPS, history, make_trainer, train_in_a_fork

ROOT = Path(__file__).resolve().parents[2]
# Gradients of size 1, summed in float32 in another order, and two steps of SGD with them.
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """A run that is not divided."""
    trainer = make_trainer(tmp_path_factory.mktemp("whole"), ROWS_PER_STEP, 1)
    trainer.train()
    return trainer


def assert_same_history(steps, reference):
    assert len(steps) == STEPS
    for step, expected in zip(steps, history(reference), strict=True):
        assert step == pytest.approx(expected, rel=1e-4)


def test_accumulation_is_exact(reference, tmp_path):
    trainer = make_trainer(tmp_path, 1, 8)
    trainer.train()
    assert_same_history(history(trainer), reference)
    other = reference.draft.state_dict()
    for name, tensor in trainer.draft.state_dict().items():
        torch.testing.assert_close(tensor, other[name], rtol=TOLERANCE, atol=TOLERANCE, msg=name)


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """Folder of the results of two processes, each with two rows of a step in each of two micro-batches."""
    yaml = pytest.importorskip("yaml")
    folder = tmp_path_factory.mktemp("two")
    config = yaml.safe_load((ROOT / "recipes/accelerate/fsdp.yaml").read_text(encoding="utf-8"))
    config |= {"num_processes": 2, "mixed_precision": "no", "use_cpu": True}
    (folder / "fsdp.yaml").write_text(yaml.safe_dump(config))
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(folder / "fsdp.yaml")]
    command = [*launch, "--main_process_port", "0", str(ROOT / "tests/training/divided.py"), str(folder)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    assert result.returncode == 0, result.stderr
    return folder


def test_two_processes_equal_one(reference, tmp_path):
    """As `accelerate launch` starts them, but forked: an import takes longer than the training."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    start_processes(train_in_a_fork, (port, str(tmp_path), "whole"), 2, start_method="spawn")
    assert_equal(reference, tmp_path / "whole", "whole")


@pytest.mark.soak
@pytest.mark.parametrize("mode", MODES)
def test_two_processes_of_the_recipe_equal_one(reference, two_processes, mode):
    assert_equal(reference, two_processes / mode, mode)


def assert_equal(reference, folder, mode):
    logged = json.loads((folder / "history.json").read_text())
    assert set(logged["parts"]) == ({"DTensor"} if mode == "sharded" else {"Parameter"})
    assert_same_history(logged["steps"], reference)
    other = reference.draft.state_dict()
    for name, tensor in load_file(folder / "model.safetensors").items():
        torch.testing.assert_close(tensor, other[name], rtol=TOLERANCE, atol=TOLERANCE, msg=name)
    expected = reference.evaluate()
    for name in ("eval_acceptance_gap_1", "eval_acceptance_gap_5"):  # 16 rows in batches of 8: uneven for two
        assert logged["metrics"][name] == pytest.approx(expected[name])
    config = json.loads((folder / "config.json").read_text())
    assert config["trained_max_length"] == reference.method.longest_position  # the largest of all processes
