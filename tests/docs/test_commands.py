"""Every command in the documentation is understood by the program that it calls, without being run."""

import argparse
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib

import pytest
import typer
from typer.testing import CliRunner

from hf_longspec.cli.app import app
from tests.docs.blocks import PAGES, PROJECT, blocks_of, prose_of

# A module that is imported already is run once more, as it is for this process.
pytestmark = pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
SHELL = ("", "bash", "text")
PROGRAMS = {"make", "pip", "python", "hf-longspec", "torchrun", "accelerate", ".venv/bin/pre-commit"}
EXTRAS = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
# Programs that others wrote, and the one argument of ours that these lines have.
TAKEN_AS_IT_IS = {".venv/bin/pre-commit install"}


def commands_of(page):
    """Commands of the blocks of a page, joined at backslashes, without comments. In `bash` every line is one."""
    found = []
    for block in blocks_of(page):
        if block.language in SHELL:
            lines = re.sub(r"\\\n\s*", "", block.code).splitlines()
            lines = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
            found += [line for line in lines if block.language == "bash" or line.split()[0] in PROGRAMS]
    return found


COMMANDS = [pytest.param(line, id=f"{page}: {line[:60]}") for page in PAGES for line in commands_of(page)]


class Parsed(Exception):
    """A program has understood its arguments."""


def understand(line):
    """Have the program of a command parse its arguments; one that does not understand them fails the test."""
    words = shlex.split(line, comments=True)
    program, *arguments = words[: words.index("<")] if "<" in words else words
    if line not in TAKEN_AS_IT_IS:
        assert program in UNDERSTAND, f"{line}: unknown program"
        UNDERSTAND[program](arguments)


def understand_pip(arguments):
    extras = re.findall(r"\[(.*?)\]", " ".join(arguments))
    assert arguments[0] == "install" and {name for part in extras for name in part.split(",")} <= set(EXTRAS)


def understand_launcher(arguments):
    """Of what torchrun and accelerate start, our own program."""
    if "hf_longspec.cli.app" in arguments:
        understand_typer(arguments[arguments.index("hf_longspec.cli.app") + 1 :])


def understand_make(arguments):
    parser = argparse.ArgumentParser()
    parser.add_argument("-f", default="Makefile")
    parser.add_argument("-j", type=int)
    parser.add_argument("names", nargs="+")
    parsed = parser.parse_args(arguments)
    makefile = (PROJECT / parsed.f).read_text(encoding="utf-8")
    for argument in parsed.names:
        name, variable, _ = argument.partition("=")
        assert re.search(rf"^{name} \?=|\$\({name}\)" if variable else rf"^{name}:", makefile, re.MULTILINE), name


def understand_typer(arguments):
    command = typer.main.get_command(app).commands[arguments[0]]
    try:
        command.make_context(arguments[0], arguments[1:])
    except Exception as error:  # typer has click's exceptions under a name that depends on its version
        if hasattr(error, "format_message"):
            raise AssertionError(error.format_message()) from error
        raise


def understand_python(arguments):
    module, path = (arguments[1], arguments[2:]) if arguments[0] == "-m" else (None, arguments[1:])
    if module == "hf_longspec.cli.app":
        return understand_typer(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["script", *path])
        parse = argparse.ArgumentParser.parse_args

        def parse_and_stop(self, *arguments, **options):
            parse(self, *arguments, **options)
            raise Parsed

        patch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
        run, what = (runpy.run_module, module) if module else (runpy.run_path, str(PROJECT / arguments[0]))
        patch.syspath_prepend((PROJECT / what).parent)  # a script imports its neighbours
        with pytest.raises(Parsed):
            run(what, run_name="__main__")


UNDERSTAND = {"make": understand_make, "pip": understand_pip, "hf-longspec": understand_typer}
UNDERSTAND |= {"torchrun": understand_launcher, "accelerate": understand_launcher, "python": understand_python}


@pytest.fixture(autouse=True)
def from_the_root(monkeypatch):
    monkeypatch.chdir(PROJECT)


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_is_understood(line):
    understand(line)


# The changelog also names commands that were removed.
@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md"])
def test_commands_in_the_text_name_what_exists(page):
    for words in re.findall(r"`((?:make|python|hf-longspec) [^`\n]*)`", prose_of(page)):
        program, first, *_ = [*words.split(), ""]
        if program == "make" and first:
            understand_make([first])
        elif program == "hf-longspec":
            group = typer.main.get_command(app)
            known = {option for parameter in group.params for option in parameter.opts}
            assert first in {*group.commands, *known}, words
        elif program == "python" and first.endswith(".py") and "/" in first:
            assert (PROJECT / first).is_file(), words


def examples_of(name):
    """The examples in the help of a command."""
    lines = (typer.main.get_command(app).commands[name].help or "").splitlines()
    return [line.strip().removeprefix("- ") for line in lines if line.strip().startswith("- hf-longspec ")]


@pytest.mark.parametrize("name", typer.main.get_command(app).commands)
def test_the_help_of_a_command_has_examples_that_are_understood(name):
    result = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"})
    lines = examples_of(name)
    assert result.exit_code == 0 and len(lines) >= 2 and "Exit status: 0" in result.stdout
    for line in lines:
        assert line in result.stdout and line.split()[1] == name
        understand(line)


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_the_tests_that_make_runs_exist():
    targets = ("test-cpu", "test-min", "test-torch-min", "gpu")
    lines = subprocess.run(
        ["make", "--dry-run", *targets, "GPU_PYTHON=python"], cwd=PROJECT, capture_output=True, text=True, check=True
    ).stdout
    paths = set(re.findall(r"(?<=\s)tests/[\w/]+(?:\.py)?", lines))
    assert len(paths) > 40 and not [path for path in paths if not (PROJECT / path).exists()]
