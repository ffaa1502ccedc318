"""The bundled tiny target and its drafts, cut to two layers, and a way to run a command on them."""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from hf_longspec.cli import app, held_out, progress
from tests.generation.conftest import widths  # noqa: F401 - a fixture
from tests.hub.conftest import hub  # noqa: F401 - a fixture

HUB_CARDS = Path(__file__).resolve().parents[2] / "hub_cards"


def run_command(*arguments, **options):
    """The result of one run of the application, in this process; `options` are those of invoke."""
    return CliRunner().invoke(app.app, list(map(str, arguments)), **options)


@pytest.fixture(autouse=True)
def no_lines_about_progress(monkeypatch):
    """On a busy machine a command of a test may take ten seconds, too."""
    monkeypatch.setattr(progress, "LINE_SECONDS", 3600)


@pytest.fixture(autouse=True)
def little_held_out_text(monkeypatch):
    """Of a draft that was trained, one short text is continued."""
    monkeypatch.setattr(held_out, "NEW_TOKENS", 4)
    monkeypatch.setattr(held_out, "MOST_PROMPTS", 1)


@pytest.fixture
def command():
    """`command(*arguments, **options of invoke)`: the result of one run of the application."""
    return run_command


def cut(folder):
    """Write the bundled target and two drafts to a folder, with the first and the last of twelve layers alone.

    The drafts are still accepted at times, and a forward takes a fifth of the time.
    """
    target = folder / "tiny-target"
    shutil.copytree(HUB_CARDS / "tiny-target", target, ignore=shutil.ignore_patterns("config.json", "model.*"))
    model = AutoModelForCausalLM.from_pretrained(HUB_CARDS / "tiny-target")
    model.model.layers = model.model.layers[:: len(model.model.layers) - 1]
    model.config.num_hidden_layers = len(model.model.layers)
    model.save_pretrained(target)
    for name in ("longspec", "tokenswift"):
        draft = shutil.copytree(HUB_CARDS / f"tiny-{name}", folder / f"tiny-{name}")
        config = json.loads((draft / "config.json").read_text())
        config["target"]["num_hidden_layers"] = 2
        (draft / "config.json").write_text(json.dumps(config | ({"kv_layer": 1} if "kv_layer" in config else {})))
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Paths: the tiny target, its drafts, and a text to continue."""
    notes, cards = tmp_path_factory.mktemp("text") / "notes.txt", cut(tmp_path_factory.mktemp("cards"))
    lines = [
        f"def set_{name}(self, value):\n    self._{name} = value\n    return self\n\n" for name in ("a", "width", "b")
    ]
    notes.write_text("class Shape:\n" + "".join(lines) * 2, encoding="utf-8")
    drafts = {name: cards / f"tiny-{name}" for name in ("longspec", "tokenswift")}
    return SimpleNamespace(target=cards / "tiny-target", notes=notes, **drafts)


@pytest.fixture
def main(monkeypatch, capsys):
    """`main(*arguments)`: exit status, standard output and standard error of the program."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["hf-longspec", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_of:
            app.main()
        return exit_of.value.code, *capsys.readouterr()

    return run
