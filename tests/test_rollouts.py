"""Trainers of TRL and evaluation harnesses use a bound draft, and get the same texts as without.

Sampled texts are compared with those of the loop without a draft, for the same seed. A call whose forward a trainer has
changed in a way that the package does not know is decoded without the draft, which the tests count as a failure.
"""

import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import hf_longspec
from hf_longspec import LongSpecDraftModel, NgramDraftModel, PlainDraftModel
from hf_longspec.training import DraftAlong
from tests import scripts
from tests.scripts import PROJECT
from tests.test_bound import CARDS

trl = pytest.importorskip("trl")
PROMPTS = ["one two three, one two", "a b c, a b c, a", "four five, four five", "the sea, the sea, the"]
EXAMPLE = PROJECT / "examples" / "grpo.py"
STEPS = 2
HOW = {"report_to": [], "use_cpu": True, "bf16": False, "max_steps": STEPS, "seed": 3, "learning_rate": 1e-3}
HOW |= {"per_device_train_batch_size": 4, "logging_steps": 1, "save_steps": STEPS}


@pytest.fixture
def tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(CARDS / "tiny-target", padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


def target():
    return AutoModelForCausalLM.from_pretrained(CARDS / "tiny-target", dtype=torch.float32)


def reward(completions, **_):
    return [float(len(set(text))) for text in completions]


def by_rewards(name, model, tokenizer, folder):
    """A trainer that samples completions and scores them."""
    module = trl
    settings = {"num_generations": 2, "max_completion_length": 24}
    if name == "OnlineDPO":
        from trl.experimental import online_dpo as module

        # with activation checkpointing, the default, it asks for texts without a cache
        settings = {"max_new_tokens": 24, "max_length": 96, "gradient_checkpointing": False}
    config = getattr(module, f"{name}Config")(output_dir=str(folder), **HOW, **settings)
    data = Dataset.from_dict({"prompt": PROMPTS})
    make = getattr(module, f"{name}Trainer")
    return make(model=model, reward_funcs=reward, args=config, train_dataset=data, processing_class=tokenizer)


def with_samples(name, model, tokenizer, folder):
    """A trainer that learns from given texts, and shows completions in between."""
    rows = {
        "SFT": {"prompt": PROMPTS, "completion": PROMPTS},
        "DPO": {"prompt": PROMPTS, "chosen": PROMPTS, "rejected": PROMPTS[::-1]},
    }[name]
    config = getattr(trl, f"{name}Config")(output_dir=str(folder), **HOW)
    data = Dataset.from_dict(rows)
    make = getattr(trl, f"{name}Trainer")
    trainer = make(model=model, args=config, train_dataset=data, eval_dataset=data, processing_class=tokenizer)
    shown = GenerationConfig(max_new_tokens=24, do_sample=True, pad_token_id=tokenizer.pad_token_id)
    trainer.add_callback(trl.LogCompletionsCallback(trainer, shown, num_prompts=4, freq=1))
    return trainer


def texts_of(make, tokenizer, draft_class, folder):
    """The results of all calls of `generate` in two steps, their statistics, and the weights after them."""
    torch.manual_seed(0)
    model = target()
    draft = draft_class.from_target(model)
    draft.generation_config.gate = False
    texts, calls = [], []

    def keep(arguments, result):
        texts.append(result)
        calls.append(draft.last_speculation)

    trainer = make(model, tokenizer, folder)
    with hf_longspec.bind(trainer, draft) as bound:
        bound.listeners.append(keep)
        trainer.train()
    return texts, calls, model.state_dict()


NAMES = ("GRPO", "RLOO", "OnlineDPO", "SFT", "DPO")
OTHERS = [pytest.param(name, marks=pytest.mark.soak) for name in NAMES[1:]]


@pytest.mark.filterwarnings("ignore")  # of trl, which the versions of transformers differ in
@pytest.mark.parametrize("name", [NAMES[0], *OTHERS])
def test_rollouts_draft_and_are_the_same(name, tokenizer, tmp_path):
    make = partial(with_samples if name in ("SFT", "DPO") else by_rewards, name)
    runs = [texts_of(make, tokenizer, kind, tmp_path / kind.__name__) for kind in (PlainDraftModel, NgramDraftModel)]
    (expected, _, weights), (texts, calls, others) = runs
    assert len(calls) >= STEPS and all(call.reason is None for call in calls), [call.reason for call in calls]
    assert sum(call.num_draft_tokens for call in calls) > 0
    assert len(texts) == len(expected) and all(map(torch.equal, texts, expected))
    assert all(torch.equal(value, others[key]) for key, value in weights.items())


@pytest.mark.filterwarnings("ignore")
def test_a_draft_learns_along_with_a_policy(tokenizer, tmp_path):
    """Completions, rewards and weights are those with a draft that does not learn."""
    runs = []
    for learns in (False, True):
        torch.manual_seed(0)
        model = target()
        draft = LongSpecDraftModel.from_pretrained(CARDS / "tiny-longspec", dtype=torch.float32)
        draft.generation_config.gate = False
        before = {name: value.clone() for name, value in draft.state_dict().items()}
        trainer = by_rewards("GRPO", model, tokenizer, tmp_path / str(learns))
        with hf_longspec.bind(trainer, draft) as bound:
            if learns:
                trainer.add_callback(DraftAlong(bound))
            trainer.train()
        changed = any(not torch.equal(value, before[name]) for name, value in draft.state_dict().items())
        assert changed == learns and draft.last_speculation.num_accepted_draft_tokens > 0
        runs.append((model.state_dict(), trainer.state.log_history))
    assert all(torch.equal(value, runs[1][0][name]) for name, value in runs[0][0].items())
    assert [log.get("reward") for log in runs[0][1]] == [log.get("reward") for log in runs[1][1]]
    assert all(log["draft_tau"] > 1 for log in runs[1][1][:STEPS])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("draft", [(), pytest.param(("--draft", "ngram"), marks=pytest.mark.soak)])
def test_the_example_runs(draft, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    trainer = scripts.script("grpo", "examples").main(["--steps", "1", "--tokens", "12", *draft])
    logs = trainer.state.log_history[0]
    assert 0 < logs["reward"] < 1 and ("draft_loss" in logs) == (not draft)
    assert "tau" in capsys.readouterr().out


@pytest.mark.soak
def test_two_processes_train_together(tmp_path):
    """Under DistributedDataParallel, each process with its own copy of the draft."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", str(EXAMPLE)]
    command += ["--steps", "2", "--tokens", "16", "--output", str(tmp_path)]
    done = subprocess.run(
        command, cwd=PROJECT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("longspec: tau") == 2 and "is not used in this call" not in done.stderr
    assert "draft_loss" in done.stdout


@pytest.mark.soak
def test_sharded_policies_sample_without_the_draft(tmp_path):
    """Under FSDP2 each forward gathers the weights, so a draft, whose steps differ by process, would not end."""
    texts = {}
    for draft in ("none", "ngram"):
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "-m", "tests.sharded_policy"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        folder = tmp_path / draft
        done = subprocess.run(
            [*command, draft, str(folder)], cwd=PROJECT, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-3000:]
        texts[draft] = [(folder / f"{rank}.json").read_text() for rank in range(2)]
        assert ("weights are sharded over processes" in done.stderr) == (draft == "ngram")
    assert texts["none"] == texts["ngram"] and texts["none"][0] != texts["none"][1]


def evaluated(harness, model, tokenizer, folder):
    """A harness around a model, and what it gets for two prompts, greedily; it may keep results in a folder."""
    how = {"until": ["\n\n"], "max_gen_toks": 24, "do_sample": False}
    if harness == "lm_eval":
        from lm_eval.api.instance import Instance
        from lm_eval.models.huggingface import HFLM

        lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2)
        asked = [Instance("generate_until", {}, (prompt, how), index) for index, prompt in enumerate(PROMPTS[:2])]
        return lm, lambda: lm.generate_until(asked, disable_tqdm=True)
    from lighteval.models.transformers.transformers_model import TransformersModel, TransformersModelConfig
    from lighteval.tasks.requests import Doc

    name = str(CARDS / "tiny-target")
    config = TransformersModelConfig(
        model_name=name, dtype="float32", batch_size=2, device="cpu", cache_dir=str(folder)
    )
    lm = TransformersModel.from_model(model, config)
    docs = [
        Doc(query=prompt, choices=[], gold_index=[], generation_size=24, stop_sequences=[]) for prompt in PROMPTS[:2]
    ]
    return lm, lambda: [response.text for response in lm._padded_greedy_until(docs)]  # without its cache of results


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("harness", ["lm_eval", "lighteval"])
def test_harnesses_draft_and_get_the_same(harness, tokenizer, tmp_path):
    pytest.importorskip(harness)
    with torch.enable_grad():  # lighteval ends gradients for good
        _, run = evaluated(harness, target().eval(), tokenizer, tmp_path / "plain")
        expected = run()
        lm, run = evaluated(harness, target().eval(), tokenizer, tmp_path / "drafted")
        draft = NgramDraftModel.from_target(lm.model, gate=False)
        with hf_longspec.bind(lm, draft):
            assert run() == expected
    assert draft.last_speculation.num_accepted_draft_tokens > 0
