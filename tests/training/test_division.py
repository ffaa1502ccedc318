"""How a step is divided over batches, accumulation and processes changes rounding and nothing else."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.training.divided import KINDS, ROWS_PER_STEP, STEPS, history, make_trainer

ROOT = Path(__file__).resolve().parents[2]
# Gradients of size 1, summed in float32 in another order, and three steps of SGD with them.
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """Undivided runs, by the kind of the draft."""
    trainers = {kind: make_trainer(tmp_path_factory.mktemp(kind), ROWS_PER_STEP, 1, kind) for kind in KINDS}
    for trainer in trainers.values():
        trainer.train()
    return trainers


def assert_same_history(steps, reference):
    assert len(steps) == STEPS
    for step, expected in zip(steps, history(reference), strict=True):
        assert step == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "accumulation"), [(1, 8), (2, 4), (4, 2)])
def test_accumulation_is_exact(references, tmp_path, rows, accumulation, kind):
    reference = references[kind]
    trainer = make_trainer(tmp_path, rows, accumulation, kind)
    trainer.train()
    assert_same_history(history(trainer), reference)
    other = reference.draft.state_dict()
    for name, tensor in trainer.draft.state_dict().items():
        torch.testing.assert_close(tensor, other[name], rtol=TOLERANCE, atol=TOLERANCE, msg=name)


@pytest.fixture(scope="module", params=["whole", "sharded"])
def two_processes(request, tmp_path_factory):
    """What two processes wrote, with two rows of a step in each of two micro-batches of each."""
    folder = tmp_path_factory.mktemp("two")
    arguments = [str(folder)]
    if request.param == "sharded":
        yaml = pytest.importorskip("yaml")
        config = yaml.safe_load((ROOT / "examples/accelerate/fsdp.yaml").read_text(encoding="utf-8"))
        config |= {"num_processes": 2, "mixed_precision": "no", "use_cpu": True}
        (folder / "fsdp.yaml").write_text(yaml.safe_dump(config))
        how = ["--config_file", str(folder / "fsdp.yaml")]
        arguments.append("sharded")
    else:
        # --multi_gpu: with --cpu alone, accelerate starts one process; where each runs is said by use_cpu in the script
        how = ["--multi_gpu", "--num_processes", "2"]
    launch = [sys.executable, "-m", "accelerate.commands.launch", *how, "--main_process_port", "0"]
    command = [*launch, str(ROOT / "tests/training/divided.py"), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    for kind in KINDS:  # what accelerate says is FSDP was FSDP
        parts = json.loads((folder / kind / "history.json").read_text())["parts"]
        assert set(parts) == ({"DTensor"} if request.param == "sharded" else {"Parameter"})
    return folder


EVALUATED = {
    "longspec": ("eval_acceptance_gap_1", "eval_acceptance_gap_5"),
    "heads": ("eval_head_1_top1", "eval_head_3_top3"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_are_one(references, two_processes, kind):
    reference, folder = references[kind], two_processes / kind
    logged = json.loads((folder / "history.json").read_text())
    assert_same_history(logged["steps"], reference)
    other = reference.draft.state_dict()
    for name, tensor in load_file(folder / "model.safetensors").items():
        torch.testing.assert_close(tensor, other[name], rtol=TOLERANCE, atol=TOLERANCE, msg=name)
    expected = reference.evaluate()
    for name in EVALUATED[kind]:  # 24 rows in batches of 8: uneven for two
        assert logged["metrics"][name] == pytest.approx(expected[name])


def test_the_largest_position_of_all_processes_is_recorded(references, two_processes):
    config = json.loads((two_processes / "longspec" / "config.json").read_text())
    assert config["trained_max_length"] == references["longspec"].method.longest_position
