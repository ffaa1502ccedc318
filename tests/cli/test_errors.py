"""Errors of users: one line with the problem and the remedy, status 2, no traceback, nothing written."""

import json
import runpy
import shutil
import sys

import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5EncoderModel

import hf_longspec.cli
from hf_longspec import LongSpecDraftModel, __version__
from hf_longspec.cli import app, audit, generate, session, tune
from hf_longspec.testing import tiny_target
from tests.tiny_tokenizers import character_tokenizer

MODULES = {"generate": generate, "audit": audit, "tune": tune}
SMALL = {
    "generate": ["--max-new-tokens", 4],
    "audit": ["--max-new-tokens", 4],
    "tune": ["--context", 32, "--max-new-tokens", 4, "--repeats", 1, "--dry-run"],
}


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
    """A target or draft folder whose config.json has other values, with a share of its weights."""

    def copy(kind, share=1.0, **changes):
        folder = shutil.copytree(getattr(tiny, kind), tmp_path / kind)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))
        weights = folder / "model.safetensors"
        if share:
            weights.write_bytes(weights.read_bytes()[: int(weights.stat().st_size * share)])
        else:
            weights.unlink()
        return folder

    return copy


def refuse(*_, **__):
    pytest.fail("too late")


@pytest.mark.parametrize("name", MODULES)
def test_a_missing_folder(command, fails, tiny, monkeypatch, name):
    line = fails(name, target="./no/such/folder")
    assert line == "error: cannot load the tokenizer of './no/such/folder': there is no such folder. Check the path."
    traced = command(name, tiny.notes, "--target", "./no/such/folder", *SMALL[name], "--debug")
    assert traced.exit_code == 1 and "there is no such folder" in str(traced.exception)
    monkeypatch.setattr(session, "load_tokenizer", refuse)  # before the target is loaded
    line = fails(name, "--draft", "/no/such/draft")
    assert "cannot load the draft of '/no/such/draft': there is no such folder" in line


class TestMistypedNames:
    """One line at once, before anything is loaded: neither request of the Hub is repeated."""

    @pytest.fixture(autouse=True)
    def hub(self, monkeypatch):
        """The requests for metadata; each raises `hub.error`."""

        def request(url):
            self.requests.append(url)
            raise self.error

        self.requests, self.error = [], session.NetworkError("no route")
        monkeypatch.setattr(session.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(session, "get_hf_file_metadata", request)
        monkeypatch.setattr(session.AutoModelForCausalLM, "from_pretrained", refuse)

    def test_a_draft_without_an_owner(self, fails):
        line = fails("generate", "--draft", "ngrm")
        assert "a Hub id has the form owner/name, and drafts that need no training are" in line
        assert line.endswith("Did you mean 'ngram'?") and not self.requests

    def test_a_draft_or_target_that_the_hub_does_not_have(self, fails):
        assert "draft of 'org/foo': the Hub was not reached (no route)." in fails("audit", "--draft", "org/foo")
        assert "tokenizer of 'gtp2': the Hub was not reached (no route)." in fails("generate", target="gtp2")
        assert [url.split("/resolve/")[0][-7:] for url in self.requests] == ["org/foo", "co/gtp2"]

    def test_a_repository_without_a_configuration_may_hold_an_adapter(self):
        self.error = EntryNotFoundError("404")
        with session.loading("org/adapter", "model", from_hub=True):
            pass
        assert len(self.requests) == 1


@pytest.mark.parametrize(
    ("name", "kind", "share"),
    [("audit", "target", 0.5), ("tune", "longspec", 0.5), ("generate", "target", 0)],
)
def test_truncated_weights(fails, copy_of, name, kind, share):
    folder = copy_of(kind, share)
    line = fails(name, target=folder) if kind == "target" else fails(name, "--draft", folder)
    assert f"cannot load the {'model' if kind == 'target' else 'draft'} of" in line and line.endswith(
        "Check its files."
    )


@pytest.mark.parametrize(
    ("name", "other", "complaint"),
    [
        ("generate", "lama", "`lama`"),
        ("audit", "gpt2", "cannot load the model of"),
        ("tune", "gemma2", "model_type='gemma2', and of the weights of a Gemma2ForCausalLM"),
        ("generate", "t5", "cannot load the model of"),
    ],
)
def test_another_model_type_does_not_run_on_random_weights(fails, copy_of, name, other, complaint):
    """Transformers would draw what the file does not have, and the text would be noise."""
    assert complaint in fails(name, target=copy_of("target", model_type=other))


def test_drafts_that_do_not_fit(fails, copy_of, tiny, tmp_path):
    assert "cannot load the draft of" in fails("generate", "--draft", copy_of("longspec", model_type="tokenswift"))
    LongSpecDraftModel.from_target(tiny_target("llama")).save_pretrained(tmp_path / "other")
    assert "was made for a target with" in fails("generate", "--draft", tmp_path / "other")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    T5EncoderModel(T5Config(vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_layers=1)).save_pretrained(tmp_path / "t5")
    assert "not a draft" in fails("generate", "--draft", tmp_path / "t5")
    character_tokenizer("abcdefghi").save_pretrained(tmp_path / "other words")
    LlamaForCausalLM(LlamaConfig(vocab_size=12, **sizes)).save_pretrained(tmp_path / "other words")
    assert "the tokenizers of" in fails("generate", "--draft", tmp_path / "other words")


def test_weights_without_a_use_are_noted(command, tiny, copy_of):
    """A tensor that the architecture has no place for: it runs, with a note."""
    target = copy_of("target")
    tensors = load_file(target / "model.safetensors")
    extra = {"model.layers.0.self_attn.q_norm.weight": torch.ones(32)}
    save_file(tensors | extra, target / "model.safetensors", metadata={"format": "pt"})
    result = command("generate", tiny.notes, "--target", target, *SMALL["generate"])
    assert result.exit_code == 0
    assert "note: config.json says model_type='llama', which has no use for 1 weights" in result.stderr


def test_prompts_that_cannot_be_read(fails, tmp_path):
    empty, binary = tmp_path / "empty.txt", tmp_path / "binary"
    empty.write_text(" \n")
    binary.write_bytes(b"\xff\xfe\x00\x80")
    assert fails("generate", text=empty) == f"error: {empty} is empty: there is nothing to continue. Pass a text."
    assert "- is empty" in fails("audit", text="-", input="")
    assert "cannot read" in fails("tune", text=tmp_path / "missing.txt")
    assert "cannot read" in fails("generate", text=tmp_path)
    assert f"{binary} is not UTF-8 text. Convert it" in fails("generate", text=binary)
    for name in MODULES:
        assert "pass one prompt" in fails(name, text=None)


@pytest.mark.parametrize(
    ("name", "arguments", "complaint"),
    [
        ("generate", ["--prompt", "text"], "pass one prompt"),
        ("generate", ["--device", "warp9"], "--device warp9: PyTorch has no such device here"),
        ("tune", ["--set", "gamma=4"], "the draft specattn has no such setting; it has acceptance"),
        ("audit", ["--set", "seed"], "--set 'seed': expected key=value, such as num_assistant_tokens=6."),
        ("generate", ["--set", "num_assistant_tokens=0"], "num_assistant_tokens=0: expected an integer of at least 1"),
        ("generate", ["--top-p", 0.5], "are for sampling: pass a --temperature above 0"),
        ("generate", ["--top-p", 1.5, "--temperature", 1], "--top-p 1.5: expected a number above 0"),
        ("generate", ["--repetition-penalty", 0], "--repetition-penalty 0.0: expected more than 0"),
        ("generate", ["--max-new-tokens", 20_000], "exceed the 16384 positions of the model"),
        ("audit", ["--temperature", 0], "--temperature 0.0: the samples need more than 0"),
        ("audit", ["--eps", -1], "--eps -1.0: expected a distance"),
        ("audit", ["--samples", 2], "2 samples are too few"),
    ],
    ids=str,
)
def test_options_with_wrong_values(fails, name, arguments, complaint):
    assert complaint in fails(name, *arguments)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["generate", "--html", "no/such/page.html"], "--html no/such/page.html: there is no folder no/such. Make it"),
        (["generate", "--html", "."], "--html .: cannot be written. Name another file."),
        (["tune", "--output", "notes.txt/out"], "notes.txt is a file. Pass another folder."),
        (["tune", "--output", "locked/out"], "locked cannot be written to. Pass another folder."),
        (["tune", "--output", "full"], "full is not empty: pass a new folder as --output."),
    ],
    ids=str,
)
def test_outputs_are_checked_before_anything_is_loaded(command, tiny, tmp_path, monkeypatch, arguments, complaint):
    monkeypatch.chdir(tmp_path)
    for name in ("locked", "full/of"):
        (tmp_path / name).mkdir(parents=True)
    shutil.copy(tiny.notes, "notes.txt")
    access = hf_longspec.cli.options.os.access  # the root user may write everywhere
    monkeypatch.setattr(
        hf_longspec.cli.options.os, "access", lambda path, *how: "locked" not in str(path) and access(path, *how)
    )
    monkeypatch.setattr(MODULES[arguments[0]], "opened", refuse)
    result = command(*arguments, "notes.txt", "--target", tiny.target)
    assert result.exit_code == 2 and complaint in result.stderr and len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "error", "status", "output"),
    [
        ("generate", torch.OutOfMemoryError("CUDA"), 2, "error: out of memory: pass a shorter text"),
        ("audit", KeyboardInterrupt(), 130, "\nInterrupted.\n"),
        (
            "tune",
            ValueError("no backend supports this:\n  a: no GPU\n  b: no package\nTake another.\nDetails."),
            2,
            "error: no backend supports this: a: no GPU; b: no package; Take another. (--debug shows the rest)",
        ),
    ],
    ids=["memory", "Ctrl-C", "several lines"],
)
def test_what_ends_a_command_while_it_works(command, tiny, monkeypatch, name, error, status, output):
    def stop(*_, **__):
        raise error

    monkeypatch.setattr(MODULES[name], "set_seed" if name != "audit" else "compare", stop)
    result = command(name, tiny.notes, "--target", tiny.target, *SMALL[name])
    assert result.exit_code == status and result.stderr.startswith(output), result.stderr


@pytest.mark.parametrize("missing", ["typer", "rich.console"])
def test_a_missing_package_is_named_in_one_line(monkeypatch, capsys, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, "hf_longspec.cli.audit")  # imported anew, with what is missing
    monkeypatch.delattr(hf_longspec.cli, "audit")
    monkeypatch.delitem(sys.modules, "hf_longspec.cli.app")
    with pytest.raises(SystemExit) as exit_of:
        runpy.run_module("hf_longspec.cli.app")
    package = missing.partition(".")[0]
    expected = f"error: hf-longspec needs {package}, which is not installed: pip install typer rich\n"
    assert (exit_of.value.code, *capsys.readouterr()) == (2, "", expected)


@pytest.fixture
def main(monkeypatch, capsys):
    """`main(*arguments)`: exit status, standard output and standard error of the program."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["hf-longspec", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_of:
            app.main()
        return exit_of.value.code, *capsys.readouterr()

    return run


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["generate"], "Missing option '--target'. `hf-longspec generate --help` shows what there is."),
        (["generate", "--no-such-option"], "No such option: --no-such-option. `hf-longspec generate --help` shows"),
        (["nothing"], "No such command 'nothing'. `hf-longspec --help` shows"),
        (["genrate"], "No such command 'genrate'. Did you mean 'generate'? `hf-longspec --help` shows"),
        (["audit", "--max-new-tokens", "many"], "'--max-new-tokens': many is not an integer of at least 1. Pass 1 or"),
        (
            ["audit", "--batch", "0"],
            "Invalid value for '--batch': 0 is not an integer of at least 1. Pass 1 or more. `",
        ),
        (["generate", "--top-k", "-1"], "Invalid value for '--top-k': -1 is not an integer of at least 0. Pass 0 or"),
        (["demo", "--context", "0"], "'--context': 0 is not an integer of at least 1. Pass 1 or more."),
        (["bench", "--temperature", "nan"], "'--temperature': nan is not a number of at least 0. Pass 0 or more."),
        (["tune", "--dtype", "int3"], "'int3' is not one of 'auto', 'float32', 'bfloat16', 'float16'."),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_wrong_options_take_one_line(main, arguments, complaint):
    status, output, errors = main(*arguments)
    (line,) = errors.strip().splitlines()
    assert status == 2 and output == "" and line.startswith("error: ") and complaint in line


def test_version_help_and_tracebacks(main, tmp_path):
    assert main("--version") == (0, f"hf-longspec {__version__}\n", "")
    assert "Lossless speculative decoding" in main()[1]
    status, _, errors = main("audit", "--target", tmp_path / "missing", "--debug")
    assert status == 2 and "Traceback" in errors  # 1 is a verdict
