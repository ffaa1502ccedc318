"""Every command of docs/quicktour.md and of the help texts runs; nothing that the page promises is missing."""

import re
import shlex
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import typer

from hf_longspec.cli import demo
from hf_longspec.cli.app import app
from tests.docs.blocks import blocks_of, read
from tests.docs.test_commands import examples_of

COMMANDS = typer.main.get_command(app).commands
PAGE = read("docs/quicktour.md")
BASH = [
    line for block in blocks_of("docs/quicktour.md") if block.language == "bash" for line in block.code.splitlines()
]
EXAMPLES = [line for line in BASH if line.startswith("hf-longspec ")]
# Sizes that are small enough for a test, on top of those of an example; the last of two values counts.
SMALL = {"generate": ["--max-new-tokens", "8"]}
SMALL |= {"audit": ["--max-new-tokens", "8", "--context", "24", "--sample-tokens", "2"]}
SMALL |= {"env": []}
# With the tiny target and draft in place of those of the Hub, and shorter.
HELPED = [
    line.replace("Qwen/Qwen3-0.6B", "hub_cards/tiny-target").replace("org/draft", "./draft")
    for name in SMALL
    for line in examples_of(name)
]


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    """A folder like a checkout, with a text and copies that may be written to."""
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(tiny.target.parent, folder / "hub_cards")
    shutil.copytree(tiny.longspec, folder / "draft")
    shutil.copy(tiny.notes, folder / "notes.txt")
    (folder / "prompts.jsonl").write_text('{"prompt": "one two, one"}\n')
    (folder / "cat.json").write_text('{"type": "boolean"}')
    return folder


@pytest.mark.parametrize("line", EXAMPLES + HELPED)
def test_an_example_runs(command, folder, monkeypatch, line):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(demo, "HOME", folder)
    (program, name, *words), text = shlex.split(line), None
    if "<" in words:
        words, text = words[: words.index("<")], Path(words[-1]).read_text()
    sizes = [*SMALL.get(name, ()), *(("--samples", "192", "--batch", "192") if "--samples" in words else ())]
    result = command(name, *words, *sizes, input=text)
    assert program == "hf-longspec" and result.exit_code == 0, f"{line}\n{result.output}"
    assert result.stdout.strip() or "--data" in words
    for option, value in pairwise(words):
        if option == "--output":
            assert Path(value).exists(), line
            if Path(value).is_dir():
                shutil.rmtree(value)


def test_the_page_has_every_command_and_no_option_that_does_not_exist():
    listed = {name for row in re.findall(r"^\| \[.*$", PAGE, re.MULTILINE) for name in re.findall(r"\[`(\w+)`\]", row)}
    assert listed == set(COMMANDS)
    assert {line.split()[1] for line in EXAMPLES} == {*SMALL, "demo"}
    for name in SMALL:
        section = PAGE.split(f"\n### {name}\n")[1].split("\n### ")[0]
        known = {option for parameter in COMMANDS[name].params for option in parameter.opts}
        assert set(re.findall(r"--[a-z][a-z-]+", section)) <= known | {"--debug"}
        assert all(getattr(parameter, "help", None) for parameter in COMMANDS[name].params), name
