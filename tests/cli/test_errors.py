"""Errors of users: one line with the problem and the remedy, status 2, no weights loaded, nothing written."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import typer
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError
from transformers import PreTrainedModel

from hf_longspec import LongSpecDraftModel, __version__
from hf_longspec.cli import app, generate, options
from hf_longspec.modeling.register_draft import weightless_drafts
from tests.tiny_targets import tiny_target


@pytest.fixture
def copy_of(tiny, tmp_path):
    """A target or draft folder whose config.json has other values, with a share of its weights."""

    def copy(kind, share=1.0, **changes):
        copy.last = folder = shutil.copytree(getattr(tiny, kind), tmp_path / str(len([*tmp_path.iterdir()])))
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[: int(weights.stat().st_size * share)])
        return folder

    return copy


def refuse(*_, **__):
    pytest.fail("too late")


@pytest.fixture
def no_weights(monkeypatch):
    """Loading weights fails the test."""
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", classmethod(refuse))


@pytest.fixture
def hub(monkeypatch):
    """The only requests for metadata, each of which raises `hub.error`."""

    class Hub:
        error: Exception = HfHubHTTPError.__bases__[0]("no route")
        requests: tuple = ()

        def request(self, url, **_):
            self.requests += (url.split("/resolve/")[0],)
            raise self.error

    hub = Hub()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", hub.request)
    return hub


# A command, and what its line of error names. TARGET is the option with the tiny target.
ERRORS = [
    # of Typer
    ("generate", "Missing option '--target'. Run `hf-longspec generate --help`"),
    ("audit --batch 0", "Invalid value for '--batch': "),
    ("generate TARGET --prompt x --top-p 0", "'--top-p': 0.0 is not above 0."),
    ("generate TARGET --data data.jsonl --output o.jsonl --shard 2/2", "2/2: expected i/n with i from 0 to n - 1"),
    # files to read and to write
    ("generate TARGET", "pass one prompt: a FILE, - for standard input, or --prompt TEXT."),
    ("generate TARGET empty", "empty is empty. Pass a text."),
    ("audit TARGET binary", "binary is not UTF-8 text. Convert it"),
    ("bench TARGET --output folder.jsonl", "folder.jsonl is a folder. Name a file."),
    ("bench TARGET --output notes.txt/page.jsonl", "notes.txt is a file."),
    ("bench TARGET --output locked/page.jsonl", "locked cannot be written to: Permission denied."),
    ("generate TARGET --data missing.jsonl --output o.jsonl", "the data 'missing.jsonl': there is no such file. Check"),
    ("generate TARGET --data empty --output out.jsonl", "--data empty has no rows. Pass a source with texts."),
    ("generate TARGET --data binary --output out.jsonl", "--data binary is not UTF-8 text."),
    ("generate TARGET --data data.jsonl --output out.jsonl --column words", "the keys are prompt"),
    # files that exist or are read
    ("generate TARGET --data data.jsonl --output link.jsonl --overwrite", "link.jsonl is an output, and data.js"),
    ("generate TARGET --data data.jsonl --output one.jsonl", "already there: one.jsonl. Pass --resume"),
    ("generate TARGET --data data.jsonl --output one.jsonl --resume", "one.jsonl, line 1: not a row of this command."),
    ("generate TARGET --data data.jsonl --output new.jsonl --resume --overwrite", "Pass one of them."),
    ("bench TARGET --output one.jsonl", "already there: one.jsonl. Pass --overwrite"),
    ("bench TARGET --data lines.jsonl --column name --output lines.jsonl --overwrite", "lines.jsonl is an output, and"),
    ("train TARGET --config recipe.yaml --output-dir run", "already there: run/checkpoint-2, run/model"),
    ("train TARGET --config recipe.yaml --output-dir run --draft run/checkpoint-2 --overwrite", "run/checkpoint-2 is"),
    ("convert TARGET notes.txt --output full", "already there: full/.hidden, full/of. "),
    ("convert full/of --output full --overwrite", "full/of is read, and lies in the output folder full."),
    ("publish run --dry-run --base-model org/t --output run", "run/card.json, run/checkpoint-2, run/model"),
    # options that need or exclude others
    ("generate TARGET notes.txt --top-p 0.5", "--top-p, --top-k and --samples need sampling. Pass a --temperature"),
    ("generate TARGET notes.txt --samples 3 --temperature 1 --show-drafts", "--samples cannot be combined"),
    ("generate TARGET --data data.jsonl", "--data needs --output"),
    ("generate TARGET --data data.jsonl --output out.jsonl --prompt x", "cannot be combined"),
    ("generate TARGET --output out.jsonl --prompt x", "are for --data"),
    ("audit TARGET notes.txt --samples 49 --max-new-tokens 4", "--samples 49"),
    ("demo TARGET --draft auto", "--draft auto chooses a draft"),
    ("serve TARGET --port PORT --rows 2 --max-length 20000", "the model has 16384 positions. Pass at most 16384."),
    ("serve TARGET --host host.invalid", "cannot listen on host.invalid:8000: "),
    # names of models and drafts
    ("generate notes.txt --target notes.txt", "the configuration of 'notes.txt': It looks like the config file at"),
    ("audit notes.txt --target full", "the configuration of 'full': "),
    ("generate TARGET notes.txt --draft full/draft", "'full/draft': the folder full has no draft, and the Hub was not"),
    ("demo TARGET --draft ngrm", "Did you mean 'ngram'?"),
    ("generate TARGET notes.txt --draft a/b.safetensors", "the draft 'a/b.safetensors': there is no such file."),
    ("convert full --output out", "the target of 'full' is unknown"),
    ("convert full --output out --target no/model", "'no/model': no such folder, and the Hub was not reached"),
    ("train TARGET --config recipe.yaml --set dataset.path=data/rows --output-dir out", "the dataset 'data/rows': no"),
    # drafts that do not fit
    ("generate TARGET notes.txt --draft other", "was made for a target with"),
    ("serve TARGET --port PORT --draft other", "was made for a target with"),
    ("train TARGET --config recipe.yaml --draft other --output-dir out", "was made for a target with"),
    ("generate TARGET notes.txt --draft eagle", "the draft has vocab_size=12, but the target has 258"),
    ("generate TARGET notes.txt --draft t5", "t5 has model_type='t5' and is not a draft"),
    # settings and lengths
    ("generate TARGET notes.txt --set seed", "--set 'seed': expected key=value"),
    ("generate TARGET notes.txt --set num_assistant_token=6", "ngram: did you mean num_assistant_tokens?"),
    ("generate TARGET notes.txt --set num_assistant_tokens=0", "num_assistant_tokens=0: expected an integer of at"),
    ("generate TARGET notes.txt --draft DRAFT --set window=x", "unknown key 'window' in --set for the draft"),
    ("demo TARGET --max-new-tokens 16384", "16384 positions"),
    ("generate TARGET notes.txt --chat", "has no chat template"),
    ("generate TARGET notes.txt --device warp9", "--device warp9 is not available. Pass cpu"),
    ("generate TARGET notes.txt --regex (", "regex='(' cannot be followed: "),
    ("generate TARGET notes.txt --json-schema schema.json", "cannot be followed: Invalid type: strin"),
    ("generate TARGET notes.txt --json-schema notes.txt", "notes.txt is not JSON"),
    ("generate TARGET notes.txt --json-schema schema.json --regex a", "expected exactly one of json_schema, regex"),
    # publishing
    ("publish DRAFT", "no repository to upload to. Pass --repo, or --dry-run."),
    ("publish DRAFT --repo a/b --output out", "--output out needs --dry-run"),
    # bench
    ("bench TARGET --output bench.txt", "bench.txt does not end with .jsonl"),
    ("bench TARGET --data notes.txt --context 0", "--context '0'"),
    ("bench TARGET --data notes.txt --draft ngram --draft ngram --context 64", "two drafts have the name 'ngram'"),
]


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    """Files and folders that the commands name."""
    folder = tmp_path_factory.mktemp("folder")
    for name in ("locked", "full/of", "eagle", "t5", "folder.jsonl"):
        (folder / name).mkdir(parents=True)
    configs = {"locked": {}, "t5": {"model_type": "t5"}}
    configs["eagle"] = {"model_type": "llama", "vocab_size": 12, "draft_vocab_size": 12}
    for name, config in configs.items():
        (folder / name / "config.json").write_text(json.dumps(config))
    LongSpecDraftModel.from_target(tiny_target("llama")).save_pretrained(folder / "other")
    shutil.copy(tiny.notes, folder / "notes.txt")
    (folder / "empty").write_text(" \n")
    (folder / "binary").write_bytes(b"\xff\xfe\x00\x80")
    (folder / "data.jsonl").write_text('{"prompt": "one two"}\n')
    (folder / "schema.json").write_text('{"type": "strin"}')
    for file in ("full/.hidden", "run/model.safetensors", "run/card.json", "run/checkpoint-2/config.json"):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text("mine")
    (folder / "one.jsonl").write_text("not JSON\n")
    (folder / "lines.jsonl").write_text('{"name": "one"}\n')
    (folder / "link.jsonl").symlink_to("data.jsonl")
    (folder / "recipe.yaml").write_text("{training: {}, dataset: {path: text}}")
    return folder


def contents(folder):
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize(("line", "named"), ERRORS)
def test_one_line_names_what_is_wrong(main, tiny, folder, monkeypatch, hub, no_weights, unused_port, line, named):
    monkeypatch.chdir(folder)
    place = tempfile.mkdtemp

    def mkdtemp(suffix=None, prefix=None, dir=None):
        if "locked" in str(dir):  # the root user may write everywhere
            raise PermissionError(13, "Permission denied", str(dir))
        return place(suffix, prefix, dir)

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    before = contents(folder)
    names = {"TARGET": f"--target {tiny.target}", "DRAFT": str(tiny.longspec), "PORT": str(unused_port)}
    for name, value in names.items():
        line = line.replace(name, value)
    status, output, errors = main(*line.split())
    assert status == 2 and errors.startswith("error: ") and named in errors, errors
    assert not output and len(errors.splitlines()) == 1 and contents(folder) == before
    assert len(hub.requests) <= 1


@pytest.fixture
def unused_port():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def test_the_hub_is_asked_once_for_what_is_not_cached(hub):
    """A repository without a configuration may hold an adapter."""
    hub.error = EntryNotFoundError("404")
    options.require_model("model of", "org/adapter")
    options.require_draft("org/adapter")
    options.require_sources(["org/books:en", "books"])
    assert [url.split(".co/")[1] for url in hub.requests] == ["org/adapter", "org/adapter", "datasets/org/books"]


def test_files_that_are_damaged_or_of_another_model(main, copy_of, tiny):
    """Transformers would draw weights that a file does not have, and the text would be noise."""
    cases = [
        ({"draft": copy_of("longspec", 0.5)}, "cannot load the draft '", " Download or save the draft again.\n"),
        ({"target": copy_of("target", 0.5)}, "cannot load the model of '", " Check its files.\n"),
        ({"target": copy_of("target", model_type="lama")}, "`lama`", "\n"),
        ({"target": copy_of("target", model_type="gemma2")}, "model_type='gemma2' in config.json:", "\n"),
    ]
    (copy_of("target") / "tokenizer.json").write_text("{}")
    cases.append(({"target": copy_of.last}, f"cannot load the tokenizer of '{copy_of.last}': KeyError", "files.\n"))
    for models, named, end in cases:
        models = {"target": tiny.target, "draft": "ngram"} | models
        options = [part for name, path in models.items() for part in (f"--{name}", path)]
        status, output, errors = main("generate", tiny.notes, "--max-new-tokens", 4, *options)
        assert (status, output) == (2, "") and named in errors and errors.endswith(end), errors
        assert len(errors.splitlines()) == 1


@pytest.mark.parametrize(
    ("error", "status", "output"),
    [
        (torch.OutOfMemoryError("CUDA"), 2, "error: out of memory"),
        (KeyboardInterrupt(), 130, "\nInterrupted.\n"),
        (
            ValueError("no backend supports this:\n  a: no GPU\n  b: no package\nTake another.\nDetails."),
            2,
            "error: no backend supports this: a: no GPU; b: no package; Take another. (--debug shows the rest)",
        ),
    ],
    ids=["memory", "Ctrl-C", "several lines"],
)
def test_what_ends_a_command_while_it_works(command, tiny, monkeypatch, error, status, output):
    def stop(*_, **__):
        raise error

    monkeypatch.setattr(generate, "set_seed", stop)
    result = command("generate", tiny.notes, "--target", tiny.target, "--max-new-tokens", 4)
    assert result.exit_code == status and result.stderr.startswith(output), result.stderr


def test_version_help_and_tracebacks(main, tmp_path):
    assert main("--version") == (0, f"hf-longspec {__version__}\n", "")
    assert "Lossless speculative decoding" in main()[1]
    status, _, errors = main("audit", "--prompt", "x", "--target", tmp_path / "missing", "--debug")
    assert status == 2 and "Traceback" in errors  # 1 is a verdict


COMMANDS = typer.main.get_command(app.app).commands


def test_version_and_help_import_neither_torch_nor_transformers(tmp_path):
    lines = [["--version"], ["--help"], *([name, "--help"] for name in COMMANDS)]
    code = (
        "import sys\n"
        "from hf_longspec.cli.app import main\n"
        f"for arguments in {lines}:\n"
        "    sys.argv[1:] = arguments\n"
        "    try:\n        main()\n    except SystemExit as exit_of:\n"
        "        print(arguments, exit_of.code, sorted({'torch', 'transformers'} & set(sys.modules)))\n"
    )
    (tmp_path / "hf-longspec").write_text(code)  # the name of the installed command
    words, where = [sys.executable, str(tmp_path / "hf-longspec")], {"PYTHONPATH": str(Path(__file__).parents[2])}
    output = subprocess.run(words, env=os.environ | where, capture_output=True, text=True, check=True).stdout
    assert all(f"{line} 0 []\n" in output for line in lines)


def test_the_help_names_the_drafts_that_a_command_takes():
    """`auto` chooses a draft; `bench` compares drafts."""
    assert options.BY_NAME == ", ".join(weightless_drafts())
    helped = {name: {one.name: one.help for one in command.params} for name, command in COMMANDS.items()}
    assert "auto" in helped["generate"]["draft"] and "auto" not in helped["bench"]["draft"]
