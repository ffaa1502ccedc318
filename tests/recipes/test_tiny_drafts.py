"""Texts of the tiny target, and training and publishing of its drafts, on a random target and random streams."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from hf_longspec.cli.machine import git_commit
from tests.acceptance_lines import measured, write_lines
from tests.pairwise import few
from tests.scripts import PROJECT, run, script
from tests.tiny_targets import tiny_prompts, tiny_target

LENGTH, PROMPT = 24, 7


def write_stream(folder, name, length, low=3, high=128):
    folder.mkdir(exist_ok=True)
    stream = np.random.default_rng(low).integers(low, high, length).astype(np.uint16)
    np.save(folder / f"{name}.npy", stream)


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A folder with a target and two folders of streams."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_target("llama", max_position_embeddings=256).save_pretrained(folder / "target")
    write_stream(folder / "streams", "text", 2000)
    write_stream(folder / "own", "text", 900)
    return folder


@pytest.fixture(scope="module")
def train(places):
    """`train(name, *options)`: the folder of a run."""

    def call(name, *options):
        given = ("--target", places / "target", "--streams", places / "streams", "--output", places / name)
        run("train_tiny_draft", *given, "--length", 32, "--tokens", 32 * 2 * 30, *options)
        return places / name

    return call


@pytest.fixture(scope="module")
def longspec(train):
    return train("run")


def steps_of(folder):
    return json.loads((folder / "trainer_state.json").read_text())["global_step"]


def test_from_training_to_the_card(longspec, tmp_path):
    results = tmp_path / "longspec.jsonl"
    write_lines(results, measured("tiny-longspec", 2.5, tree_widths=[4, 4]), measured("another", 1.5))
    run("publish_tiny_draft", "--run", longspec, "--results", results, "--output", tmp_path / "card")
    text = (tmp_path / "card" / "README.md").read_text()
    assert "2.50 ± 0.10" in text and "1.50" not in text and "Not measured" not in text
    assert steps_of(longspec) == 30 and "minutes of processor time: 30 steps of 2 rows of 32 tokens" in text
    assert "| stage | tokens | minutes | tau |" in text and text.count("| 1 | 0.00M |") > 1
    assert "--tokens 1920.0 --length 32 --batch 2" in text and str(longspec.parent) not in text
    draft = AutoModel.from_pretrained(tmp_path / "card")
    assert draft.dtype == torch.bfloat16 and draft.config.target_name_or_path == "tiny-target"
    assert 0 < draft.config.trained_max_length <= 256
    assert draft.setting("tree_widths") == [1, 1, 1, 1] and "a chain of 4 tokens" in text
    assert (longspec / "commit.txt").read_text() == (git_commit(PROJECT) or "")


def test_a_draft_goes_on_from_its_weights_and_the_card_tells_what_came_before(longspec, places, tmp_path):
    card, texts, last = tmp_path / "card", tmp_path / "texts", tmp_path / "longer"
    run("publish_tiny_draft", "--run", longspec, "--results", tmp_path / "none", "--output", card)
    assert "Not measured." in (card / "README.md").read_text()
    some = ("--rows", 2, "--batch", 2, "--length", 32, "--prompt", 5)
    run("write_target_texts", "--target", places / "target", "--streams", places / "streams", "--output", texts, *some)
    given = ("--streams", texts, "--streams", places / "own", "--target", places / "target", "--output", last)
    numbers = ("--length", 16, "--batch", 1, "--tokens", 320, "--threads", 1, "--learning-rate", 1e-4)
    run("train_tiny_draft", *given, "--draft", card, *numbers)
    before, after = (AutoModel.from_pretrained(folder, dtype=torch.float32) for folder in (card, last / "final"))
    moved = [(a - b).abs().max() for a, b in zip(before.parameters(), after.parameters(), strict=True)]
    assert 0 < max(moved) < 1e-4 * steps_of(last) + 0.01  # Adam moves by the learning rate; bfloat16 rounds
    for first, curve in ((card, "| 1 | 0.00M |"), (longspec, "| 2 | 0.00M |")):  # a card has the curve of its own run
        stages = ("--before", first, "--before", texts, "--run", last)
        run("publish_tiny_draft", *stages, "--results", tmp_path / "none", "--output", tmp_path / "new")
        text = (tmp_path / "new" / "README.md").read_text()
        told = [
            "30 steps of 2 rows of 32 tokens",
            "Then",
            "minutes of processor time: 20 steps of one row of 16 tokens",
        ]
        told += ["`runs/texts` and `runs/own`", "that of the first stage", curve]
        told += ["--tokens 1920.0", "write_target_texts.py", "--draft runs/card"]
        found = [text.rindex(part) for part in told]
        assert found == sorted(found) and str(tmp_path) not in text


def stage(tokens, minutes, *log):
    places = range(1, len(log) + 1)
    seen = [{"num_input_tokens_seen": tokens * i / len(log), "cpu_minutes": minutes * i / len(log)} for i in places]
    return {
        "log": [entry | more for entry, more in zip(log, seen, strict=True)],
        "tokens": tokens / 1e6,
        "minutes": minutes,
    }


def test_a_learning_curve_adds_stages_and_waits_for_all_depths():
    publish = script("publish_tiny_draft")
    few = [{"acceptance_gap_1": 0.5, "acceptance_gap_2": 0.5}, {"acceptance_gap_1": 0.7}]
    many = [{"acceptance_gap_1": 0.5, "acceptance_gap_2": 0.4, "estimated_tau": 1.7}] * 40
    stages = [stage(4e6, 40.0, *many), stage(3e6, 9.0, *few, {"acceptance_gap_2": 0.9})]
    text = publish.learning_curve(stages)
    assert "a chain of 2 tokens" in text
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith(("| 1 ", "| 2 "))]
    assert rows[:5] == [["1", f"{seen:.2f}M", f"{seen * 10:.1f}", "1.70"] for seen in (0.7, 1.4, 2.1, 2.8, 4.0)]
    assert rows[5:] == [["2", "5.00M", "43.0", "1.75"], ["2", "7.00M", "49.0", f"{1 + 0.7 + 0.7 * 0.9:.2f}"]]
    assert publish.learning_curve([stage(1e6, 1.0, {"loss": 2.0})]) == ""
    assert publish.learning_curve([stage(1e6, 1.0, few[1])]).endswith("| 1 | 1.00M | 1.0 | 1.70 |")
    small = publish.learning_curve([stage(1e6, 1.0, {"acceptance": 0.5})])
    assert "a chain of 3 tokens" in small and small.endswith("| 1.88 |")


@pytest.mark.parametrize("kind", few(["eagle3", "dflash", "assistant", "tokenswift"], 2))
def test_other_kinds_are_published(kind, train, tmp_path):
    folder = train(kind, "--kind", kind)
    run("publish_tiny_draft", "--kind", kind, "--run", folder, "--output", tmp_path / "card")
    text = (tmp_path / "card" / "README.md").read_text()
    assert "steps of 2 rows" in text and f"--kind {kind}" in text and str(folder.parent) not in text
    assert text.count("| 3 | 0.") == (kind == "tokenswift")  # the accuracy of its third head
    (code,) = (tmp_path / "card").glob("*.py")
    bundled = PROJECT / "hub_cards" / f"tiny-{kind}" / code.name
    assert not bundled.parent.is_dir() or code.read_text() == bundled.read_text()
    target = tiny_target("llama", max_position_embeddings=256)
    draft = AutoModel.from_pretrained(tmp_path / "card")
    settings = script("publish_tiny_draft").SETTINGS[kind]
    assert {name: draft.setting(name) for name in settings} == settings
    new = script("train_tiny_draft").new_draft(kind, target, {})
    pair = [list((model.assistant if kind == "assistant" else model).parameters()) for model in (draft, new)]
    assert [weight.shape for weight in pair[0]] == [weight.shape for weight in pair[1]]
    input_ids, mask = tiny_prompts(target.config.vocab_size, (9, 4))
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    found = target.generate(input_ids, assistant_model=draft, **options)
    assert torch.equal(found, target.generate(input_ids, **options))


def test_a_small_model_learns_the_divergence_from_the_target(places, tmp_path):
    """The loss is the mean over tokens of sum p (log p - log q), which is zero for the target itself."""
    module, target = script("train_tiny_draft"), tiny_target("llama")
    small = tiny_target("llama", seed=1)
    arguments = module.DraftTrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    trainer = module.DistillationTrainer(small, target, arguments)
    rows = {"input_ids": tiny_prompts(target.config.vocab_size, (7, 7))[0]}
    with torch.no_grad():
        wanted, own = (model(rows["input_ids"]).logits.double().softmax(-1) for model in (target, small))
        found = trainer.compute_loss(small, rows)
        assert found.item() == pytest.approx((wanted * (wanted / own).log()).sum(-1).mean().item(), rel=1e-4)
        assert trainer.compute_loss(target, rows).abs() < 1e-6


def test_an_interrupted_run_goes_on_and_its_log_has_all_minutes(train):
    """A run of half its tokens was saved; the command again trains the other half and counts the time of both."""
    folder = train("halves", "--tokens", 32 * 2 * 100)
    saved = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    again = train("halves", "--tokens", 32 * 2 * 125)
    entries = [
        entry for entry in json.loads((again / "trainer_state.json").read_text())["log_history"] if "loss" in entry
    ]
    steps = [entry["step"] for entry in entries]
    assert steps_of(again) == 125 and steps == sorted(set(steps)) and {10, 100, 120} <= set(steps)
    assert entries[-1]["cpu_minutes"] > max(entry.get("cpu_minutes", 0) for entry in saved)
    assert entries[-1]["learning_rate"] < 1e-4 < max(entry["learning_rate"] for entry in entries)


def test_rows_are_the_streams_and_then_the_target(tmp_path):
    tiny_target("llama").save_pretrained(tmp_path / "target")
    for name, low in (("novels", 3), ("modules", 60)):
        write_stream(tmp_path / "streams", name, 300, low, low + 50)
    given = ("--target", tmp_path / "target", "--streams", tmp_path / "streams", "--output", tmp_path / "out")
    written = []
    for seed in (0, 0, 2):
        sizes = ("--rows", 5, "--batch", 3, "--length", LENGTH, "--prompt", PROMPT)
        run("write_target_texts", *given, *sizes, "--seed", seed)
        files = [np.load(tmp_path / "out" / f"{mode}.npy") for mode in ("greedy", "sampled")]
        assert all(file.dtype == np.uint16 for file in files)
        written.append([file.reshape(5, LENGTH).astype(np.int64) for file in files])
    (greedy, sampled), again, other = written
    assert np.array_equal(sampled, again[1]) and not np.array_equal(sampled, other[1])
    streams = [np.load(path).astype(np.int64) for path in (tmp_path / "streams").glob("*.npy")]
    places = [stream[i : i + PROMPT].tolist() for stream in streams for i in range(300 - PROMPT + 1)]
    for row in (*greedy, *sampled):
        assert row[:PROMPT].tolist() in places
    model = tiny_target("llama", dtype=torch.bfloat16)
    logits = model(torch.from_numpy(greedy)).logits[:, PROMPT - 1 : -1].float()
    chosen = logits.gather(2, torch.from_numpy(greedy[:, PROMPT:])[..., None]).squeeze(2)
    # bfloat16 rounds differently with and without a cache: near-ties may swap
    assert (logits.max(-1).values - chosen).max() < 0.1
    assert len({tuple(row) for row in sampled.tolist()}) == 5 and not np.array_equal(greedy, sampled)


def test_a_hybrid_target_and_its_draft(places, tmp_path):
    target, streams = tmp_path / "hybrid", ("--streams", places / "streams")
    run(
        "train_tiny_hybrid",
        *streams,
        "--output",
        target,
        "--length",
        32,
        "--batch",
        2,
        "--tokens",
        64 * 3,
        "--threads",
        1,
    )
    model = AutoModelForCausalLM.from_pretrained(target / "final", dtype=torch.float32)
    assert model.config.layer_types == 2 * [*["linear_attention"] * 3, "full_attention"] and steps_of(target) == 3
    given = ("--target", target / "final", "--output", tmp_path / "draft", "--length", 32, "--tokens", 64 * 2)
    run("train_tiny_draft", *streams, *given)
    inputs = AutoTokenizer.from_pretrained(target / "final")("def f(", return_tensors="pt")
    draft = AutoModel.from_pretrained(tmp_path / "draft" / "final", dtype=torch.float32)
    how = {"max_new_tokens": 9, "do_sample": False}
    texts = [model.generate(**inputs, **how, assistant_model=one).tolist() for one in (None, draft)]
    assert texts[0] == texts[1] and draft.last_speculation.num_spec_steps > 0
