"""Every example of docs/cli.md and of the help texts runs; nothing that the page promises is missing."""

import inspect
import re
import shlex
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import typer

from hf_longspec.cli import audit, env, generate, tune
from hf_longspec.cli.app import app

PROJECT = Path(__file__).resolve().parents[2]
PAGE = (PROJECT / "docs" / "cli.md").read_text(encoding="utf-8")
EXAMPLES = [line for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
COMMANDS = {command.__name__: command for command in (generate.generate, audit.audit, tune.tune, env.env)}
HELPED = [
    line.strip()
    for command in COMMANDS.values()
    for line in (inspect.getdoc(command) or "").splitlines()
    if line.strip().startswith("hf-longspec ")
]
# Options that the examples of a help text leave at their defaults, small enough for a test; the last of two values
# counts.
SMALL = {
    "generate": ["--max-new-tokens", "8"],
    "audit": ["--max-new-tokens", "8", "--context", "64"],
    "tune": ["--max-new-tokens", "8", "--context", "64", "--repeats", "1", "--prompts", "1"],
    "env": [],
}


@pytest.fixture
def folder(tiny, tmp_path, monkeypatch):
    """A folder like a checkout, with a text and copies that may be written to."""
    shutil.copytree(tiny.target.parent, tmp_path / "hub_cards")
    shutil.copytree(tiny.longspec, tmp_path / "draft")
    shutil.copy(tiny.notes, tmp_path / "notes.txt")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(command, line, extra=()):
    words = shlex.split(line)
    text = None
    if "<" in words:
        words, text = words[: words.index("<")], Path(words[-1]).read_text()
    assert words[0] == "hf-longspec", line
    result = command(*words[1:], *extra, input=text)
    assert result.exit_code == 0, f"{line}\n{result.output}"
    assert result.stdout.strip()
    for option, value in pairwise(words):
        if option in ("--html", "--output"):
            assert Path(value).exists(), line


@pytest.mark.parametrize("line", EXAMPLES)
def test_the_examples_of_the_page_run(command, folder, line):
    run(command, line)


@pytest.mark.parametrize("line", HELPED)
def test_the_examples_of_the_help_run(command, folder, line):
    """With the tiny target and draft in place of those of the Hub, and shorter."""
    line = line.replace("Qwen/Qwen3-0.6B", "hub_cards/tiny-target").replace("org/draft", "./draft")
    run(command, line, SMALL[line.split()[1]])


def test_every_command_has_examples_in_both_places():
    assert {line.split()[1] for line in EXAMPLES} == {*COMMANDS, "demo"}
    for name in COMMANDS:
        assert sum(line.split()[1] == name for line in HELPED) >= 2


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_explains_every_option_and_the_status(command, name):
    result = command(name, "--help", env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"})
    assert result.exit_code == 0 and "Exit status: 0" in result.stdout and "Examples:" in result.stdout
    for parameter in typer.main.get_command(app).commands[name].params:
        assert getattr(parameter, "help", None), f"{name}: {parameter.name} is not explained"


@pytest.mark.parametrize("name", COMMANDS)
def test_the_page_names_no_option_that_does_not_exist(name):
    section = PAGE.split(f"\n## {name}\n")[1].split("\n## ")[0]
    known = {option for parameter in typer.main.get_command(app).commands[name].params for option in parameter.opts}
    assert set(re.findall(r"--[a-z][a-z-]+", section)) <= known | {"--debug"}


def test_the_page_lists_all_commands():
    listed = {name for row in re.findall(r"^\| \[(.*?)\]", PAGE, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert listed == set(typer.main.get_command(app).commands)
