"""The demo from its arguments to its table, verdict and exit status, on a random model and a tokenizer of bytes."""

import re
from dataclasses import replace

import pytest
import torch

from hf_longspec import SpecAttnDraftModel
from hf_longspec.cli import CommandError, demo, models
from hf_longspec.cli.measuring import Measurement
from tests.cli.conftest import HUB_CARDS, run_command
from tests.tiny_tokenizers import save_byte_target
from tests.watching import after

MAX_POSITIONS = 512
SMALL = ["--context", "300", "--max-new-tokens", "16"]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A random target with a byte-level tokenizer, as a folder."""
    return save_byte_target(tmp_path_factory.mktemp("target"), max_position_embeddings=MAX_POSITIONS)


@pytest.fixture
def run(target):
    """Run the demo on the random target; returns exit status, output and errors."""

    def call(*arguments, target=target):
        result = run_command("demo", "--target", target, *arguments)
        return result.exit_code, result.stdout, result.stderr

    return call


def rows(out):
    """Cells of every line of the table, by the name in the first column."""
    lines = [line.strip("│").split("│") for line in out.splitlines() if line.startswith("│")]
    return {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in lines}


@pytest.mark.parametrize(
    ("dtype", "verdicts"), [("float32", {"identical"}), ("bfloat16", {"identical", "exact", "near-tie"})]
)
def test_the_text_the_table_and_the_verdict(run, dtype, verdicts):
    status, out, err = run(*SMALL, "--dtype", dtype)
    assert status == 0 and not err, out
    table = rows(out)
    assert list(table) == ["generate", "no draft", "ngram", "specattn"]
    assert table["generate"][0] == "1.00x" and table["generate"][2:] == ["", "reference"]
    for name in list(table)[1:]:
        speed, tokens, accepted, text = table[name]
        assert float(speed.rstrip("x")) > 0 and float(tokens) > 0 and text in verdicts
        assert accepted == "" if name == "no draft" else 0 <= int(accepted.rstrip("%")) <= 100
    name, text = demo.read_document()
    assert name in out and demo.CUT.match(text[:300])[0][-100:] in out.split("┏")[0]  # a token is a byte here
    words = " ".join(out.split("┘")[1].split())
    best = max(("ngram", "specattn"), key=lambda name: float(table[name][0].rstrip("x")))
    assert words.startswith(f"{best}: ") and "x generate, same text" in words


def test_a_terminal_shows_the_text_as_a_file_does(run, monkeypatch):
    """A bar comes before it, and while rich shows one, sys.stdout is another file."""
    document = demo.read_document()[1]

    def after_the_prompt():
        out = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", run(*SMALL)[1]).split("┏")[0]
        return out.split(demo.CUT.match(document[:300])[0][-50:])[-1].strip()

    text = after_the_prompt()
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert len(text) > 8 and text in after_the_prompt()


def test_a_published_draft_and_a_file_of_ones_own(run, target, tmp_path):
    model = models.load_target(str(target), torch.float32)
    SpecAttnDraftModel.from_target(model, num_assistant_tokens=2).save_pretrained(tmp_path / "mine")
    file = tmp_path / "notes.txt"
    file.write_text("The lighthouse keeper wrote every evening into a book. " * 4, encoding="utf-8")
    status, out, _ = run("--max-new-tokens", 8, "--draft", tmp_path / "mine", "--file", file)
    assert status == 0 and list(rows(out)) == ["generate", "no draft", "mine"]
    assert f"Prompt: {len(file.read_text())} tokens of notes.txt" in " ".join(out.split())


@pytest.mark.parametrize(
    ("most", "options", "length", "said"),
    [
        (1000, (), 400, "400 tokens of notes.txt take about 1 min 56 s or more."),
        (41, (), 100, "400 tokens of notes.txt take about 1 min 56 s or more."),
        (0, (), 64, "400 tokens of notes.txt take about 1 min 56 s or more."),
        (0, ("--context", "9999"), 496, "496 tokens of notes.txt take about 2 min 20 s or more."),
    ],
)
def test_a_long_text_says_how_long_it_takes_and_is_shortened(run, monkeypatch, tmp_path, most, options, length, said):
    """Each of four calls reads 16 tokens per second, which is 0.25 s for a token, and writes 16 tokens in 4 s."""
    (tmp_path / "notes.txt").write_text("x" * 1000)  # a token is a byte
    lengths, run_call = [], demo.run_call

    def timed(model, method, prompt, **how):
        lengths.append(prompt[0].shape[1])
        return replace(run_call(model, method, prompt, **how), ttft_seconds=4.0, decode_seconds=0.25, tokens=1)

    monkeypatch.setattr(demo, "run_call", timed)
    monkeypatch.setattr(demo, "PIECE", 64)
    monkeypatch.setattr(demo, "MOST_SECONDS", most)
    monkeypatch.setattr(demo.options, "DEMO_CONTEXT", 400)
    status, out, err = run("--max-new-tokens", 16, "--file", tmp_path / "notes.txt", *options)
    assert status == 0, err
    words = " ".join(out.split())
    assert said in words and ("shortened" in words) == (length in (64, 100)) and f"Prompt: {length} tokens" in words
    assert max(lengths) == length and lengths[1] == 64


@pytest.mark.parametrize(("dtype", "check"), [("float32", "differs"), ("bfloat16", "NOT lossless")])
def test_another_text_is_status_1(dtype, check, run, monkeypatch):

    def tamper(call, model, method, *_, **__):
        if isinstance(method, SpecAttnDraftModel):
            call.text[0, 4] = 3 + (call.text[0, 4] - 2) % 250

    after(monkeypatch, demo, "run_call", tamper)
    status, out, _ = run(*SMALL, "--dtype", dtype)
    assert status == 1 and "Wrong text: specattn." in out and "same text" not in out
    assert [cells[-1] == check for cells in rows(out).values()] == [False, False, False, True]


def call(speed, tau=1.0):
    text, drafted = torch.zeros(1, 101), 100 if tau > 1 else 0
    return Measurement(1.0, 100 / speed, 100, int(100 / tau), [], text, drafted=drafted)


@pytest.mark.parametrize(
    ("speeds", "texts", "said", "loses"),
    [
        ((50, 60, 120, 55), "identical", "ngram: 2.4x generate, same text.", "Slower than no draft here: specattn."),
        ((50, 100, 150, 120), "near-tie", "ngram: 3.0x generate, same text, near-ties aside.", None),
        ((50, 40, 30, 45), "identical", "specattn: 0.9x generate", "Slower than no draft here: ngram, specattn."),
    ],
)
def test_the_verdict_and_what_loses_follow_from_the_speeds(capsys, speeds, texts, said, loses):
    """Slower than `generate` or than the loop without a draft: a line with a link, and no more."""
    names = ("generate", "no draft", "ngram", "specattn")
    measured = {name: call(speed, tau) for name, speed, tau in zip(names, speeds, (1, 1, 2, 2), strict=True)}
    demo.show(demo.Console(), measured, dict.fromkeys(names, texts))
    out = capsys.readouterr().out
    assert said in out and (f"{loses} docs/results.md shows" in out if loses else "No gain" not in out)
    assert rows(out)["ngram"] == [f"{speeds[2] / speeds[0]:.2f}x", f"{speeds[2]:.1f}", "50%", texts]


def test_an_installed_package_finds_the_tiny_target_in_the_current_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(models, "HOME", tmp_path)
    monkeypatch.chdir(HUB_CARDS.parent)
    assert models.find_target(None) == str(HUB_CARDS / "tiny-target")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CommandError, match="--target"):
        models.find_target(None)
