"""Errors of users: one line with the problem and the remedy, status 2, no traceback, nothing written."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from hf_longspec import LongSpecDraftModel, __version__
from hf_longspec.cli import app, audit, generate, tune
from hf_longspec.testing import tiny_target

COMMANDS = ["generate", "audit", "tune"]
SMALL = {
    "generate": ["--max-new-tokens", 4],
    "audit": ["--max-new-tokens", 4],
    "tune": ["--context", 32, "--max-new-tokens", 4, "--repeats", 1, "--dry-run"],
}
both = pytest.mark.parametrize("name", COMMANDS)


@pytest.fixture
def fails(command, tiny):
    """Run a command that must fail; returns its one line."""

    def run(name, *arguments, target=tiny.target, text=tiny.notes, **options):
        text = [text] if text is not None else []
        result = command(name, *text, "--target", target, *SMALL[name], *arguments, **options)
        assert result.exit_code == 2, result.output
        assert result.stdout == "" and "Traceback" not in result.stderr
        (line,) = result.stderr.strip().splitlines()
        assert line.startswith("error: ")
        return line

    return run


@pytest.fixture
def copy_of(tiny, tmp_path):
    """A target or draft folder whose config.json has other values, without some of its files."""

    def copy(kind, without=(), **changes):
        folder = tmp_path / kind
        shutil.copytree(getattr(tiny, kind), folder, ignore=lambda *_: without)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))
        return folder

    return copy


def truncate(folder, share=0.5):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: int(weights.stat().st_size * share)])


@both
def test_a_missing_folder(fails, name):
    line = fails(name, target="./no/such/folder")
    assert line == "error: cannot load the tokenizer of './no/such/folder': there is no such folder. Check the path."
    line = fails(name, "--draft", "/no/such/draft")
    assert "cannot load the draft of '/no/such/draft': there is no such folder" in line


@pytest.mark.parametrize(("name", "share"), [("generate", 0.5), ("audit", 0.00001), ("tune", 0.5)])
def test_truncated_weights(fails, copy_of, name, share):
    target = copy_of("target")
    truncate(target, share)
    line = fails(name, target=target)
    assert "cannot load the model of" in line and line.endswith("Check its files.")


def test_truncated_weights_of_a_draft(fails, copy_of):
    draft = copy_of("longspec")
    truncate(draft)
    assert "cannot load the draft of" in fails("generate", "--draft", draft)


@both
def test_an_unknown_model_type(fails, copy_of, name):
    assert "lama" in fails(name, target=copy_of("target", model_type="lama"))


@pytest.mark.parametrize("other", ["gpt2", "gemma2", "t5", "bert"])
def test_another_model_type_does_not_run_on_random_weights(fails, copy_of, other):
    """Transformers would draw what the file does not have, and the text would be noise."""
    line = fails("generate", target=copy_of("target", model_type=other))
    assert "cannot load the model of" in line, line


def test_weights_that_are_missing_are_named(fails, copy_of):
    line = fails("generate", target=copy_of("target", model_type="gemma2"))
    assert "model_type='gemma2'" in line and "are missing in its files" in line


def test_a_draft_labelled_as_another_kind(fails, copy_of):
    line = fails("generate", "--draft", copy_of("longspec", model_type="tokenswift"))
    assert "cannot load the draft of" in line


def test_weights_without_a_use_are_noted(command, tiny, copy_of):
    """A tensor that the architecture has no place for: it runs, and says so."""
    target = copy_of("target")
    tensors = load_file(target / "model.safetensors")
    save_file(tensors | {"model.layers.0.self_attn.q_norm.weight": torch.ones(32)}, target / "model.safetensors",
              metadata={"format": "pt"})  # fmt: skip
    result = command("generate", tiny.notes, "--target", target, *SMALL["generate"])
    assert result.exit_code == 0
    assert "note: config.json says model_type='llama', which has no use for 1 weights" in result.stderr


def test_a_draft_of_another_target_and_no_draft_at_all(fails, tiny, tmp_path):
    LongSpecDraftModel.from_target(tiny_target("llama")).save_pretrained(tmp_path / "other")
    assert "was made for a target with" in fails("generate", "--draft", tmp_path / "other")
    assert "not a draft" in fails("generate", "--draft", tiny.target)


def test_files_that_are_not_there(fails, copy_of):
    assert "cannot load the model" in fails("generate", target=copy_of("target", without=["model.safetensors"]))


@both
def test_an_empty_prompt(fails, tmp_path, name):
    empty = tmp_path / "empty.txt"
    empty.write_text(" \n")
    assert fails(name, text=empty) == f"error: {empty} is empty: there is nothing to continue. Pass a text."
    assert "- is empty" in fails(name, text="-", input="")


@both
def test_prompts_that_cannot_be_read(fails, tmp_path, name):
    assert "cannot read" in fails(name, text=tmp_path / "missing.txt")
    assert "cannot read" in fails(name, text=tmp_path)
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00\x80")
    assert f"{binary} is not UTF-8 text. Convert it" in fails(name, text=binary)
    assert "pass one prompt" in fails(name, text=None)


def test_two_prompts(fails):
    assert "pass one prompt" in fails("generate", "--prompt", "text")


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("generate", ["--device", "warp9"], "--device warp9: PyTorch has no such device here"),
        ("tune", ["--set", "gamma=4"], "the draft specattn has no such setting; it has acceptance"),
        ("audit", ["--set", "num_assistant_tokens"], "expected key=value"),
        ("generate", ["--set", "num_assistant_tokens=0"], "num_assistant_tokens=0: expected an integer of at least 1"),
    ],
    ids=["device", "setting", "form", "value"],
)
def test_options_with_wrong_values(fails, name, arguments, says):
    assert says in fails(name, *arguments)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--top-p", 0.5], "are for sampling: pass a --temperature above 0"),
        (["--top-p", 1.5, "--temperature", 1], "--top-p 1.5: expected a number above 0"),
        (["--repetition-penalty", 0], "--repetition-penalty 0.0: expected more than 0"),
        (["--html", "no/such/folder/page.html"], "there is no folder no/such/folder. Make it first."),
        (["--html", "."], "--html .: cannot be written. Name another file."),
        (["--max-new-tokens", 20_000], "exceed the 16384 positions of the model"),
    ],
    ids=str,
)
def test_generate_refuses(fails, arguments, says):
    assert says in fails("generate", *arguments)


def test_audit_refuses(fails):
    assert "--temperature 0.0: the samples need more than 0" in fails("audit", "--temperature", 0)
    assert "--eps -1.0: expected a distance" in fails("audit", "--eps", -1)
    assert "2 samples are too few" in fails("audit", "--samples", 2)


@pytest.mark.parametrize("arguments", [[], ["--target"], ["--nonsense"], ["--max-new-tokens", "many"]], ids=str)
def test_usage_errors_have_status_2(command, arguments):
    assert command("generate", *arguments).exit_code == 2
    assert command("no-such-command").exit_code == 2


@both
def test_debug_shows_where_it_came_from(command, tiny, name):
    result = command(name, tiny.notes, "--target", "./no/such/folder", *SMALL[name], "--debug")
    assert result.exit_code == 1 and "there is no such folder" in str(result.exception)


@pytest.mark.parametrize(("name", "module"), [("generate", generate), ("audit", audit), ("tune", tune)], ids=COMMANDS)
def test_ctrl_c_and_full_memory(command, tiny, monkeypatch, name, module):
    def stop(error):
        def raise_error(*_, **__):
            raise error

        return raise_error

    arguments = [name, tiny.notes, "--target", tiny.target, *SMALL[name]]
    monkeypatch.setattr(module, "set_seed" if name != "audit" else "compare", stop(KeyboardInterrupt()))
    result = command(*arguments)
    assert result.exit_code == 130 and result.stderr == "\nInterrupted.\n"
    monkeypatch.setattr(module, "set_seed" if name != "audit" else "compare", stop(torch.OutOfMemoryError("CUDA")))
    result = command(*arguments)
    assert result.exit_code == 2 and result.stderr.startswith("error: out of memory: pass a shorter text")


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_a_missing_package_is_named_in_one_line(missing):
    hide = f"import runpy, sys; sys.modules[{missing!r}] = None; runpy.run_module('hf_longspec.cli.app')"
    result = subprocess.run([sys.executable, "-c", hide, "--help"], capture_output=True, text=True, check=False)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.strip() == (
        f"error: hf-longspec needs {missing}, which is not installed: pip install typer rich"
    )


def test_the_target_is_not_changed_by_a_loading_check(tiny):
    """The assumption of the loading check: a correct folder has nothing missing, mismatched or unexpected."""
    _, info = AutoModelForCausalLM.from_pretrained(tiny.target, output_loading_info=True)
    assert not any(info[f"{kind}_keys"] for kind in ("missing", "mismatched", "unexpected"))
    assert AutoConfig.from_pretrained(tiny.target).model_type == "llama"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["generate", "--no-such-option"], "No such option: --no-such-option. `hf-longspec generate --help` shows"),
        (["nothing"], "No such command 'nothing'. `hf-longspec --help` shows"),
        (["audit", "--max-new-tokens", "many"], "Invalid value for '--max-new-tokens': "),
        (["audit", "--batch", "0"], "Invalid value for '--batch': "),
        (["audit", "--dtype", "int3"], "'int3' is not one of 'auto', 'float32', 'bfloat16', 'float16'."),
        (["genrate"], "No such command 'genrate'. Did you mean 'generate'? `hf-longspec --help` shows"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_wrong_options_take_one_line(monkeypatch, capsys, arguments, complaint):
    monkeypatch.setattr(sys, "argv", ["hf-longspec", *arguments])
    with pytest.raises(SystemExit) as exit_of:
        app.main()
    output = capsys.readouterr()
    assert exit_of.value.code == 2 and output.out == ""
    (line,) = output.err.strip().splitlines()
    assert line.startswith("error: ") and complaint in line


def test_the_version(command):
    result = command("--version")
    assert result.exit_code == 0 and result.stdout == f"hf-longspec {__version__}\n"


def test_without_a_command_there_is_help(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["hf-longspec"])
    with pytest.raises(SystemExit):
        app.main()
    assert "Lossless speculative decoding" in capsys.readouterr().out


def test_a_traceback_is_no_verdict(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["hf-longspec", "audit", "--target", str(tmp_path / "missing"), "--debug"])
    with pytest.raises(SystemExit) as exit_of:
        app.main()
    assert exit_of.value.code == 2 and "Traceback" in capsys.readouterr().err
