"""The GPU benchmark on a CPU, and with torch, triton and transformers alone: one run over everything, and refusals."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import pytest
import torch

from benchmarks import gpu, gpu_attention
from benchmarks.gpu_attention import BASELINES
from benchmarks.gpu_goals import judged
from benchmarks.gpu_run import SMOKE, GpuRun, Stop
from benchmarks.records import read_records
from benchmarks.roofline import Machine
from hf_longspec.attention_backends import registry
from hf_longspec.attention_backends.lengths import SeqLens
from hf_longspec.attention_backends.registry import register_backend
from hf_longspec.attention_backends.torch_backend import TORCH_BACKEND
from hf_longspec.cli.measuring import HF, PLAIN

ROOT = Path(__file__).resolve().parents[2]
TORCH = "hf_longspec_torch"
FIRST = (PLAIN, HF, "LongSpec, 2+2", "SpecAttn, gamma 2")
FEW_BITS = (PLAIN, "SpecAttn, int4 by torch, gamma 2")  # and not by gemlite
OTHERS = (PLAIN, "LongSpec, 2+1", "TokenSwift, verify_hidden", "TokenSwift, partial_kv", "n-grams")


def warnings_of(row):
    """Warnings of a row, but for the one that describes a copy of the target."""
    return [text for text in row["warnings"] if "a copy of" not in text]


def of(records, kind, **where):
    return [r for r in records if r["kind"] == kind and all(r.get(k) == v for k, v in where.items())]


def test_every_case_of_the_plan_is_measured_and_what_is_missing_is_named(tmp_path):
    output = tmp_path / "gpu.jsonl"
    gpu.main(["--smoke", "--quiet", "--threads", "1", "--output", str(output), "--backends", f"{TORCH},not_there"])
    records, report = read_records(output), output.with_suffix(".md").read_text()
    assert report.startswith("# GPU\n") and report.endswith(f"{judged(records)}\n")
    assert not of(records, "failed")
    assert list(dict.fromkeys(record["section"] for record in of(records, "section"))) == list(gpu.SECTIONS)
    timed = {"kernel", "score_rows", "product", "baseline", "forward", "iteration"}
    for record in (record for record in records if record["kind"] in timed):
        assert record["ms"]["median"] > 0 and record["floor_ms"] > 0 and record["how"] == "wall"
    json.dumps(records, allow_nan=False)
    for (batch, context), kind in product(SMOKE.points, ("kernel", "score_rows")):
        assert {r["nodes"] for r in of(records, kind, batch=batch, context=context)} == set(SMOKE.nodes)
    missing = {record.get("baseline") for record in of(records, "skipped")} - {None}  # packages
    assert {record["baseline"] for record in of(records, "baseline")} == set(BASELINES) - missing
    assert any("not_there" in record["reason"] for record in of(records, "skipped"))
    sizes = [(vectors, *matrix) for vectors in SMOKE.vectors for matrix in SMOKE.matrices]
    assert [(r["vectors"], r["rows"], r["columns"]) for r in of(records, "product", kernel="torch")] == sizes
    left_out = of(records, "skipped", kernel="gemlite", reason="device is cpu, expected cuda")
    assert [(r["vectors"], r["rows"], r["columns"]) for r in left_out] == sizes
    drafts = {"iterations": FIRST, "drafts": OTHERS, "uncaptured": FIRST[:2], "few bits": FEW_BITS}
    for section, names in drafts.items():
        rows = of(records, "iteration", context=SMOKE.contexts[0], section=section)
        assert tuple(row["draft"] for row in rows) == names
        for row in rows:  # the gate is off; n-grams draft where the text repeats itself
            expected = {PLAIN: 0, HF: 0, "n-grams": row["speculated"]}
            assert row["speculated"] == expected.get(row["draft"], row["iterations"])
            assert row["ms"]["count"] == row["iterations"] and row["tau"] >= 1
        assert not any(row["captures"] or row["replays"] or warnings_of(row) for row in rows)
        assert rows[0]["tau"] == 1 and rows[0]["same_tokens"] == SMOKE.tokens


@pytest.mark.parametrize(
    ("arguments", "message"), [([], "CUDA device"), (["--smoke", "--sections", "kernel"], "--sections kernel")]
)
def test_what_cannot_run_is_refused_before_anything_is_written(capsys, tmp_path, arguments, message):
    if not arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit):
        gpu.main(["--output", str(tmp_path / "gpu.jsonl"), *arguments])
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def reads_after_the_nodes(query, key, value, lengths, **options):
    everything = SeqLens.equal(key.shape[2], len(key))
    return TORCH_BACKEND.prefix_attention(query, key, value, everything, **options)


def wrong_where_something_is_merged(query, key, value, lengths, **options):
    out, lse = TORCH_BACKEND.prefix_attention(query, key, value, lengths, **options)
    return out, lse * 1.01


@pytest.mark.parametrize("prefix_attention", [reads_after_the_nodes, wrong_where_something_is_merged])
def test_a_wrong_backend_is_not_timed_anywhere(tmp_path, monkeypatch, prefix_attention):
    monkeypatch.setattr(registry, "_backends", dict(registry._backends))
    monkeypatch.setattr(registry, "_priorities", dict(registry._priorities))
    parts = {"name": "wrong", "hybrid_attention": None, "prefix_attention": prefix_attention}
    register_backend(dataclasses.replace(TORCH_BACKEND, **parts))
    plan = dataclasses.replace(SMOKE, nodes=(1, 5), points=SMOKE.points[:1])
    how = {"device": torch.device("cpu"), "dtype": torch.bfloat16, "backends": ["wrong", TORCH], "quiet": True}
    run = GpuRun(tmp_path / "run.jsonl", "gpu", 300, plan=plan, **how)
    run.machine = Machine("m", 1.0, 1.0)
    gpu_attention.kernels(run, slice(None))
    assert "wrong" in run.refused and len(of(run.records, "skipped", backend="wrong")) == 1
    assert not of(run.records, "kernel", backend="wrong", nodes=5) and of(run.records, "kernel", backend=TORCH)
    registry.select.cache_clear()


def lost(run):
    run.write("capture", step="before it was lost")
    raise Stop("the device is lost: illegal access")


def cut_off(run):
    run._file.write('{"kind": "kern')
    run._file.flush()
    os._exit(3)


ENDS = {
    "lost": (lost, "the device is lost: illegal access: the rest of it"),
    "hangs": (lambda run: time.sleep(60), "killed after 10.0 s"),
    "killed": (lambda run: os.kill(os.getpid(), signal.SIGKILL), "its process ended with -9"),
    "cut off": (cut_off, "its process ended with 3"),
}


def test_a_section_that_ends_badly_ends_alone(tmp_path, monkeypatch):
    """What it wrote before stays, and the section after it measures."""
    bad = {end: gpu.Section(measure, 0.5) for end, (measure, _) in ENDS.items()}
    sections = {"ceilings": gpu.SECTIONS["ceilings"], **bad, "kernels": gpu.SECTIONS["kernels"]}
    monkeypatch.setattr(gpu, "SECTIONS", sections)
    output, names = tmp_path / "gpu.jsonl", ",".join(sections)
    gpu.main(["--smoke", "--quiet", "--threads", "1", "--sections", names, "--output", str(output)])
    records = read_records(output)
    for end, (_, reason) in ENDS.items():
        found = [row["reason"] for kind in ("failed", "skipped") for row in of(records, kind, section=end)]
        assert found == [reason]
    assert of(records, "capture", step="before it was lost")
    assert of(records, "kernel") and records[-1]["kind"] == "end"


# Runs programs to which these packages seem not to be installed, each in a fork of a process that has imported torch.
# Others look for the packages: they are not found, not broken.
BARE = """
import json, os, runpy, sys
HIDDEN = {hidden}
class Hiding:
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in HIDDEN else self.finder.find_spec(name, path, target)
sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]
import torch, transformers.generation.utils, transformers.modeling_utils
for folder, *arguments in json.loads(sys.argv[1]):
    if os.fork():
        assert os.wait()[1] == 0, arguments
        continue
    os.chdir(folder)
    sys.argv = arguments
    if arguments[0] == "-m":
        sys.path[0] = folder
        sys.argv = arguments[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.realpath(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")
    break
"""
HIDDEN = {"accelerate", "datasets", "matplotlib", "numba", "pandas", "peft", "rich", "scipy", "sklearn", "tabulate"}
HIDDEN |= {"typer", "yaml_include", "hypothesis", "gemlite"}


@pytest.mark.soak
def test_it_runs_from_a_checkout_with_torch_and_transformers_alone(tmp_path):
    """Where the package is not installed (`-S` leaves out the site's .pth files) and optional packages are missing."""
    script = tmp_path / "bare.py"
    script.write_text(BARE.replace("{hidden}", repr(HIDDEN)))
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    small = ["--smoke", "--sections", "iterations,drafts", "--contexts", "48", "--dtype", "float32", "--threads", "1"]
    output = tmp_path / "gpu.jsonl"
    # as a file from elsewhere, and as a module from the root of the checkout
    programs = [[str(tmp_path), str(ROOT / "benchmarks" / "gpu.py"), *small, "--output", str(output)],
                [str(ROOT), "-m", "benchmarks.gpu", "--help"]]  # fmt: skip
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": packages}
    command = [sys.executable, "-S", str(script), json.dumps(programs)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "--sections" in done.stdout
    records = read_records(output)
    assert records[-1]["kind"] == "end" and not of(records, "failed")
    assert tuple(row["draft"] for row in of(records, "iteration", context=48)) == FIRST + OTHERS
    assert all(row["same_tokens"] == SMOKE.tokens for row in of(records, "iteration"))  # exact: in float32
    assert records[0]["commit"]
