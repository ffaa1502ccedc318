"""Errors of users: one line with the problem and the remedy, status 2, no traceback, nothing written."""

import json
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import typer
from huggingface_hub.errors import EntryNotFoundError
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5EncoderModel

from hf_longspec import LongSpecDraftModel, __version__
from hf_longspec.cli import app, audit, generate, models, options, tune
from hf_longspec.modeling.register_draft import weightless_drafts
from tests.tiny_targets import tiny_target

MODULES = {"generate": generate, "audit": audit, "tune": tune}
SMALL = {"generate": ["--max-new-tokens", 4], "audit": ["--max-new-tokens", 4]}
SMALL |= {"tune": ["--context", 32, "--max-new-tokens", 4, "--repeats", 1, "--dry-run"]}


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
    assert line == "error: cannot load the model of './no/such/folder': there is no such folder. Check the path."
    traced = command(name, tiny.notes, "--target", "./no/such/folder", *SMALL[name], "--debug")
    assert traced.exit_code == 1 and "there is no such folder" in str(traced.exception)
    monkeypatch.setattr(models, "load_tokenizer", refuse)  # before the target is loaded
    line = fails(name, "--draft", "/no/such/draft")
    assert "cannot load the draft '/no/such/draft': there is no such folder" in line


class TestMistypedNames:
    """One line at once, before anything is loaded: neither request of the Hub is repeated."""

    @pytest.fixture(autouse=True)
    def hub(self, monkeypatch):
        """The requests for metadata; each raises `hub.error`."""

        def request(url):
            self.requests.append(url)
            raise self.error

        self.requests, self.error = [], models.NetworkError("no route")
        monkeypatch.setattr(models.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(models, "get_hf_file_metadata", request)
        monkeypatch.setattr(models.AutoModelForCausalLM, "from_pretrained", refuse)

    def test_a_draft_without_an_owner(self, fails):
        line = fails("generate", "--draft", "ngrm")
        assert "owner/name" in line
        assert line.endswith("Did you mean 'ngram'?") and not self.requests

    def test_a_draft_or_target_that_the_hub_does_not_have(self, fails):
        assert "draft 'org/foo': the Hub was not reached (no route). Check" in fails("audit", "--draft", "org/foo")
        assert "tokenizer of 'gtp2': the Hub was not reached (no route)." in fails("generate", target="gtp2")
        assert [url.split("/resolve/")[0][-7:] for url in self.requests] == ["org/foo", "co/gtp2"]

    def test_a_repository_without_a_configuration_may_hold_an_adapter(self):
        self.error = EntryNotFoundError("404")
        with models.loading("org/adapter", "model", from_hub=True):
            pass
        assert len(self.requests) == 1


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (
            "generate --output out.jsonl --data missing.jsonl",
            "the file 'missing.jsonl' does not exist. Check the path;",
        ),
        ("bench --data missing.txt", "the file 'missing.txt' does not exist."),
        ("bench --data here/books", "the folder 'here' has no 'books'. Check the path;"),
        ("bench --data ./books", "the file './books' does not exist."),
        ("train --config recipe.yaml missing.CSV", "the file 'missing.CSV' does not exist."),
    ],
)
def test_a_missing_file_is_not_looked_for_on_the_hub(main, tiny, tmp_path, monkeypatch, line, named):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.load_dataset", refuse)
    Path("here").mkdir()
    status, output, errors = main(*line.format(notes=tiny.notes).split(), "--target", tiny.target)
    assert (status, output) == (2, "") and named in errors and len(errors.splitlines()) == 1


@pytest.mark.parametrize("name", ["org/books", "org/books-2.5", "org/books:en", "books"])
def test_a_dataset_of_the_hub_is_asked_for(main, tiny, tmp_path, monkeypatch, name):
    asked = []

    def load_dataset(*arguments, **_):
        asked.append(arguments)
        raise ConnectionError("no route")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    status, _, errors = main("bench", "--data", name, "--target", tiny.target)
    assert status == 2 and "no route" in errors and asked == [(name.split(":")[0], "en" if ":" in name else None)]


@pytest.mark.parametrize(
    ("name", "kind", "share"), [("audit", "target", 0.5), ("tune", "longspec", 0.5), ("generate", "target", 0)]
)
def test_truncated_weights(fails, copy_of, name, kind, share):
    folder = copy_of(kind, share)
    line = fails(name, target=folder) if kind == "target" else fails(name, "--draft", folder)
    if kind == "target":
        assert "cannot load the model of" in line and line.endswith(" Check its files.")
    else:  # our own error has its remedy
        assert "cannot load the draft '" in line and line.endswith(" Download or save the draft again.")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "it has no file of one, such as tokenizer.json. Save the tokenizer of the model there, with save_pre"),
        (
            "{}",
            "tokenizer.json and tokenizer_config.json cannot be read (KeyError: 'added_tokens'). Save the tokenizer",
        ),
    ],
)
def test_a_tokenizer_that_cannot_be_loaded(fails, copy_of, content, complaint):
    folder = copy_of("target")
    if content is None:
        (folder / "tokenizer_config.json").unlink()
        (folder / "tokenizer.json").unlink()
    else:
        (folder / "tokenizer.json").write_text(content)
    assert f"cannot load the tokenizer of '{folder}': {complaint}" in fails("generate", target=folder)


@pytest.mark.parametrize(
    ("name", "other", "complaint"),
    [
        ("generate", "lama", "`lama`"),
        ("tune", "gemma2", "model_type='gemma2' in config.json: "),
    ],
)
def test_another_model_type_does_not_run_on_random_weights(fails, copy_of, name, other, complaint):
    """Transformers would draw what the file does not have, and the text would be noise."""
    assert complaint in fails(name, target=copy_of("target", model_type=other))


def test_drafts_that_do_not_fit(fails, copy_of, tiny, tmp_path):
    assert "cannot load the draft '" in fails("generate", "--draft", copy_of("longspec", model_type="tokenswift"))
    LongSpecDraftModel.from_target(tiny_target("llama")).save_pretrained(tmp_path / "other")
    assert "was made for a target with" in fails("generate", "--draft", tmp_path / "other")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    T5EncoderModel(T5Config(vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_layers=1)).save_pretrained(tmp_path / "t5")
    assert "not a draft" in fails("generate", "--draft", tmp_path / "t5")
    LlamaForCausalLM(LlamaConfig(vocab_size=12, **sizes)).save_pretrained(tmp_path / "other words")
    assert "was not found to translate" in fails("generate", "--draft", tmp_path / "other words")


def test_weights_without_a_use_are_noted(command, tiny, copy_of):
    """A tensor that the architecture has no place for: it runs, with a note."""
    target = copy_of("target")
    tensors = load_file(target / "model.safetensors")
    extra = {"model.layers.0.self_attn.q_norm.weight": torch.ones(32)}
    save_file(tensors | extra, target / "model.safetensors", metadata={"format": "pt"})
    result = command("generate", tiny.notes, "--target", target, *SMALL["generate"])
    assert result.exit_code == 0
    assert "model_type='llama'; 1 unused weights, for example model.layers.0.self_attn.q_norm" in result.stderr


def test_prompts_that_cannot_be_read(fails, tmp_path):
    empty, binary = tmp_path / "empty.txt", tmp_path / "binary"
    empty.write_text(" \n")
    binary.write_bytes(b"\xff\xfe\x00\x80")
    assert fails("generate", text=empty) == f"error: {empty} is empty. Pass a text."
    assert "- is empty" in fails("audit", text="-", input="")
    assert "cannot read" in fails("tune", text=tmp_path / "missing.txt")
    assert "cannot read" in fails("generate", text=tmp_path)
    assert f"{binary} is not UTF-8 text. Convert it" in fails("generate", text=binary)
    for name in MODULES:
        assert "pass one prompt" in fails(name, text=None)


# A command, and what its line of error names. TARGET is the option with the tiny target.
EARLY = [
    ("generate", "Missing option '--target'. Run `hf-longspec generate --help`"),
    ("generate --no-such-option", "No such option: --no-such-option"),
    ("genrate", "No such command 'genrate'. Did you mean 'generate'?"),
    ("audit --batch 0", "'--batch': 0 is not an integer of at least 1 and at most 1024."),
    ("generate --temperature inf", "'--temperature': inf is not a number of at least 0."),
    ("generate --top-p 1.5", "'--top-p': 1.5 is not a number above 0 and at most 1."),
    ("generate --target= --prompt x", "'--target': the name is empty. Pass a Hub id, a file or a folder."),
    ("generate TARGET --prompt x --draft=", "'--draft': the name is empty."),
    ("bench TARGET --draft ngram --draft=", "'--draft': the name is empty."),
    ("bench TARGET --data=", "'--data': the name is empty."),
    ("tune TARGET notes.txt --draft auto --dry-run", "--draft auto chooses a draft for a text, and tune measures"),
    ("train --learning-rate nan", "'--learning-rate': nan is not a number above 0."),
    ("tune --dtype int3", "'int3' is not one of 'auto', 'float32', 'bfloat16', 'float16'."),
    ("generate TARGET notes.txt --prompt text", "pass one prompt"),
    ("generate TARGET notes.txt --device warp9", "'--device': 'warp9': expected the name of a device"),
    ("audit TARGET notes.txt --device meta", "'--device': 'meta': expected"),
    ("audit TARGET notes.txt --samples 49 --max-new-tokens 4", "--samples 49"),
    ("generate TARGET notes.txt --html .", "'--html': . is a folder."),
    ("generate TARGET notes.txt --html notes.txt/page.html", "notes.txt is a file."),
    ("generate TARGET notes.txt --html locked/page.html", "locked cannot be written to: Permission denied."),
    ("generate TARGET --data data.jsonl", "--output"),
    ("generate TARGET --data data.jsonl --output out.jsonl --prompt x", "cannot be combined"),
    ("generate TARGET --output out.jsonl --prompt x", "are for --data"),
    ("generate TARGET --data data.jsonl --output out.jsonl --column words", "the keys are prompt"),
    ("tune TARGET notes.txt --output locked/deep/out", "locked cannot be written to"),
    ("tune TARGET notes.txt --output full", "full/of exists. Pass --overwrite"),
    ("tune TARGET notes.txt --draft locked", "locked cannot be written to"),
    ("bench TARGET --output bench.txt", "bench.txt does not end with .jsonl"),
    ("demo TARGET --file none.txt", "cannot read none.txt"),
    ("demo TARGET --whole --context 64", "--whole and --context 64 are two lengths."),
    ("train --config none.yaml --output-dir locked/run", "locked cannot be written to"),
    ("convert TARGET notes.txt --output notes.txt/out", "notes.txt is a file."),
    ("publish DRAFT --dry-run --output locked/out", "locked cannot be written to"),
    ("publish DRAFT --dry-run --results none.jsonl", "--results: the file 'none.jsonl' does not exist."),
    ("bench TARGET --data empty", "--data: empty is empty."),
    ("bench TARGET --data binary", "--data: binary is not UTF-8 text."),
    ("generate TARGET --data empty --output out.jsonl", "--data: empty is empty."),
    ("generate TARGET --data data.jsonl --output out.jsonl --column=", "'--column': the name is empty. Pass a key or"),
    ("generate TARGET notes.txt --regex=", "--regex is empty."),
    ("generate TARGET notes.txt --json-schema notes.txt", "--json-schema notes.txt is not JSON"),
    ("generate notes.txt --target notes.txt", "the model of 'notes.txt': it is a file. Pass the folder of a saved"),
    ("audit notes.txt --target full", "the model of 'full': it has no config.json."),
    ("generate TARGET notes.txt --draft a/b.safetensors", "the draft 'a/b.safetensors': there is no such file."),
    ("demo --dtype int8", "'--dtype': 'int8' is not one of"),
    ("demo --draft ngrm", "Did you mean 'ngram'?"),
    ("demo --draft auto", "--draft auto chooses a draft"),
    ("serve TARGET --max-length 64", "--max-length 64 is for several --rows."),
    ("serve TARGET --host host.invalid", "cannot listen on host.invalid:8000: "),
    ("train --config short.txt", "'short.txt' holds a str, expected a mapping."),
    ("convert a.pth --output out", "the checkpoint 'a.pth': there is no such file."),
    ("publish full --dry-run", "full has no config.json."),
    ("audit TARGET notes.txt --set seed", "--set 'seed': expected key=value"),
    ("bench TARGET --data notes.txt --context 0", "--context '0'"),
    ("bench TARGET --data notes.txt --context 1k,x", "--context 'x': expected numbers of at least 1, such as"),
    ("bench TARGET --data notes.txt --draft auto --context 64", "--draft auto"),
    ("bench TARGET --data notes.txt --draft ngram --draft ngram --context 64", "two drafts have the name 'ngram'"),
    ("tune TARGET notes.txt --draft ngram --dry-run", "ngram drafts have nothing to tune. Pass one of dflash or "),
    ("generate TARGET notes.txt --regex (", "--regex ( cannot be followed: "),
    ("generate TARGET notes.txt --json-schema schema.json", "cannot be followed: Invalid type: strin"),
    ("generate TARGET notes.txt --draft full", "the draft 'full': it has no config.json."),
    ("demo --draft notes.txt", "the draft 'notes.txt': it is a file."),
    ("train --config recipe.yaml --target x --output-dir full", "full/of exists. Pass --resume"),
    ("publish DRAFT --dry-run --repo name", "'--repo': 'name': expected owner/name, with letters"),
    ("publish DRAFT --dry-run --engine a/b/c", "'--engine': 'a/b/c': expected owner/name"),
    ("publish DRAFT --dry-run --engine a/b@main", "or owner/name@commit, with all 40 digits of the commit"),
    (
        "publish DRAFT --dry-run --license Apache",
        "'--license': 'Apache': expected the id of a license on the Hub, such",
    ),
    ("publish DRAFT --dry-run --base-model ./org", "'--base-model': './org': expected a Hub id, such as"),
    ("publish DRAFT --dry-run --name mine", "--name mine names a draft in --results. Pass --results, or drop it."),
    ("publish DRAFT --dry-run --base-model a/b --results data.jsonl", "no acceptance of the draft 'tiny"),
    ("publish locked --dry-run", "the target '' is not a Hub id"),
    ("convert full --output out", "the target of 'full' is unknown. Pass --target"),
    ("convert full --output out --target locked/none/x", "'locked/none/x': there is no such folder."),
    ("convert full --output out --target binary.json", "'binary.json': there is no such file."),
    ("train --config recipe.yaml --target x --output-dir out --resume", "'out' has no complete checkpoint to resume"),
    ("train --config recipe.yaml --target x --set draft.kind=medusa", "draft.kind='medusa': expected one of dflash,"),
    ("train --config recipe.yaml --target x --set pack=0", "pack: 0 in the recipe: expected the number of tokens per"),
    ("train --config recipe.yaml --target x --set eval_dataset={}", "eval_dataset has neither path nor tokens."),
    ("train --config recipe.yaml --target x --set dataset={tokens:[a.npy]}", "dataset: tokens have no documents."),
    ("train --config recipe.yaml --target x --draft full", "the draft 'full': it has no config.json."),
    ("publish DRAFT --dry-run --engine a/b --self-contained", "--engine a/b and --self-contained are opposites."),
]
LATE = [
    (
        "tune TARGET notes.txt --dry-run --set gamma=4",
        "--set gamma: not a setting of the draft specattn. Its settings are acc",
    ),
    ("generate TARGET notes.txt --set num_assistant_tokens=0", "num_assistant_tokens=0"),
    ("generate TARGET notes.txt --top-p 0.5", "--top-p and --top-k"),
    ("generate TARGET notes.txt --max-new-tokens 20000", "exceed the 16384 positions of the model"),
    ("generate TARGET notes.txt --chat", "has no chat template"),
    ("generate TARGET notes.txt --samples 3", "--temperature"),
    ("generate TARGET notes.txt --samples 3 --temperature 1 --show-drafts", "--show-drafts"),
    ("bench TARGET --data notes.txt --context 99k", "exceed the 16384 positions"),
    ("bench TARGET --data notes.txt --context 4k", "no text has 4096 tokens"),
    ("demo TARGET --file short.txt", "longer --file"),
    ("demo TARGET --context 16380", "use at most --context"),
    ("demo TARGET --max-new-tokens 16384", "16384 positions"),
]


@pytest.fixture(scope="module")
def loaded(tiny):
    return models.load_target(str(tiny.target), torch.float32)


@pytest.mark.parametrize(
    ("line", "named", "is_early"), [(*row, True) for row in EARLY] + [(*row, False) for row in LATE]
)
def test_one_line_names_what_is_wrong(main, tiny, tmp_path, monkeypatch, loaded, line, named, is_early):
    """With status 2, before anything is written, and mistakes that do not depend on the model before it is loaded."""
    monkeypatch.chdir(tmp_path)
    for name in ("locked", "full/of"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "locked" / "config.json").write_text("{}")
    shutil.copy(tiny.notes, "notes.txt")
    Path("short.txt").write_text("short")
    Path("empty").write_text(" \n")
    Path("binary").write_bytes(b"\xff\xfe\x00\x80")
    Path("data.jsonl").write_text('{"prompt": "one two"}\n')
    Path("schema.json").write_text('{"type": "strin"}')
    Path("recipe.yaml").write_text("{training: {}, dataset: {path: text}}")
    place = tempfile.mkdtemp

    def mkdtemp(suffix=None, prefix=None, dir=None):
        if "locked" in str(dir):  # the root user may write everywhere
            raise PermissionError(13, "Permission denied", str(dir))
        return place(suffix, prefix, dir)

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    if is_early:
        for loader in (models.AutoTokenizer, models.AutoModelForCausalLM, models.AutoModel, models.AutoConfig):
            monkeypatch.setattr(loader, "from_pretrained", refuse)
    else:
        monkeypatch.setattr(models, "load_target", lambda *_: loaded)  # loading takes most of the time
    before = sorted(tmp_path.rglob("*"))
    status, output, errors = main(
        *line.replace("TARGET", f"--target {tiny.target}").replace("DRAFT", str(tiny.longspec)).split()
    )
    assert status == 2 and errors.startswith("error: ") and named in errors
    assert not output or line.startswith("demo")  # which says what it loads
    assert len(errors.splitlines()) == 1 and sorted(tmp_path.rglob("*")) == before


def test_missing_folders_of_an_output_are_made(command, tiny, tmp_path):
    page = tmp_path / "new" / "pages" / "page.html"
    arguments = ["--target", tiny.target, "--draft", "ngram", "--max-new-tokens", 2, "--html", page]
    assert command("generate", tiny.notes, *arguments).exit_code == 0 and page.is_file()


@pytest.mark.parametrize(
    ("name", "error", "status", "output"),
    [
        ("generate", torch.OutOfMemoryError("CUDA"), 2, "error: out of memory"),
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

    monkeypatch.setattr(MODULES[name], "compare" if name == "audit" else "set_seed", stop)
    result = command(name, tiny.notes, "--target", tiny.target, *SMALL[name])
    assert result.exit_code == status and result.stderr.startswith(output), result.stderr


def test_a_missing_package_is_named_in_one_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.delitem(sys.modules, "hf_longspec.cli.app")
    with pytest.raises(SystemExit) as exit_of:
        runpy.run_module("hf_longspec.cli.app")
    expected = "error: hf-longspec needs typer, which is not installed: pip install typer rich\n"
    assert (exit_of.value.code, *capsys.readouterr()) == (2, "", expected)


def test_a_missing_package_of_a_command_is_named_in_one_line(main, tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.text", None)
    monkeypatch.delitem(sys.modules, "hf_longspec.cli.generate")
    status, _, errors = main("generate", tiny.notes, "--target", tiny.target)
    assert (status, errors) == (2, "error: rich is not installed: pip install rich\n")


def test_version_help_and_tracebacks(main, tmp_path):
    assert main("--version") == (0, f"hf-longspec {__version__}\n", "")
    assert "Lossless speculative decoding" in main()[1]
    status, _, errors = main("audit", "--target", tmp_path / "missing", "--debug")
    assert status == 2 and "Traceback" in errors  # 1 is a verdict


COMMANDS_BY_NAME = typer.main.get_command(app.app).commands
COMMANDS = sorted(COMMANDS_BY_NAME)
LIGHT = """
import sys
from hf_longspec.cli.app import main
for arguments in {lines}:
    sys.argv[1:] = arguments
    try:
        main()
    except SystemExit as exit_of:
        print(arguments, exit_of.code, sorted({{"torch", "transformers"}} & set(sys.modules)))
"""


@pytest.fixture
def script(tmp_path):
    """`script(code)`: output of a process that looks like the installed command."""

    def run(code):
        (tmp_path / "hf-longspec").write_text(code, encoding="utf-8")
        folder = {"PYTHONPATH": str(Path(__file__).resolve().parents[2]), "HF_HUB_OFFLINE": "1"}
        words = [sys.executable, str(tmp_path / "hf-longspec")]
        return subprocess.run(words, env=os.environ | folder, capture_output=True, text=True, check=True).stdout

    return run


def test_version_help_and_wrong_options_and_prompts_import_neither_torch_nor_transformers(script, tmp_path):
    lines = [["--version"], ["--help"], *([name, "--help"] for name in COMMANDS)]
    wrong = [["generate", "--target", "x", "--samples", "0"], ["tune", "--target", "x", "--output", __file__]]
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x80")
    for place in (str(tmp_path / name) for name in ("missing", "empty", "binary")):
        wrong += [[name, place, "--target", "x"] for name in ("generate", "audit", "tune")]
        wrong += [["demo", "--file", place]]
    wrong += [["generate", "--target", "x"], ["audit", "--target", "x", "--prompt", ""]]
    wrong += [["generate", "--target", "x", "--prompt", "x", "--top-p", "0.5"]]
    for words in (
        ["--data", "missing.txt"],
        ["--batch", "0"],
        ["--draft", "ngrm"],
        ["--context", "x"],
    ):
        wrong += [["bench", "--target", "x", *words]]
    wrong += [["serve", "--target", "./missing"], ["demo", "--draft", "ngrm"], ["train", "--config", __file__]]
    wrong += [["convert", "./missing", "--output", str(tmp_path / "out")], ["publish", str(tmp_path), "--dry-run"]]
    wrong += [["audit", "--target", "x", "--prompt", "x", "--set", "seed"]]
    wrong += [["audit", "--target", "x", "--prompt", "x", "--samples", "49"]]
    wrong += [["bench", "--target", "x", "--draft", "ngram", "--draft", "ngram"]]
    wrong += [["tune", "--target", "x", "--prompt", "x", "--draft", "ngram", "--dry-run"]]
    wrong += [["generate", "--target", "x", "--prompt", "x", "--regex", "("]]
    wrong += [["demo", "--draft", str(tmp_path)], ["publish", str(tmp_path), "--dry-run", "--repo", "name"]]
    (tmp_path / "recipe.yaml").write_text("{target: x, training: {}, dataset: {path: text}}")
    wrong += [["train", "--config", str(tmp_path / "recipe.yaml"), *words] for words in ([], ["--set", "pack=0"])]
    wrong += [["train", "--config", str(tmp_path / "recipe.yaml"), "--set", "draft.kind=medusa"]]
    (tmp_path / "data.jsonl").write_text('{"words": "one"}')
    wrong += [["bench", "--target", "x", "--data", str(tmp_path / "data.jsonl"), "--output", str(tmp_path / "b.jsonl")]]
    wrong += [
        ["generate", "--target", "x", "--data", str(tmp_path / "data.jsonl"), "--output", str(tmp_path / "o.jsonl")]
    ]
    wrong += [["audit", "--target", "x", "--prompt", "x", "--device", "warp9"]]
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "config.json").write_text("{}")
    for words in (["--license", "foo bar"], ["--name", "x"], ["--base-model", "x/"], []):
        wrong += [["publish", str(draft), "--dry-run", *words]]
    wrong += [["convert", str(draft), "--output", str(tmp_path / "out")]]
    output = script(LIGHT.format(lines=lines + wrong))
    for line, status in [(line, 0) for line in lines] + [(line, 2) for line in wrong]:
        assert f"{line} {status} []\n" in output


@pytest.mark.soak
def test_the_script_registers_the_drafts_before_a_command_runs(script, tiny):
    """In a process of its own, with a draft that `AutoModel` knows only if it is registered; names come when needed.

    So do processes that it starts, as the workers of a data loader where processes are not forked.
    """
    line = ["generate", str(tiny.notes), "--target", str(tiny.target), "--draft", str(tiny.longspec)]
    output = script(
        "from importlib import import_module\n"
        "from multiprocessing import get_context\n"
        "import hf_longspec, sys\n"
        "if __name__ == '__main__':\n"
        "    worker = get_context('spawn').Process(target=import_module, args=['hf_longspec.modeling.base'])\n"
        "    worker.start()\n"
        f"    sys.argv[1:] = {[*line, '--max-new-tokens', '4', '--json']}\n"
        "    assert not hasattr(hf_longspec, '__wrapped__') and 'torch' not in sys.modules\n"
        "    from hf_longspec.cli.app import main\n"
        "    try:\n        main()\n    except SystemExit as exit_of:\n        assert exit_of.code == 0\n"
        "    worker.join()\n"
        "    print(worker.exitcode, hf_longspec.LongSpecDraftModel.__name__, hf_longspec.audit.__name__)\n"
    )
    text, names = output.strip().splitlines()
    assert json.loads(text)["new_tokens"] == 4 and names == "0 LongSpecDraftModel audit"


def test_the_help_of_tune_does_not_offer_auto():
    """`auto` chooses a draft; its settings cannot be tuned."""
    helped = {name: {one.name: one.help for one in command.params} for name, command in COMMANDS_BY_NAME.items()}
    assert "auto" in helped["generate"]["draft"] and "auto" not in helped["tune"]["draft"]


def test_the_help_names_every_draft_without_training():
    assert options.BY_NAME == ", ".join(weightless_drafts())
