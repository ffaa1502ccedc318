"""A run that is killed and resumed, against an uninterrupted one."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_longspec.training.trainer import last_complete_checkpoint
from tests.training.resumable import SAVED, STEPS, Watch, make_trainer

SCRIPT = Path(__file__).with_name("resumable.py")


def test_a_killed_run_resumes_to_the_weights_of_an_uninterrupted_one(tmp_path):
    """Bit for bit: weights, optimizer, and the largest position."""
    killed = tmp_path / "killed"
    command = [sys.executable, str(SCRIPT), str(killed)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=SCRIPT.parents[2])
    assert result.returncode == -signal.SIGKILL, result.stderr
    assert last_complete_checkpoint(killed) == str(killed / f"checkpoint-{SAVED}")

    whole = make_trainer(tmp_path / "whole", Watch())
    whole.train()
    watch = Watch()
    resumed = make_trainer(killed, watch)
    resumed.train(resume_from_checkpoint=True)

    assert watch.steps == list(range(SAVED + 1, STEPS + 1))
    other = resumed.draft.state_dict()
    assert all(torch.equal(tensor, other[name]) for name, tensor in whole.draft.state_dict().items())
    moments = [trainer.optimizer.state_dict()["state"] for trainer in (whole, resumed)]
    assert all(torch.equal(moments[0][key]["exp_avg"], moments[1][key]["exp_avg"]) for key in moments[0])
    # the largest offset was drawn before the checkpoint, so it has to come from the recorded position
    drawn = [max(whole.method.noise.draw(step, 2, range(2), [33, 33])[1]) for step in range(STEPS)]
    assert max(drawn[:SAVED]) > max(drawn[SAVED:])
    assert resumed.method.longest_position == whole.method.longest_position == 32 + max(drawn)
    assert resumed.state.num_input_tokens_seen == whole.state.num_input_tokens_seen


def test_the_last_complete_checkpoint_is_used(tmp_path):
    with pytest.raises(ValueError, match=r"no complete checkpoint.*start without"):
        last_complete_checkpoint(tmp_path)
    for step in (2, 10, 30):
        (tmp_path / f"checkpoint-{step}").mkdir()
    for step in (2, 10):
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
    assert last_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")
