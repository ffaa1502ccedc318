"""Runs that end in the middle and are resumed, against uninterrupted ones."""

import shutil

import pytest
import torch
from transformers import TrainerCallback

from hf_longspec import Eagle3DraftModel, LongSpecDraftModel
from hf_longspec.training import DraftTrainer, DraftTrainingArguments, TokenWindows
from hf_longspec.training.trainer import last_complete_checkpoint
from tests.tiny_targets import tiny_target

SAVED, KILLED, STEPS = 3, 5, 8


class Watch(TrainerCallback):
    """Records the steps, and copies the folder of a run as it is when a killed process would leave it."""

    def __init__(self, killed=None):
        self.killed = killed
        self.steps = []

    def on_step_end(self, args, state, control, **kwargs):
        self.steps.append(state.global_step)
        if state.global_step == KILLED and self.killed is not None:
            shutil.copytree(args.output_dir, self.killed)


def make_trainer(folder, watch, kind=LongSpecDraftModel, **config):
    """Seven rows, two per step: the checkpoint is in the middle of an epoch with an odd number of batches."""
    target = tiny_target("llama", max_position_embeddings=512)
    torch.manual_seed(1)
    draft = kind.from_target(target, **config)
    tokens = torch.randint(3, 128, (7 * 33,), generator=torch.Generator().manual_seed(0))
    args = DraftTrainingArguments(
        str(folder),
        seed=12,
        max_steps=STEPS,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        save_steps=SAVED,
        logging_steps=1,
        learning_rate=1e-2,
        warmup_steps=2,
        use_cpu=True,
        disable_tqdm=True,
    )
    return DraftTrainer(draft, target, args, train_dataset=TokenWindows(tokens, 33), callbacks=[watch])


@pytest.mark.parametrize(
    "kind",
    [
        (LongSpecDraftModel, {"window": 16}),
        (Eagle3DraftModel, {"draft_vocab_size": 20, "own_head": True}),
    ],
    ids=["longspec", "eagle3"],
)
def test_a_killed_run_resumes_to_the_weights_of_an_uninterrupted_one(kind, tmp_path):
    """Bit for bit: weights, optimizer, and the largest position."""
    (kind, config), killed = kind, tmp_path / "killed"
    whole = make_trainer(tmp_path / "whole", Watch(killed), kind, **config)
    whole.train()
    assert last_complete_checkpoint(killed) == str(killed / f"checkpoint-{SAVED}")
    watch = Watch()
    resumed = make_trainer(killed, watch, kind, **config)
    resumed.train(resume_from_checkpoint=True)

    assert watch.steps == list(range(SAVED + 1, STEPS + 1))
    other = resumed.draft.state_dict()
    assert all(torch.equal(tensor, other[name]) for name, tensor in whole.draft.state_dict().items())
    moments = [trainer.optimizer.state_dict()["state"] for trainer in (whole, resumed)]
    assert all(torch.equal(moments[0][key]["exp_avg"], moments[1][key]["exp_avg"]) for key in moments[0])
    assert resumed.method.longest_position == whole.method.longest_position
    assert resumed.state.num_input_tokens_seen == whole.state.num_input_tokens_seen
    if kind is Eagle3DraftModel:
        return
    # the largest offset was drawn before the checkpoint, so it has to come from the recorded position
    drawn = [max(whole.method.noise.draw(step, 2, range(2), [33, 33])[1]) for step in range(STEPS)]
    assert max(drawn[:SAVED]) > max(drawn[SAVED:])
    assert whole.method.longest_position == 32 + max(drawn)


def test_the_last_complete_checkpoint_is_used(tmp_path):
    with pytest.raises(ValueError, match="no complete checkpoint"):
        last_complete_checkpoint(tmp_path)
    for step in (2, 10, 30):
        (tmp_path / f"checkpoint-{step}").mkdir()
    for step in (2, 10):
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
    assert last_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")
