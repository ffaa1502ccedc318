"""The makefile of the bundled pair: the programs that it runs understand their options."""

import os
import re
import shlex
import subprocess
import sys

import pytest

from tests.scripts import PROJECT, script

TARGETS = ("target", "drafts", "variants", "publish")


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    """Every call of a program of recipes/, without running one: the name, and its arguments."""
    runs = tmp_path_factory.mktemp("runs")
    dry = ["make", "-n", "-f", "recipes/tiny_pair.mk", *TARGETS, f"RUNS={runs}", "PARENT=hub_cards/tiny-target"]
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    result = subprocess.run(dry, cwd=PROJECT, env=environment, check=True, capture_output=True, text=True)
    lines = result.stdout.replace("\\\n", " ").replace("$kind", "eagle3").splitlines()
    calls = [call for line in lines for call in re.findall(r"recipes/(\w+)\.py ([^|;]*)", line)]
    return [(name, shlex.split(arguments)) for name, arguments in calls]


def test_every_program_is_run_with_options_that_it_has(commands, monkeypatch):
    """Three stages of LongSpec and of each of its variants, two of the other drafts and of the paper's heads."""
    names = [name for name, _ in commands]
    assert names.count("train_tiny_draft") == 3 * (1 + 5) + 2 * (4 + 1)
    assert {"train_tiny_target", "publish_tiny_target", "publish_tiny_draft", "write_target_texts"} < set(names)
    monkeypatch.chdir(PROJECT)
    for name, arguments in commands:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        script(name).parse_arguments()  # leaves the process for an option that it does not have
