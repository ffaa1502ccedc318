"""What exists is refused before any work, by every command that writes, with the names of all files concerned."""

import os
from pathlib import Path

import pytest

from hf_longspec.cli import models
from hf_longspec.cli.files import replace_file

# A command, and what its line of error names. TARGET is the option with the tiny target.
REFUSED = [
    ("generate TARGET --data data.jsonl --output link.jsonl --overwrite", ["link.jsonl", "is read"]),
    ("generate TARGET --data data.jsonl --output data.jsonl", ["data.jsonl", "is read"]),
    ("generate TARGET --data data.jsonl --output one.jsonl", ["already there: one.jsonl. ", "--resume", "--overwrite"]),
    ("generate TARGET --data data.jsonl --output one.jsonl --resume", ["one.jsonl, line 1", "--overwrite"]),
    ("generate TARGET --data data.jsonl --output new.jsonl --resume --overwrite", ["Pass one of them"]),
    ("bench TARGET --output one.jsonl", ["already there: one.jsonl. ", "--overwrite"]),
    ("bench TARGET --data lines.jsonl --column name --output lines.jsonl --overwrite", ["lines.jsonl", "is read"]),
    ("train TARGET --config recipe.yaml --output-dir run", ["run/checkpoint-2, run/model.safetensors"]),
    ("train TARGET --config recipe.yaml --output-dir run --draft run/checkpoint-2 --overwrite", ["is read"]),
    ("convert TARGET notes.txt --output full", ["full/.hidden, full/of"]),
    ("convert full/of --output full --overwrite", ["full/of", "is read"]),
    ("publish run --dry-run --base-model org/t --output run", ["run/card.json, run/checkpoint-2, run/model.safete"]),
]  # fmt: skip


@pytest.mark.parametrize(("line", "named"), REFUSED)
def test_what_exists_or_is_read_is_refused_before_any_work(main, tiny, tmp_path, monkeypatch, line, named):
    """With one line, before a model is loaded; every file stays as it was."""
    monkeypatch.chdir(tmp_path)
    for file in ("full/of/notes.txt", "full/.hidden", "run/model.safetensors", "run/card.json"):
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text("mine")
    for file in ("notes.txt", "one.jsonl", "run/checkpoint-2/config.json"):
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text("not JSON\n")
    Path("data.jsonl").write_text('{"prompt": "one two"}\n')
    Path("lines.jsonl").write_text('{"name": "one"}\n{"name": "two"}\n')
    Path("recipe.yaml").write_text("{target: t, training: {learning_rate: 1e-3}, dataset: {path: none}}\n")
    Path("link.jsonl").symlink_to("data.jsonl")
    monkeypatch.setattr(models, "load_target", lambda *_: pytest.fail("too late"))
    before = contents(tmp_path)
    status, _, errors = main(*line.replace("TARGET", f"--target {tiny.target}").split())
    assert status == 2 and errors.startswith("error: ") and len(errors.splitlines()) == 1
    assert all(part in errors for part in named), errors
    assert contents(tmp_path) == before


def contents(folder):
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def test_a_file_is_replaced_at_once_and_a_link_stays(tmp_path, monkeypatch):
    file, link = tmp_path / "deep" / "file", tmp_path / "link"
    replace_file(file, "old")
    file.chmod(0o640)
    link.symlink_to(file)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            replace_file(link, "new")
    assert file.read_text() == "old" and [path.name for path in file.parent.iterdir()] == ["file"]
    replace_file(link, "new")
    assert file.read_text() == "new" and link.is_symlink() and file.stat().st_mode & 0o777 == 0o640
