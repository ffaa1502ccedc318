"""The GPU benchmark on a CPU, and with torch, triton and transformers alone: one run over everything, and refusals."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import gpu, gpu_attention
from benchmarks.gpu_attention import BASELINES
from benchmarks.gpu_checks import CASES
from benchmarks.gpu_iterations import GRAPH, OFF, require_replays
from benchmarks.gpu_run import SMOKE, GpuRun, Stop
from benchmarks.harness import Skip
from benchmarks.roofline import Machine
from hf_longspec.attention_backends import registry
from hf_longspec.attention_backends.lengths import SeqLens
from hf_longspec.attention_backends.registry import register_backend
from hf_longspec.attention_backends.torch_backend import TORCH_BACKEND
from hf_longspec.bench.calls import HF, PLAIN
from hf_longspec.bench.results import read_records

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
TORCH = "hf_longspec_torch"
FIRST = (PLAIN, "LongSpec, 2+2", "SpecAttn, gamma 2", HF, HF, HF)  # stock `generate` in three modes
OTHERS = (PLAIN, "LongSpec, 2+1", "TokenSwift, verify_hidden", "TokenSwift, partial_kv", "n-grams")


def of(records, kind, **where):
    return [r for r in records if r["kind"] == kind and all(r.get(k) == v for k, v in where.items())]


@pytest.fixture
def make_run(tmp_path):
    """A function that makes runs; every line of one is in `run.records`."""

    def make(backends, **plan):
        options = {"device": CPU, "dtype": torch.bfloat16, "backends": backends, "quiet": True}
        run = GpuRun(tmp_path / "run.jsonl", "gpu", 300, plan=dataclasses.replace(SMOKE, **plan), **options)
        run.machine = Machine("m", 1.0, 1.0)
        return run

    return make


def test_every_case_of_the_plan_is_measured_and_what_is_missing_is_named(tmp_path):
    output = tmp_path / "gpu.jsonl"
    gpu.main(["--smoke", "--quiet", "--threads", "1", "--output", str(output), "--backends", f"{TORCH},not_there"])
    assert output.with_suffix(".md").read_text().startswith("# GPU\n")
    records = read_records(output)
    assert not of(records, "failed")
    assert list(dict.fromkeys(record["section"] for record in of(records, "section"))) == list(gpu.SECTIONS)
    timed = {"kernel", "score_rows", "baseline", "forward", "iteration"}
    for record in (record for record in records if record["kind"] in timed):
        assert record["ms"]["median"] > 0 and record["floor_ms"] > 0 and record["how"] == "wall"
    for record in records:
        json.loads(json.dumps(record, allow_nan=False))
    assert records[0]["device"] == "cpu" and {"triton", "transformers", "cuda"} <= set(records[0])
    for batch, context in SMOKE.points:
        for kind in ("kernel", "score_rows"):
            assert {r["nodes"] for r in of(records, kind, batch=batch, context=context)} == set(SMOKE.nodes)
    missing = {record.get("baseline") for record in of(records, "skipped")} - {None}  # packages
    assert {record["baseline"] for record in of(records, "baseline")} == set(BASELINES) - missing
    assert missing <= {"flashinfer, mask"}
    reasons = [record["reason"] for record in of(records, "skipped")]
    assert any("not_there" in reason for reason in reasons)
    assert len(of(records, "features")) == CASES
    assert any("CUDA graphs" in reason for reason in reasons)
    for section, names in (("iterations", FIRST), ("drafts", OTHERS)):
        rows = of(records, "iteration", context=SMOKE.contexts[0], section=section)
        assert tuple(row["draft"] for row in rows) == names
        for row in rows:  # the gate is off; n-grams draft where the text repeats itself
            expected = {PLAIN: 0, HF: 0, "n-grams": row["speculated"]}
            assert row["speculated"] == expected.get(row["draft"], row["iterations"])
            assert row["ms"]["count"] == row["iterations"] and row["c"] > 0 and row["tau"] >= 1
        assert not any(row["captures"] or row["replays"] or row["warnings"] for row in rows)
        assert rows[0]["c"] == 1 and rows[0]["tau"] == 1 and rows[0]["same_tokens"] == SMOKE.tokens


def lost(run):
    run.write("capture", step="before it was lost")
    raise Stop("the device is lost: illegal access")


def without_memory(run):
    raise torch.OutOfMemoryError("no memory")


def cut_off(run):
    run._file.write('{"kind": "kern')
    run._file.flush()
    os._exit(3)


ENDS = {
    "lost": (lost, "the device is lost: illegal access: the rest of it"),
    "hangs": (lambda run: time.sleep(60), "killed after 0.5 s"),
    "killed": (lambda run: os.kill(os.getpid(), signal.SIGKILL), "its process ended with -9"),
    "without memory": (without_memory, "out of memory: no memory"),
    "cut off": (cut_off, "its process ended with 3"),
}


def test_a_section_that_ends_badly_ends_alone(tmp_path, monkeypatch, capsys):
    """The sections after it run, and the report has all that was measured."""
    sections = {name: gpu.Section(measure, 0.5 if name == "hangs" else 20) for name, (measure, _) in ENDS.items()}
    sections = {"ceilings": gpu.SECTIONS["ceilings"], **sections, "kernels": gpu.SECTIONS["kernels"]}
    monkeypatch.setattr(gpu, "SECTIONS", sections)
    output = tmp_path / "gpu.jsonl"
    arguments = ["--smoke", "--quiet", "--threads", "1", "--backends", TORCH, "--output", str(output)]
    gpu.main([*arguments, "--sections", ",".join(sections)])
    records = read_records(output)
    for name, (_, reason) in ENDS.items():
        found = [r["reason"] for kind in ("failed", "skipped") for r in of(records, kind, section=name)]
        assert found == [reason]
    assert of(records, "capture", step="before it was lost") and of(records, "kernel", section="kernels", backend=TORCH)
    assert records[-1]["kind"] == "end" and "## Attention of one layer" in capsys.readouterr().out

    gpu.main([*arguments, "--minutes", "0.01"])
    assert {record["reason"] for record in of(read_records(output), "skipped")} == {"no time left"}


def test_captured_steps_without_a_replay_are_no_row():
    counts = {"captures": 0, "replays": 0, "warnings": ["it could not be captured"]}
    with pytest.raises(Skip, match="no graph was replayed: it could not be captured"):
        require_replays(GRAPH, counts)
    require_replays(OFF, counts)
    require_replays(GRAPH, counts | {"replays": 1})


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


@pytest.fixture
def register(monkeypatch):
    """A function that registers a backend made from the torch backend."""

    def made(name, prefix_attention):
        parts = {"hybrid_attention": None, "prefix_attention": prefix_attention}
        register_backend(dataclasses.replace(TORCH_BACKEND, name=name, **parts))
        return name

    monkeypatch.setattr(registry, "_backends", dict(registry._backends))
    monkeypatch.setattr(registry, "_priorities", dict(registry._priorities))
    yield made
    registry.select.cache_clear()


def altered(change):
    """A prefix attention whose output and log-sum-exp are changed."""

    def prefix_attention(query, key, value, lengths, **options):
        return change(*TORCH_BACKEND.prefix_attention(query, key, value, lengths, **options), lengths)

    return prefix_attention


def unwritten(out, lse, lengths):
    found = torch.empty_like(out)
    found[:, :, :, :-1] = out[:, :, :, :-1]
    return found, lse


def reads_after_the_nodes(query, key, value, lengths, **options):
    everything = SeqLens.equal(key.shape[2], len(key))
    return TORCH_BACKEND.prefix_attention(query, key, value, everything, **options)


@pytest.mark.parametrize(
    "prefix_attention",
    [
        altered(lambda out, lse, lengths: (out * 1.03, lse)),
        altered(lambda out, lse, lengths: (out, lse * 1.01)),  # wrong only where something is merged
        altered(unwritten),
        reads_after_the_nodes,
        altered(lambda out, lse, lengths: (out if lengths.longest < 64 else out.flip(-1), lse)),
    ],
    ids=["output", "log-sum-exp", "unwritten places", "slots after the nodes", "timed inputs only"],
)
def test_a_wrong_backend_is_not_timed_anywhere(make_run, register, prefix_attention):
    run = make_run([register("wrong", prefix_attention), TORCH], nodes=(1, 5), points=SMOKE.points[:1])
    gpu_attention.kernels(run, slice(None))
    assert "wrong" in run.refused and len(of(run.records, "skipped", backend="wrong")) == 1
    assert not of(run.records, "kernel", backend="wrong", nodes=5) and of(run.records, "kernel", backend=TORCH)


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
HIDDEN |= {"typer", "yaml_include", "hypothesis"}


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
