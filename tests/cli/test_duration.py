"""The number of steps by a measured time, and that measuring changes nothing."""

import json
from types import SimpleNamespace

import torch

from hf_longspec import LongSpecDraftModel
from hf_longspec.cli.duration import limit, planned_steps, seconds_of_step
from hf_longspec.training import DraftTrainer, DraftTrainingArguments, TokenWindows
from tests.tiny_targets import tiny_target


def trainer_of(**settings):
    """What `limit` reads of a trainer with 100 rows."""
    defaults = {"max_steps": -1, "num_train_epochs": 3, "warmup_steps": 20}
    defaults |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    args, dataset = SimpleNamespace(**(defaults | settings)), range(100)
    return SimpleNamespace(args=args, train_dataset=dataset, accelerator=SimpleNamespace(num_processes=1))


def test_steps_are_those_of_the_recipe_or_of_the_time():
    assert planned_steps(trainer_of()) == 38 and planned_steps(trainer_of(max_steps=7)) == 7
    for given, steps, warmup in (
        ({"max_steps": 600}, 114, 11),
        ({"max_steps": 60}, 60, 6),
        ({"warmup_steps": 0.1}, 38, 0.1),
    ):
        trainer = trainer_of(**given)
        limit(trainer, 5.0, 10, None)
        assert (trainer.args.max_steps, trainer.args.warmup_steps) == (steps, warmup)


def test_a_resumed_run_keeps_its_number_of_steps(tmp_path):
    (tmp_path / "trainer_state.json").write_text(json.dumps({"max_steps": 55}))
    limit(trainer := trainer_of(max_steps=600), 5.0, 10, str(tmp_path))
    assert trainer.args.max_steps == 55


def test_measuring_a_step_leaves_no_trace(tmp_path):
    """Weights, log, the largest position and random numbers are those of a run that was not measured."""
    target = tiny_target("llama", vocab_size=260, max_position_embeddings=512)
    runs = []
    for measured in (False, True):
        torch.manual_seed(1)
        draft = LongSpecDraftModel.from_target(target, window=16)
        args = DraftTrainingArguments(str(tmp_path), max_steps=2, use_cpu=True, save_strategy="no", disable_tqdm=True)
        args.per_device_train_batch_size, args.logging_steps = 2, 1
        trainer = DraftTrainer(draft, target, args, TokenWindows(torch.arange(330) % 250, 33))
        if measured:
            state = torch.get_rng_state()
            assert seconds_of_step(trainer) > 0 and torch.equal(state, torch.get_rng_state())
            assert all(weight.grad is None for weight in draft.parameters())
            assert trainer.method.longest_position == 0 and not trainer.counts.any()
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        runs.append((losses, draft.state_dict()))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(weight, runs[1][1][name]) for name, weight in runs[0][1].items())
