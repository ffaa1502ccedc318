"""The environment, the command and the commit, as result files have them."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from hf_longspec.cli.env import command, environment, git_commit


def test_environment_is_complete_and_fit_for_json():
    found = json.loads(json.dumps(environment()))
    wanted = {"cpu", "cores", "native_bfloat16", "torch", "transformers", "threads", "commit", "command", "date"}
    assert wanted <= set(found)
    assert found["threads"] == torch.get_num_threads()


@pytest.mark.parametrize(
    ("script", "module", "expected"),
    [
        ("{here}/run.py", None, "python run.py"),
        ("{here}/x.py", "benchmarks.gate", "python -m benchmarks.gate"),
        ("/opt/bin/hf-longspec", None, "hf-longspec"),
        ("/a/b/cli/app.py", "hf_longspec.cli.app", "hf-longspec"),
    ],
)
def test_commands_lose_their_folders(script, module, expected, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    given = ["--data", "/x/y/a b", "--output", str(tmp_path / "sub" / "f"), "--set=a=/q/r", "org/model"]
    monkeypatch.setattr(sys, "argv", [script.format(here=tmp_path), *given])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", module and SimpleNamespace(name=module))
    assert command() == f"{expected} --data 'a b' --output sub/f --set=a=r org/model"


def test_commit_marks_changed_files_but_not_results(tmp_path):
    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    result = tmp_path / "benchmarks" / "results" / "gate.jsonl"
    result.parent.mkdir(parents=True)
    assert git_commit(tmp_path) is None
    git("init")
    for file in (result, tmp_path / "code.py"):
        file.write_text("1")
    git("add", ".")
    git("commit", "-m", "first")
    clean = git_commit(tmp_path)
    result.write_text("2")
    assert clean
    assert git_commit(tmp_path) == clean
    (tmp_path / "code.py").write_text("2")
    assert git_commit(tmp_path) == clean + "+"
