"""Texts of the tiny target, and training and publishing of its drafts, on a random target and random streams."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from hf_longspec.cli.env import git_commit
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


def test_texts_of_the_target(places, tmp_path):
    """Each row is the beginning of a stream, and then the target's own text: greedy up to near-ties of bfloat16."""
    given = ("--target", places / "target", "--streams", places / "streams", "--output", tmp_path)
    run("write_target_texts", *given, "--rows", 5, "--batch", 3, "--length", LENGTH, "--prompt", PROMPT, "--seed", 0)
    greedy, sampled = (np.load(tmp_path / f"{mode}.npy").reshape(5, LENGTH) for mode in ("greedy", "sampled"))
    stream = np.load(places / "streams" / "text.npy")
    beginnings = [stream[place : place + PROMPT].tolist() for place in range(len(stream) - PROMPT + 1)]
    assert all(row[:PROMPT].tolist() in beginnings for row in (*greedy, *sampled))
    texts = torch.from_numpy(greedy.astype(np.int64))
    logits = tiny_target("llama", dtype=torch.bfloat16, max_position_embeddings=256)(texts).logits.float()
    chosen = logits[:, PROMPT - 1 : -1].gather(2, texts[:, PROMPT:, None]).squeeze(2)
    assert (logits[:, PROMPT - 1 : -1].max(-1).values - chosen).max() < 0.1 and not np.array_equal(greedy, sampled)


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


def test_a_hybrid_target_and_its_draft(places, tmp_path):
    target, streams = tmp_path / "hybrid", ("--streams", places / "streams")
    sizes = ("--length", 32, "--batch", 2, "--tokens", 64 * 3, "--threads", 1)
    run("train_tiny_hybrid", *streams, "--output", target, *sizes)
    model = AutoModelForCausalLM.from_pretrained(target / "final", dtype=torch.float32)
    assert model.config.layer_types == 2 * [*["linear_attention"] * 3, "full_attention"] and steps_of(target) == 3
    given = ("--target", target / "final", "--output", tmp_path / "draft", "--length", 32, "--tokens", 64 * 2)
    run("train_tiny_draft", *streams, *given)
    inputs = AutoTokenizer.from_pretrained(target / "final")("def f(", return_tensors="pt")
    draft = AutoModel.from_pretrained(tmp_path / "draft" / "final", dtype=torch.float32)
    how = {"max_new_tokens": 9, "do_sample": False}
    texts = [model.generate(**inputs, **how, assistant_model=one).tolist() for one in (None, draft)]
    assert texts[0] == texts[1] and draft.last_speculation.num_spec_steps > 0
