"""The demo from its arguments to its table and exit status, on a random model and a tokenizer of bytes."""

from pathlib import Path

import huggingface_hub.constants as hub_constants
import pytest
import torch
from transformers.utils import logging

from hf_longspec import SpecAttnDraftModel
from hf_longspec.bench import calls, prompts
from hf_longspec.bench.calls import PLAIN, Call
from hf_longspec.cli import CommandError, demo, session
from hf_longspec.testing import tiny_target
from tests.cli.conftest import HUB_CARDS, run_command
from tests.tiny_tokenizers import save_byte_target

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
    """Cells of every line of the tables, by the name in the first column; one entry per table."""
    found = {}
    for line in out.splitlines():
        cells = [cell.strip() for cell in line.strip("│").split("│")]
        if line.startswith("│") and len(cells) == 6:
            found.setdefault(cells[0], []).append(cells[1:])
    return found


def test_texts_and_tables(run):
    status, out, err = run(*SMALL)
    assert status == 0, out
    assert not err
    table = rows(out)
    assert list(table) == ["HF generate", "plain loop", "Ngram", "SpecAttn"]
    assert [table[name][0][-1] for name in table] == ["reference", "yes", "yes", "yes"]
    assert {table[name][1][-1] for name in table} <= {"exact", "near-tie"}
    assert (
        out.index("float32, after") < out.index("identical text") < out.index("bfloat16, after") < out.index("verdict")
    )
    for name, groups in table.items():
        for speed, ratio, tau, first, _ in groups:
            assert float(speed) > 0
            assert float(ratio.rstrip("x")) > 0
            assert tau == "-" if name == "HF generate" else float(tau) >= 1
            assert float(first.rstrip(" s")) >= 0  # a fast machine rounds to 0.00 s
    assert table["plain loop"][0][2] == "1.00"
    name, text = demo.read_document(None)
    tail = demo.end_inside_a_line(text[:300])[-100:]  # a token is a byte here
    assert name in out and tail in out.split("SpecAttn: 16 tokens")[0]
    assert "float32: the plain loop ran at" in out.replace("\n", " ")


def test_quick_fits_a_small_model(run, monkeypatch):
    """Neither the default nor the quick context exceeds the positions of the model."""
    lengths = []
    original = demo.make_prompt

    def spy(*args, max_tokens):
        lengths.append(max_tokens)
        return original(*args, max_tokens=max_tokens)

    monkeypatch.setattr(demo, "make_prompt", spy)
    assert run("--quick", "--dtypes", "float32", "--draft", "ngram")[0] == 0
    assert lengths == [MAX_POSITIONS - demo.QUICK_NEW_TOKENS]


def test_a_published_draft_and_a_file_of_ones_own(run, target, tmp_path):
    model = session.load_target(str(target), torch.float32)
    SpecAttnDraftModel.from_target(model, num_assistant_tokens=2).save_pretrained(tmp_path)
    file = tmp_path / "notes.txt"
    file.write_text("The lighthouse keeper wrote every evening into a book. " * 4, encoding="utf-8")
    status, out, _ = run("--max-new-tokens", 8, "--draft", tmp_path, "--file", file, "--dtypes", "float32")
    assert status == 0
    assert float(rows(out)["SpecAttn"][0][2]) <= 3
    assert f"first {len(file.read_text())} tokens of notes.txt" in out.replace("\n", " ")


@pytest.mark.parametrize(
    ("native", "options", "contexts"),
    [(False, (), [64, 24]), (None, (), [64, 64]), (False, ("--context", "64"), [64, 64])],
)
def test_emulated_bfloat16_gets_a_shorter_prompt(run, monkeypatch, native, options, contexts):
    """Unless a length was asked for; every method of a group gets the same prompt."""
    monkeypatch.setattr(demo, "native_bfloat16", lambda device: native)
    monkeypatch.setattr(demo, "EMULATED_CONTEXT", 24)
    monkeypatch.setattr(demo, "CONTEXT", 64)
    monkeypatch.setattr(demo, "WARM_UP_PROMPT", 1)
    seen, run_call = [], demo.run_call

    def noting(model, method, prompt, **how):
        if prompt[0].shape[1] > 1:
            seen.append((str(model.dtype), prompt[0].shape[1]))
        return run_call(model, method, prompt, **how)

    monkeypatch.setattr(demo, "run_call", noting)
    status, out, _ = run("--max-new-tokens", 4, "--draft", "ngram", *options)
    assert status == 0
    assert list(dict.fromkeys(seen)) == [("torch.float32", contexts[0]), ("torch.bfloat16", contexts[1])]
    assert ("cut to 24 tokens" in out.replace("\n", " ")) == (contexts[1] == 24)
    assert f"bfloat16, after {contexts[1]} tokens" in out


@pytest.mark.parametrize(("dtype", "status", "check"), [("float32", 1, "no"), ("bfloat16", 0, "NOT lossless")])
def test_another_text_is_named_and_in_float32_status_1(dtype, status, check, run, monkeypatch):
    """And the report says where it parts, and that this is no near-tie."""
    monkeypatch.setattr(demo, "run_call", tampering(demo.run_call, getattr(torch, dtype)))
    found, out, _ = run(*SMALL, "--dtypes", dtype)
    assert found == status
    assert [cells[0][-1] == check for cells in rows(out).values()] == [False, False, False, True]
    assert f"SpecAttn in {dtype}: NOT lossless: " in out.replace("\n", " ")
    assert ("it must not" in out) == (dtype == "float32")


def tampering(run_call, dtype):
    """`run_call`, but the draft's text has one token that the model would not write."""

    def tampered(model, method, *args, **how):
        call = run_call(model, method, *args, **how)
        if isinstance(method, SpecAttnDraftModel) and model.dtype == dtype:
            call.text[0, 4] = 3 + (call.text[0, 4] - 2) % 250
        return call

    return tampered


def test_a_target_from_the_hub_cache(run, target, tmp_path, monkeypatch):
    """Without a network, a repository is found by its name in the cache."""
    repo = tmp_path / "models--someone--tiny"
    snapshot = repo / "snapshots" / ("0" * 40)
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(target, target_is_directory=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(hub_constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", True)
    status, out, err = run(*SMALL, "--dtypes", "float32", target="someone/tiny")
    assert status == 0, err
    assert "Loading someone/tiny" in out and "bfloat16" not in out
    assert rows(out)["SpecAttn"][0][-1] == "yes"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--target", "/no/such/folder"], "cannot load the tokenizer of '/no/such/folder'"),
        (["--file", "/no/such.txt"], "cannot read /no/such.txt: No such file"),
        (["--file", "{short}"], "pass a longer --file"),
        (["--context", "500"], f"use at most --context {MAX_POSITIONS - 16}"),
        (["--max-new-tokens", "512"], "512 positions"),
        (["--draft", "{other}"], "vocab_size=128"),
    ],
)
def test_one_line_with_a_remedy_and_status_2(arguments, line, run, folders):
    status, _, err = run(*SMALL, *(part.format(**folders) for part in arguments))
    assert status == 2
    assert line in err
    assert err.startswith("error: ") and err.count("\n") == 1


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Inputs that are refused."""
    other, short = tmp_path_factory.mktemp("other"), tmp_path_factory.mktemp("files") / "x.txt"
    SpecAttnDraftModel.from_target(tiny_target("llama")).save_pretrained(other)
    short.write_text("short")
    return {"other": other, "short": short}


def test_without_the_tiny_target_there_must_be_another(monkeypatch):
    monkeypatch.setattr(session, "TINY_TARGET", Path("/no/such/folder"))
    result = run_command("demo")
    assert result.exit_code == 2 and "pass --target" in result.stderr


def test_control_c_between_tokens_ends_the_demo(run, monkeypatch):
    """With a draft, `generate` returns what it has; the demo must not go on with that."""

    class Interrupted(calls.TokenClock):
        def put(self, value):
            super().put(value)
            if self.total == 3:
                raise KeyboardInterrupt

    monkeypatch.setattr(calls, "TokenClock", Interrupted)
    status, out, err = run(*SMALL)
    assert status == 130
    assert err.strip().endswith("Interrupted.") and "identical text" not in out


def test_settings_of_transformers_are_restored(run):
    logging.set_verbosity_info()
    try:
        run("--file", "/no/such.txt")
        assert logging.get_verbosity() == logging.INFO
        assert logging.is_progress_bar_enabled()
    finally:
        logging.set_verbosity_warning()


def test_a_prompt_ends_after_a_word():
    text = "# a heading\n\nThe keeper wrote every evening into a book.\nx = 1\n\ny ="
    assert demo.end_inside_a_line(text) == "# a heading\n\nThe keeper wrote"
    assert demo.end_inside_a_line("x = 1\ny = 2\n") == "x = 1\ny = 2\n"


def test_modules_without_sources_are_skipped(monkeypatch):
    monkeypatch.setattr(prompts, "HELD_OUT", ("sys", "no_such_module", "tarfile"))
    assert demo.read_document(None)[0] == "tarfile.py of the standard library"
    monkeypatch.setattr(prompts, "HELD_OUT", ("sys",))
    with pytest.raises(CommandError, match="--file"):
        demo.read_document(None)


def group(speeds, dtype="float32", name="SpecAttn", tokens=tuple(range(101)), context=8000):
    """100 tokens after the first; the draft has 50 accepted of 100."""
    decoded, text = len(tokens) - 1, torch.tensor([tokens])
    timed = [Call(1.0, decoded / speed, decoded, decoded, [], [], text) for speed in speeds]
    timed[2] = Call(1.0, decoded / speeds[2], decoded, decoded // 2, [], [], text, drafted=decoded)
    return demo.Group(dtype, dict(zip((demo.HF, PLAIN, name), timed, strict=True)), context)


FASTER, SLOWER = (50, 100, 150), (50, 100, 40)


@pytest.mark.parametrize(
    ("groups", "native", "last", "said"),
    [
        (
            [group(SLOWER)],
            True,
            "In float32 SpecAttn is slower than decoding without a draft here: it rereads all weights",
            "2.00x the speed of HF generate, SpecAttn at 0.40x that of the plain loop (50% of its drafts accepted)",
        ),
        ([group((50, 100, 102))], True, "In float32 SpecAttn is no faster than", "at 1.02x"),
        ([group(FASTER)], True, "float32: the plain loop ran at", "SpecAttn at 1.50x"),
        ([group(FASTER), group(SLOWER, dtype="bfloat16")], None, "In bfloat16 SpecAttn is slower than", "at 0.40x"),
        ([group(SLOWER, name="LongSpec")], True, "In float32 LongSpec is slower", "drafting cost as much as it saved"),
        (
            [group((100, 100, 150)), group((25, 100, 150), dtype="bfloat16")],
            False,
            "This machine has no bfloat16 instructions",
            "decoded at 0.25x its float32 speed",
        ),
        ([group(FASTER, dtype="bfloat16")], False, "This machine has no bfloat16", "for those of other machines"),
        (
            [group((100, 100, 40)), group((25, 100, 40), dtype="bfloat16", context=2048)],
            False,
            "This machine has no bfloat16 instructions, so PyTorch emulates them: do not compare the speeds",
            "with this model at 8000 and 2048 tokens",
        ),
        ([group(FASTER, tokens=(1, 2, 3) * 30)], True, "97% of the 4-token sequences", "it repeats itself"),
    ],
)
def test_the_sentences_follow_from_the_numbers(groups, native, last, said):
    found = demo.remarks(groups, native)
    assert found[-1].startswith(last)
    assert said in " ".join(found)
    assert ("weights" in " ".join(found)) == any("SpecAttn is" in line for line in found)


def test_too_short_to_be_timed():
    assert demo.remarks([group(FASTER, tokens=(1,))], True) == []


def test_an_installed_package_finds_the_tiny_target_in_the_current_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(session, "HOME", tmp_path)
    monkeypatch.chdir(HUB_CARDS.parent)
    assert session.find_target(None) == str(HUB_CARDS / "tiny-target")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CommandError, match="run this in a checkout"):
        session.find_target(None)
