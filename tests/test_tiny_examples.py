"""Training and publishing the tiny drafts: the scripts in turn, on a random target and random streams."""

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel

from hf_longspec.bench.machine import git_commit
from hf_longspec.testing import tiny_prompts, tiny_target
from tests.acceptance_lines import measured, write_lines

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def script(name):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        return importlib.import_module(name)


def run(name, *arguments):
    """Call the main of a script with these arguments."""
    main = script(name).main
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, *map(str, arguments)])
        main()


def write_stream(folder, seed, length):
    folder.mkdir()
    np.save(folder / "text.npy", np.random.default_rng(seed).integers(3, 128, length).astype(np.uint16))
    return folder


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A folder with a target and two folders of streams."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_target("llama", max_position_embeddings=256).save_pretrained(folder / "target")
    write_stream(folder / "streams", 0, 2000)
    write_stream(folder / "own", 1, 900)
    return folder


@pytest.fixture(scope="module")
def train(places):
    """`train(kind, name, *options)`: the folder of a run."""

    def call(kind, name, *options):
        given = ("--target", places / "target", "--streams", places / "streams", "--output", places / name)
        run(f"train_tiny_{kind}", *given, "--length", 32, "--batch", 2, *options)
        return places / name

    return call


@pytest.fixture(scope="module")
def longspec(train):
    return train("draft", "run", "--steps", 3)


@pytest.fixture(scope="module")
def heads(train):
    return train("tokenswift", "heads", "--minutes", 0.003)


def test_from_training_to_the_card(longspec, tmp_path):
    results = tmp_path / "longspec.jsonl"
    write_lines(results, measured("tiny-longspec", 2.5, tree_widths=[4, 4]), measured("another", 1.5))
    run("publish_tiny_draft", "--run", longspec, "--results", results, "--output", tmp_path / "card")
    text = (tmp_path / "card" / "README.md").read_text()
    assert "2.50 ± 0.10" in text and "1.50" not in text and "Not measured" not in text
    assert "3 steps of 2 rows" in text and "--steps 3 --length 32 --batch 2" in text
    assert str(longspec.parent) not in text
    draft = AutoModel.from_pretrained(tmp_path / "card")
    assert draft.dtype == torch.bfloat16 and draft.config.target_name_or_path == "tiny-target"
    assert 0 < draft.config.trained_max_length <= 256
    assert draft.setting("tree_widths") == [1, 1, 1] and "a chain of 3 tokens" in text


def test_a_draft_goes_on_from_its_weights_and_the_card_tells_what_came_before(longspec, places, tmp_path):
    card, texts, last = tmp_path / "card", tmp_path / "texts", tmp_path / "longer"
    run("publish_tiny_draft", "--run", longspec, "--results", tmp_path / "none", "--output", card)
    assert "Not measured." in (card / "README.md").read_text()
    some = ("--rows", 2, "--batch", 2, "--length", 32, "--prompt", 5)
    run("write_target_texts", "--target", places / "target", "--streams", places / "streams", "--output", texts, *some)
    given = ("--streams", texts, "--target", places / "target", "--output", last, "--draft", card)
    run("train_tiny_draft", *given, "--length", 16, "--batch", 1, "--steps", 2, "--warmup", 1)
    before, after = (AutoModel.from_pretrained(folder) for folder in (card, last / "final"))
    moved = [(a - b).abs().max() for a, b in zip(before.parameters(), after.parameters(), strict=True)]
    assert 0 < max(moved) < 0.01  # a step of Adam is at most the learning rate, 0.002; bfloat16 rounds
    stages = ("--before", card, "--before", texts, "--run", last)
    run("publish_tiny_draft", *stages, "--results", tmp_path / "none", "--output", tmp_path / "new")
    text = (tmp_path / "new" / "README.md").read_text()
    told = ["3 steps of 2 rows", "Then 2 steps of 1 rows", "on `runs/texts`"]
    told += ["--steps 3", "write_target_texts.py", "--draft runs/card"]
    found = [text.index(part) for part in told]
    assert found == sorted(found) and str(tmp_path) not in text


@pytest.mark.parametrize("kind", ["eagle3", "assistant"])
def test_other_kinds_go_on_and_are_published(kind, train, places, tmp_path):
    first = train("draft", f"first {kind}", "--kind", kind, "--steps", 2)
    last = train("draft", f"last {kind}", "--kind", kind, "--steps", 2, "--draft", first / "final")
    run("publish_tiny_draft", "--kind", kind, "--before", first, "--run", last, "--output", tmp_path / "card")
    text = (tmp_path / "card" / "README.md").read_text()
    assert "2 steps of 2 rows" in text and "Then 2 steps of 2 rows" in text and f"--kind {kind}" in text
    target = tiny_target("llama", max_position_embeddings=256)
    draft = AutoModel.from_pretrained(tmp_path / "card")
    new = script("train_tiny_draft").new_draft(kind, target, {})
    pair = [list((model.assistant if kind == "assistant" else model).parameters()) for model in (draft, new)]
    assert [weight.shape for weight in pair[0]] == [weight.shape for weight in pair[1]]
    input_ids, mask = tiny_prompts(target.config.vocab_size, (9, 4))
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    found = target.generate(input_ids, assistant_model=draft, **options)
    assert torch.equal(found, target.generate(input_ids, **options))


def test_the_small_model_comes_nearer_to_the_target(places, tmp_path):
    """Distillation on one stream lowers the divergence that it trains."""
    given = ("--target", places / "target", "--streams", places / "streams", "--output", tmp_path / "run")
    numbers = ("--length", 32, "--batch", 4, "--steps", 60, "--warmup", 1, "--log-every", 5)
    run("train_tiny_draft", "--kind", "assistant", *given, *numbers)
    log = json.loads((tmp_path / "run" / "trainer_state.json").read_text())["log_history"]
    losses = [entry["loss"] for entry in log if "loss" in entry]
    assert losses[-1] < 0.95 * losses[0]  # a random target leaves little to learn


@pytest.mark.parametrize(
    ("ablation", "field", "value"),
    [("noise", "noise_range", [1, 1]), ("cross-attention", "cross_attention", False), ("offsets", "window", 512)],
)
def test_ablations_take_away_one_thing(train, ablation, field, value):
    folder = train("draft", ablation, "--steps", 2, "--without", ablation)
    draft = AutoModel.from_pretrained(folder / "final")
    assert getattr(draft.config, field) == value
    assert (draft.config.trained_max_length <= 32) == (ablation == "offsets")
    assert (draft.config.noise_range == [1, 5]) == (ablation != "noise")
    assert f"--without {ablation}" in (folder / "command.txt").read_text()


@pytest.mark.parametrize("kind", ["draft", "tokenswift"])
def test_without_streams(kind, tmp_path):
    (tmp_path / "none").mkdir()
    with pytest.raises(SystemExit, match=r"has no \*\.npy: run examples/train_tiny_target.py"):
        run(f"train_tiny_{kind}", "--streams", tmp_path / "none", "--output", tmp_path / "run")


def test_a_run_of_heads_ends_in_time_and_goes_on_with_more_of_it(train, tmp_path):
    steps = []
    for minutes in (0.002, 0.008):
        folder = train("tokenswift", "timed", "--minutes", minutes, "--independent", "--heads", 2)
        steps.append(json.loads((folder / "trainer_state.json").read_text())["global_step"])
        command = (folder / "command.txt").read_text()
        assert f"--minutes {minutes}" in command and "--independent" in command and str(folder.parent) not in command
    assert 0 < steps[0] < steps[1]
    draft = AutoModel.from_pretrained(folder / "final")
    assert draft.dtype == torch.bfloat16 and draft.config.target_name_or_path == "target"
    assert draft.config.num_heads == 2 and not draft.config.chained
    assert (folder / "commit.txt").read_text() == (git_commit(EXAMPLES) or "")


def test_the_learning_rate_follows_the_time_spent_and_a_pause_is_not_spent(monkeypatch):
    module, now = script("train_tiny_tokenswift"), 1000.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)

    def schedule():
        return module.TimedCosine(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.2), 100.0)

    def rate(clock):
        clock.optimizer.step()
        clock.step()
        return clock.get_last_lr()[0]

    first = schedule()
    assert rate(first) == pytest.approx(0.2 * 2 / module.WARMUP_STEPS)
    first.last_epoch = module.WARMUP_STEPS
    now += 50
    assert rate(first) == pytest.approx(0.1)
    state = first.state_dict()
    now += 10_000
    resumed = schedule()
    resumed.load_state_dict(state)
    now += 25
    assert rate(resumed) == pytest.approx(0.1 - 0.1 * 2**-0.5)
    now += 500
    assert rate(resumed) == 0.0


def test_heads_go_on_on_other_streams_and_the_card_tells_both(heads, train, places):
    """Their weights are those of the first run, changed; the second stage has its own command and streams."""
    more = ("--draft", heads / "final", "--streams", places / "own")
    second = train("tokenswift", "more", "--minutes", 0.003, "--learning-rate", 1e-4, *more)
    old, new = (AutoModel.from_pretrained(run / "final", dtype=torch.float32).state_dict() for run in (heads, second))
    # bfloat16 of what was saved, and some steps of 1e-4
    torch.testing.assert_close(new, old, atol=0.02, rtol=0.02)
    assert any(not torch.equal(new[name], weight) for name, weight in old.items())
    card, stages = places / "card", ("--run", second, "--before", heads)
    run("publish_tiny_tokenswift", *stages, "--results", places / "none", "--output", card)
    text = (card / "README.md").read_text()
    assert text.count("python examples/train_tiny_tokenswift.py") == 2
    assert "--streams runs/streams --streams runs/own" in text and "--draft runs/heads/final" in text
    assert "on `runs/streams` and `runs/own`" in text and str(places) not in text
    assert "Not measured." in text and "3 chained heads" in text and text.count("| 3 | 0.") == 1
    draft, settings = AutoModel.from_pretrained(card), script("publish_tiny_tokenswift").CPU_SETTINGS
    assert {name: draft.setting(name) for name in settings} == settings
    assert draft.config.target_name_or_path == "tiny-target"


def test_sequential_heads(train):
    folder = train("tokenswift", "sequential", "--minutes", 0.001, "--sequential", "--heads", 2)
    assert AutoModel.from_pretrained(folder / "final").config.sequential
    assert "--sequential" in (folder / "command.txt").read_text()
