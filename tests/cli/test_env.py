"""`env`: complete, and without anything that says whose machine it is; and its facts in result files."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import transformers

import hf_longspec
from hf_longspec.attention_backends import registry
from hf_longspec.cli import env

PROJECT = str(env.Path(env.__file__).parents[2])
SECRETS = {"HOME": "/home/gwendolyn", "USER": "gwendolyn", "LOGNAME": "gwendolyn", "HF_TOKEN": "hf_verysecret"}
SECRETS |= {"HF_HOME": "/home/gwendolyn/cache", "CUDA_VISIBLE_DEVICES": "/dev/gwendolyn", "OMP_NUM_THREADS": "1"}


def test_a_report_tells_versions_and_no_secrets(command, tmp_path, monkeypatch):
    folder = tmp_path / "gwendolyn"
    folder.mkdir()
    monkeypatch.chdir(folder)
    result = command("env", env=SECRETS)
    assert result.exit_code == 0, result.stderr
    for value in (f"hf_longspec: {hf_longspec.__version__}", f"transformers: {transformers.__version__}", "threads: 1",
                  f"torch: {torch.__version__}",
                  "hf_longspec_torch:\n    float32: available"):  # fmt: skip
        assert value in result.stdout, value
    for secret in ("gwendolyn", "verysecret", str(tmp_path), sys.prefix, PROJECT, "/home", "/tmp"):
        assert secret not in result.stdout, secret


def test_json_has_every_backend_with_the_reason_against_it_and_no_paths(monkeypatch, command):
    monkeypatch.setattr(registry, "why_not", lambda name, call: f"cannot load /home/gwendolyn/lib.so for {call.dtype}")
    found = json.loads(command("env", "--json").stdout)
    assert list(found["backends"]) == registry.backend_names() and "transformers" in found["packages"]
    assert found["backends"]["hf_longspec_torch"]["bfloat16"] == "cannot load ... for torch.bfloat16"


def test_the_commit_is_that_of_this_project_or_none(monkeypatch, command, tmp_path):
    """An environment inside somebody else's repository does not report that repository's commit."""
    monkeypatch.setattr(env, "git_commit", lambda: "abc")
    for folder, commit in (("own", "abc"), ("other/site-packages", None)):
        (tmp_path / folder.partition("/")[0] / ".git").mkdir(parents=True)
        monkeypatch.setattr(env, "__file__", str(tmp_path / folder / "hf_longspec" / "cli" / "env.py"))
        assert json.loads(command("env", "--json").stdout)["commit"] == commit


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
    assert env.command() == f"{expected} --data 'a b' --output sub/f --set=a=r org/model"


def test_commit_marks_changed_files_but_not_results(tmp_path):
    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    result = tmp_path / "benchmarks" / "results" / "gate.jsonl"
    result.parent.mkdir(parents=True)
    assert env.git_commit(tmp_path) is None
    git("init")
    for file in (result, tmp_path / "code.py"):
        file.write_text("1")
    git("add", ".")
    git("commit", "-m", "first")
    clean = env.git_commit(tmp_path)
    result.write_text("2")
    assert clean
    assert env.git_commit(tmp_path) == clean
    (tmp_path / "code.py").write_text("2")
    assert env.git_commit(tmp_path) == clean + "+"
