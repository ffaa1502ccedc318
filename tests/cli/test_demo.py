"""The demo from its arguments to its table, verdict and exit status, on a random model and a tokenizer of bytes."""

import shutil
import time

import pytest
import torch

from hf_longspec import SpecAttnDraftModel
from hf_longspec.cli import CommandError, demo, models
from hf_longspec.cli.texts import read_source
from tests.cli.conftest import HUB_CARDS, run_command
from tests.tiny_tokenizers import save_byte_target
from tests.watching import after, before

MAX_POSITIONS = 512
SMALL = ["--context", "300", "--max-new-tokens", "16"]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A random target with a byte-level tokenizer, as a folder."""
    return save_byte_target(tmp_path_factory.mktemp("target"), max_position_embeddings=MAX_POSITIONS)


@pytest.fixture
def run(target):
    """Run the demo on the random target; returns exit status, output and errors."""

    def call(*arguments):
        result = run_command("demo", "--target", target, *arguments, env={"COLUMNS": "120"})
        return result.exit_code, result.stdout, result.stderr

    return call


def rows(out):
    """Cells of every line of the table, by the name of the draft."""
    lines = [line.strip("│").split("│") for line in out.splitlines() if line.startswith("│")]
    return {cells[1].strip(): [cell.strip() for cell in cells[2:]] for cells in lines}


@pytest.mark.parametrize(
    ("dtype", "verdicts"), [("float32", {"identical"}), ("bfloat16", {"identical", "exact", "near-tie"})]
)
def test_the_text_the_table_and_the_verdict(run, dtype, verdicts, monkeypatch):
    clocks = []
    before(monkeypatch, demo, "run_call", lambda *_, now=None, **__: clocks.append(now))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    status, out, err = run(*SMALL, "--dtype", dtype)
    assert status == 0 and not err, out
    assert clocks == [None] * 4 + [time.thread_time] * 4  # after the warm-up
    table = rows(out)
    assert list(table) == ["generate", "no draft", "ngram", "specattn"]
    assert table["generate"][1] == "1.00" and table["generate"][-1] == "reference"
    assert all(cells[-1] in verdicts for name, cells in table.items() if name != "generate")
    assert "a module of the standard library" in out
    assert read_source("builtin")[0][200:300] in out.split("┏")[0]  # a token is a byte here
    best, _, words = " ".join(out.split("┘")[1].split()).partition("other programs. ")[2].partition(": ")
    assert table[best][1] == max(table["ngram"][1], table["specattn"][1], key=float)  # both may be equal when rounded
    assert words.endswith(f"x generate, text {table[best][-1]}.")


def test_a_published_draft_and_a_file_that_is_cut_at_the_positions(run, target, tmp_path):
    model = models.load_target(str(target), torch.float32, torch.device("cpu"))
    SpecAttnDraftModel.from_target(model, num_assistant_tokens=2).save_pretrained(tmp_path / "mine")
    file = tmp_path / "notes.txt"
    file.write_text("The lighthouse keeper wrote every evening into a book. " * 20, encoding="utf-8")
    status, out, _ = run("--max-new-tokens", 8, "--draft", tmp_path / "mine", "--file", file)
    assert status == 0 and list(rows(out)) == ["generate", "no draft", "mine"]
    assert f"Prompt: {MAX_POSITIONS - 8} tokens of " in " ".join(out.split())


@pytest.mark.parametrize(("dtype", "check"), [("float32", "differs"), ("bfloat16", "NOT lossless")])
def test_another_text_is_status_1(dtype, check, run, monkeypatch):

    def tamper(call, model, method, *_, **__):
        if isinstance(method, SpecAttnDraftModel):
            call.text[0, 4] = 3 + (call.text[0, 4] - 2) % 250

    after(monkeypatch, demo, "run_call", tamper)
    status, out, _ = run(*SMALL, "--dtype", dtype)
    assert status == 1 and "Wrong text: specattn." in out and "x generate," not in out
    assert [cells[-1] == check for cells in rows(out).values()] == [False, False, False, True]


def test_a_chat_model_answers_questions_about_a_document_that_drafts_read_once(target, tmp_path, monkeypatch):
    shutil.copytree(target, tmp_path / "chat")
    template = "{% for message in messages %}<{{ message['content'] }}>{% endfor %}"
    (tmp_path / "chat" / "chat_template.jinja").write_text(template, encoding="utf-8")
    held = []

    def watch(model, method, prompt, *, cache=None, tokens, **how):
        if tokens == 16:  # not a warm-up
            held.append((prompt[0].shape[1], None if cache is None else cache.get_seq_length()))

    before(monkeypatch, demo, "run_call", watch)
    result = run_command("demo", "--target", tmp_path / "chat", *SMALL, env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    assert all(question in result.stdout for question in demo.QUESTIONS)
    tables = result.stdout.split("┏")[1:]
    assert [[cells[-1] for cells in rows(table).values()] for table in tables] == [
        ["reference", *["identical"] * 3]
    ] * 2
    longest = max(length for length, _ in held)
    assert longest == 300  # --context
    (first, none), *later = held[:4]  # specattn, ngram, generate, no draft
    assert none == 0 and [count for _, count in later] == [first - 1, None, first - 1]
    (second, shared), *later = held[4:]
    assert 0 < shared < second - 1  # the document
    assert [count for _, count in later] == [second - 1, None, second - 1]


def test_the_models_of_a_checkout_in_their_order(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(demo, "HOME", tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CommandError, match="--target"):
        demo.default_target()
    shutil.copytree(HUB_CARDS / "tiny-target", tmp_path / "hub_cards" / "tiny-target")
    assert demo.default_target() == str(tmp_path / "hub_cards" / "tiny-target")
    assert "make smollm2" in capsys.readouterr().out
    shutil.copytree(HUB_CARDS / "tiny-target", tmp_path / "runs" / "smollm2")
    assert demo.default_target() == str(tmp_path / "runs" / "smollm2") and not capsys.readouterr().out
    monkeypatch.setattr(demo, "HOME", tmp_path / "site-packages")  # an installed package, in a checkout
    assert demo.default_target() == str(tmp_path / "runs" / "smollm2")


def test_trained_drafts_of_the_repository_are_compared_where_they_exist(monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "HOME", tmp_path)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(HUB_CARDS / "tiny-target", tmp_path / "runs" / "smollm2")
    assert demo.draft_names("runs/smollm2", None) == ["ngram", "specattn"]
    draft = shutil.copytree(HUB_CARDS / "tiny-longspec", tmp_path / "hub_cards" / "smollm2-135m-longspec")
    assert demo.draft_names("runs/smollm2", None) == ["ngram", "specattn", str(draft)]
    assert demo.draft_names("org/model", None) == ["ngram", "specattn"]
    assert demo.draft_names("runs/smollm2", "mine") == ["mine"]
