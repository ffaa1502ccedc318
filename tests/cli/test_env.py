"""`env`: complete, and without anything that says whose machine it is."""

import json
import sys

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
                  f"torch: {torch.__version__}", "OMP_NUM_THREADS: '1'",
                  "hf_longspec_torch:\n    float32: available"):  # fmt: skip
        assert value in result.stdout, value
    for secret in ("gwendolyn", "verysecret", str(tmp_path), sys.prefix, PROJECT, "/home", "/tmp"):
        assert secret not in result.stdout, secret


def test_json_has_every_backend_with_its_answer(command):
    found = json.loads(command("env", "--json").stdout)
    assert list(found["backends"]) == registry.backend_names()
    assert set(found["packages"]) >= {"transformers", "safetensors", "typer"}
    assert found["threads"] == torch.get_num_threads()
    assert found["generate_patched"] is True


def test_reasons_against_a_backend_are_shown_without_paths(monkeypatch, command):
    monkeypatch.setattr(registry, "why_not", lambda name, call: f"cannot load /home/gwendolyn/lib.so for {call.dtype}")
    found = json.loads(command("env", "--json").stdout)["backends"]
    assert found["hf_longspec_torch"]["bfloat16"] == "cannot load ... for torch.bfloat16"


@pytest.mark.parametrize("in_checkout", [True, False])
def test_the_commit_is_that_of_this_project_or_none(monkeypatch, command, tmp_path, in_checkout):
    """An environment inside somebody else's repository does not report that repository's commit."""
    monkeypatch.setattr(env, "environment", lambda: dict.fromkeys(
        ("cpu", "cores", "usable_cores", "threads", "simd", "native_bfloat16", "memory_gib", "python", "torch"), 1
    ) | {"commit": "abc"})  # fmt: skip
    package = tmp_path / ("own" if in_checkout else "other/site-packages")
    (package / "hf_longspec" / "cli").mkdir(parents=True)
    (tmp_path / ("own" if in_checkout else "other") / ".git").mkdir()
    monkeypatch.setattr(env, "__file__", str(package / "hf_longspec" / "cli" / "env.py"))
    assert json.loads(command("env", "--json").stdout)["commit"] == ("abc" if in_checkout else None)
