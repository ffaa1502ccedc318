"""The GPU benchmark on a CPU: one run over everything, and what it refuses. Parts that need a GPU are left out by name.

The last test runs the command as it is started on a machine with nothing but torch, triton and transformers.
"""

import dataclasses
import importlib.util
import json
import signal
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import gpu, gpu_attention, gpu_forward
from benchmarks.floors import Machine
from benchmarks.gpu import iteration_floor, iteration_ms
from benchmarks.gpu_attention import BASELINES, LOWER_BOUND
from benchmarks.gpu_run import LLAMA_8B, SMOKE, GpuRun, Stop
from benchmarks.harness import Skip, time_call
from benchmarks.hf_side import HfForward
from benchmarks.pages import PAGES
from benchmarks.predictions import PREDICTIONS
from benchmarks.random_inputs import poisoned_outputs, random_attention
from hf_longspec import LongSpecDraftModel, NgramDraftModel, SpecAttnDraftModel, TokenSwiftDraftModel
from hf_longspec.attention_backends import registry
from hf_longspec.attention_backends.lengths import SeqLens
from hf_longspec.attention_backends.registry import register_backend
from hf_longspec.attention_backends.torch_backend import TORCH_BACKEND
from hf_longspec.bench.calls import PLAIN
from hf_longspec.bench.results import read_records
from hf_longspec.generation import cuda_graphs, decoding
from hf_longspec.testing import tiny_target
from tests.attention_backends import reference  # noqa: F401 - registers its name

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
TORCH = "hf_longspec_torch"
FIRST = (PLAIN, "SpecAttn, gamma 2", "LongSpec, 2+2")
OTHERS = (PLAIN, "LongSpec, 2+1", "TokenSwift, verify_hidden", "TokenSwift, partial_kv", "n-grams")


def of(records, kind, **where):
    return [r for r in records if r["kind"] == kind and all(r.get(k) == v for k, v in where.items())]


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """One run over everything, as on the command line."""
    output = tmp_path_factory.mktemp("gpu") / "gpu.jsonl"
    backends = f"{TORCH},hf_longspec_reference,not_there"
    gpu.main(["--smoke", "--quiet", "--threads", "1", "--output", str(output), "--backends", backends])
    assert output.with_suffix(".md").read_text().startswith("# GPU\n")
    return read_records(output)


@pytest.fixture
def make_run(tmp_path):
    """A function that makes runs; every line of one is in `run.records`."""

    def make(backends=(TORCH,), seconds=300, plan=SMOKE, **how):
        options = {"plan": plan, "device": CPU, "dtype": torch.bfloat16, "backends": backends, "quiet": True}
        run = GpuRun(tmp_path / "run.jsonl", "gpu", seconds, **options, **how)
        run.machine = Machine("m", 1.0, 1.0)
        return run

    return make


def test_every_section_is_measured_in_its_order_and_nothing_failed(records):
    assert not of(records, "failed")
    assert [record["section"] for record in of(records, "section")] == list(gpu.SECTIONS)
    timed = {"kernel", "score_rows", "baseline", "forward", "commit", "iteration", "batch", "fp8"}
    others = "environment prediction gpu_ceilings correctness profile section skipped outcome end"
    assert {record["kind"] for record in records} == timed | set(others.split())
    for record in (record for record in records if record["kind"] in timed):
        assert record["ms"]["median"] > 0 and record["floor_ms"] > 0 and record["how"] == "wall"
    for record in records:
        json.loads(json.dumps(record, allow_nan=False))
    found = records[0]
    assert found["torch"] == torch.__version__ and found["device"] == "cpu" and found["commit"]
    assert {"triton", "transformers", "cuda"} <= set(found)


def test_every_case_of_the_plan_is_measured(records):
    nodes = {*SMOKE.nodes}
    for backend in (TORCH, "hf_longspec_reference"):
        for batch, context in SMOKE.points:
            for kind in ("kernel", "score_rows"):
                found = of(records, kind, backend=backend, batch=batch, context=context)
                assert [record["nodes"] for record in found] == list(SMOKE.nodes)
        for lengths in [[length] for length in SMOKE.lengths] + [list(SMOKE.lengths[-2:])]:
            assert [r["right"] for r in of(records, "correctness", backend=backend, lengths=lengths)] == [True] * 3
        for context in SMOKE.contexts:
            found = of(records, "forward", side="ours", backend=backend, context=context, mode="eager")
            assert {record["nodes"] for record in found} == {*nodes, 8}
        assert {r["batch"] for r in of(records, "batch", backend=backend)} == set(SMOKE.batches)
        assert {r["nodes"] for r in of(records, "fp8", backend=backend)} == nodes
    for context in SMOKE.contexts:
        assert {r["nodes"] for r in of(records, "forward", side="transformers", context=context)} == {1, 8}
    assert {r["side"] for r in of(records, "profile")} == {
        *("transformers", f"ours, {TORCH}", "ours, hf_longspec_reference")
    }
    names = {name for name in BASELINES if not name.startswith(("flashinfer", "xformers"))}
    assert {record["baseline"] for record in of(records, "baseline")} >= names > {LOWER_BOUND}


def test_every_draft_speculates_in_every_timed_iteration(records):
    """The gate is off: it would decide within so few iterations that a random draft does not pay."""
    for context in SMOKE.contexts:
        for section, names in (("iterations", FIRST), ("drafts", OTHERS)):
            rows = of(records, "iteration", context=context, section=section)
            assert tuple(row["draft"] for row in rows) == names
            for row in rows:
                expected = {PLAIN: 0, "n-grams": row["speculated"]}  # n-grams draft where the text repeats itself
                assert row["speculated"] == expected.get(row["draft"], row["iterations"])
                assert row["ms"]["count"] == row["iterations"] and row["c"] > 0 and row["tau"] >= 1
            assert rows[0]["c"] == 1 and rows[0]["tau"] == 1 and rows[0]["same_tokens"] == SMOKE.tokens
    heads = of(records, "iteration", draft="TokenSwift, partial_kv")[0]
    assert heads["c_times_tau"] == pytest.approx(heads["c"] * 3.28, rel=1e-3)
    assert "c_floor" in of(records, "iteration", draft=FIRST[2])[0]


def test_what_is_missing_is_named(records):
    reasons = [record["reason"] for record in of(records, "skipped")]
    assert sum("'not_there' is not an attention backend" in reason for reason in reasons) == 1
    captured = [r for r in of(records, "skipped") if "CUDA graphs need a CUDA device" in r["reason"]]
    assert {(r.get("backend"), r["nodes"]) for r in captured} >= {(TORCH, nodes) for nodes in SMOKE.nodes} | {(None, 8)}
    for name in ("flashinfer", "xformers"):
        if importlib.util.find_spec(name) is None:
            assert reasons.count(f"{name} is not installed") == 1


def test_predictions_come_before_the_first_measurement_and_outcomes_after_the_last(records):
    kinds = [record["kind"] for record in records]
    assert kinds[1 : 1 + len(PREDICTIONS)] == ["prediction"] * len(PREDICTIONS)
    assert kinds[-1 - len(PREDICTIONS) : -1] == ["outcome"] * len(PREDICTIONS)
    outcome = {record["name"]: record for record in of(records, "outcome")}
    assert outcome["prefix bandwidth"]["holds"] is None  # nothing was measured at 32K
    assert outcome["score rows"]["holds"] in (True, False) and outcome["score rows"]["values"]


def line(kind, ms, **values):
    return {"kind": kind, "ms": {"median": ms}, **values}


def test_predictions_are_judged_by_the_lines():
    outcome = lambda name, lines: next(p for p in PREDICTIONS if p.name == name).outcome(lines)  # noqa: E731
    at = {"backend": "b", "batch": 1, "context": 32768}
    kernels = [line("kernel", ms, nodes=nodes, **at) for nodes, ms in [(1, 1.0), (16, 1.1), (64, 3.5)]]
    assert outcome("16 nodes", kernels)["holds"] is True and outcome("16 nodes", kernels)["values"] == [1.1]
    assert outcome("64 nodes", kernels)["holds"] is False and outcome("64 nodes", [])["holds"] is None
    for tbs, times, holds in [(3.1, 1.3, True), (2.9, 1.3, False), (3.1, 1.5, False)]:
        fast = [line("kernel", 1.0, nodes=1, tb_per_second=tbs, times_floor=times, **at)]
        assert outcome("prefix bandwidth", fast)["holds"] is holds
    where = {"side": "transformers", "mode": "eager", "batch": 1, "context": 32768}
    for extra, holds in [(8.0, True), (2.0, False)]:
        pair = [line("forward", 12.0, nodes=1, **where), line("forward", 12.0 + extra, nodes=8, **where)]
        assert outcome("masked block", pair)["holds"] is holds
    step = line("forward", 5.5, side="ours", mode="captured", nodes=1, context=8192, batch=1)
    assert outcome("captured step", [step])["holds"] is True
    assert outcome("floors", [line("iteration", 1.0, draft="d", times_floor=0.9)])["holds"] is False


CAPTURE = 0.3  # seconds, far more than an iteration of the tiny target


@pytest.mark.parametrize("draft", FIRST[1:])
def test_captures_are_not_timed(make_run, monkeypatch, draft):
    """Nearly all graphs are captured in the first iteration, which is left out."""
    captures = []

    def capture(function, device, target):
        """A stand-in for a CUDA graph, which takes long to capture: it calls the function again, outputs in place."""
        outputs = function()
        captures.append(time.sleep(CAPTURE))

        def replay():
            for old, new in zip(cuda_graphs._tensors(outputs), cuda_graphs._tensors(function()), strict=True):
                old.copy_(new)

        return outputs, replay

    monkeypatch.setattr(cuda_graphs, "capture", capture)
    monkeypatch.setattr(decoding, "runner_of", lambda mode, *pair: cuda_graphs.CapturedRunner(*pair[:2]))
    run = make_run(plan=dataclasses.replace(SMOKE, tokens=20))
    made, cache = gpu.first_drafts(run.model, SMOKE)[draft], run.cache(1, 48, slots=9, room=30)
    call, milliseconds, speculated = gpu.generate(run, made, cache, 48, 40, 20)
    assert captures
    assert len(milliseconds) == call.steps - 1 and speculated == len(milliseconds)
    # a longer text may need one more graph, which the median leaves out
    assert 0 < statistics.median(milliseconds) < 1e3 * CAPTURE


def test_iterations_begin_and_end_with_tokens():
    arrivals, emitted = [0.0, 1.0, 1.0, 3.0, 7.0, 7.5], [2, 1, 1, 1]
    assert iteration_ms(arrivals, emitted) == [1000, 2000, 4000, 500]


def test_no_time_left_is_said_and_the_run_ends(make_run):
    run = make_run(seconds=0)
    gpu.execute(run, list(gpu.SECTIONS))
    assert {r["kind"] for r in run.records} == {"environment", "prediction", "skipped", "section", "outcome"}
    skipped = of(run.records, "skipped")
    assert {r["reason"] for r in skipped} == {"no time left"} and [r["part"] for r in skipped] == list(gpu.SECTIONS)


def test_a_section_ends_with_its_own_seconds(make_run):
    run = make_run()
    run.section("kernels", gpu_attention.kernels, until=run.elapsed)
    assert not of(run.records, "kernel")
    assert {r["reason"] for r in of(run.records, "skipped")} == {"no time left"}
    run.section("correctness", gpu_attention.correctness, until=100)  # the time of the next one is its own
    assert of(run.records, "correctness")


def test_a_lost_device_and_the_end_of_the_time_stop_the_run_wherever_it_is(make_run, monkeypatch):
    def lost(run):
        run.write("kernel")
        raise Stop("the device is lost: illegal access")

    sections = {"ceilings": (1.0, lambda run: None), "kernels": (1.0, lost), "forwards": (1.0, lambda run: None)}
    monkeypatch.setattr(gpu, "SECTIONS", sections)
    run = make_run()
    gpu.execute(run, list(sections))
    last = of(run.records, "skipped")[-1]
    assert last["reason"].startswith("the device is lost") and last["part"] == "kernels forwards"
    assert of(run.records, "kernel") and of(run.records, "outcome")

    sections["kernels"] = 1.0, lambda run: time.sleep(60)
    monkeypatch.setattr(signal, "signal", signal.signal)
    run, started = make_run(), time.perf_counter()
    before = signal.signal(signal.SIGALRM, gpu._time_is_over)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    gpu.execute(run, list(sections))
    signal.signal(signal.SIGALRM, before)
    assert time.perf_counter() - started < 30
    assert of(run.records, "skipped")[-1]["reason"].startswith("no time left")


def test_a_whole_run_fits_into_nine_minutes():
    assert sum(seconds for seconds, _ in gpu.SECTIONS.values()) <= 540
    assert gpu.argument_parser().parse_args([]).seconds == 540
    assert LLAMA_8B.contexts == (8192, 32768, 131072)
    assert list(gpu.SECTIONS)[:5] == ["ceilings", "iterations", "correctness", "kernels", "baselines"]


@pytest.mark.parametrize(
    ("arguments", "message"), [([], "there is no CUDA device"), (["--smoke", "--sections", "kernel"], "expected some")]
)
def test_what_cannot_run_is_refused_before_anything_is_written(capsys, tmp_path, arguments, message):
    if not arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit):
        gpu.main(["--output", str(tmp_path / "gpu.jsonl"), *arguments])
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@contextmanager
def registered(name, **functions):
    """A backend made from the torch backend."""
    register_backend(dataclasses.replace(TORCH_BACKEND, name=name, hybrid_attention=None, **functions))
    try:
        yield
    finally:
        del registry._backends[name], registry._priorities[name]
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
    ],
    ids=["output", "log-sum-exp", "unwritten places", "slots after the nodes"],
)
def test_a_wrong_backend_is_not_timed_anywhere(make_run, prefix_attention):
    with registered("wrong", prefix_attention=prefix_attention):
        run = make_run(["wrong", TORCH], plan=dataclasses.replace(SMOKE, nodes=(1, 5), points=SMOKE.points[:1]))
        gpu_attention.correctness(run)
        gpu_attention.kernels(run)
    assert "wrong" in run.refused and len(of(run.records, "correctness", backend="wrong", right=False)) == 1
    assert not of(run.records, "kernel", backend="wrong") and of(run.records, "kernel", backend=TORCH)
    assert next(r["reason"] for r in of(run.records, "skipped", backend="wrong")).startswith("not timed: ")


def test_memory_that_is_handed_out_holds_nan():
    with poisoned_outputs():
        assert bool(torch.empty(3).isnan().all())
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_backend_that_is_wrong_on_the_timed_inputs_only_is_not_timed(make_run):
    late = altered(lambda out, lse, lengths: (out if lengths.longest < 48 else out.flip(-1), lse))
    with registered("late", prefix_attention=late):
        run = make_run(["late"], plan=dataclasses.replace(SMOKE, lengths=(1, 17)))
        gpu_attention.correctness(run)
        assert not run.refused
        gpu_attention.kernels(run)
    assert not of(run.records, "kernel")
    assert all("its error is" in r["reason"] for r in of(run.records, "skipped"))


def test_an_error_is_a_line_and_the_run_goes_on(make_run):
    def broken(*args, **options):
        raise RuntimeError("no such instruction")

    with registered("broken", prefix_attention=broken):
        run = make_run(["broken", TORCH], plan=dataclasses.replace(SMOKE, points=SMOKE.points[:1]))
        gpu_attention.kernels(run)
    failed = of(run.records, "failed", backend="broken")
    assert len(failed) == len(of(run.records, "kernel", backend=TORCH)) == len(SMOKE.nodes)
    assert "no such instruction" in PAGES["gpu"].report(run.records)


def test_the_exact_state_is_a_loop_over_keys():
    case = random_attention(SMOKE.shape, (3, 7), 4, 1, CPU, torch.float32)
    out, lse = case.exact(case.layers[0])
    keys, values = (part.double() for part in case.layers[0])
    for row, length in enumerate(case.lengths):
        for node in range(4):
            seen = [*range(length), *(length + j for j in range(4) if case.tree.mask[row, node, j])]
            for head in range(4):
                scores = keys[row, head // 2, seen] @ case.query[row, head, node].double() / 4
                assert torch.allclose(lse[row, head, node], scores.logsumexp(0))
                assert torch.allclose(out[row, head, node], scores.softmax(0) @ values[row, head // 2, seen])
        assert bool(keys[row, :, length + 4 :].isnan().all())
    assert gpu_attention.errors((out, lse), (out, lse)) == (0.0, 0.0)
    assert gpu_attention.errors((out * torch.nan, lse), (out, lse))[0] != 0.0


def test_a_forward_whose_logits_differ_is_not_timed(make_run, monkeypatch):
    run, honest = make_run(plan=dataclasses.replace(SMOKE, contexts=(48,))), HfForward.__call__
    monkeypatch.setattr(HfForward, "__call__", lambda self, tree: 1.2 * honest(self, tree))
    gpu_forward.forwards(run)
    assert not of(run.records, "forward", side="ours") and of(run.records, "forward", side="transformers")
    reasons = [r["reason"] for r in of(run.records, "skipped")]
    assert sum("its logits are off by" in reason for reason in reasons) == len({*SMOKE.nodes, 8})


def test_a_call_that_takes_too_long_is_not_repeated():
    calls = []
    with pytest.raises(Skip, match=r"12 do not fit into 0\.0 s"):
        time_call(lambda: calls.append(torch.randn(200, 200) @ torch.randn(200, 200)), CPU, limit=1e-6)
    assert len(calls) == 2


def test_what_does_not_fit_into_memory_is_said(make_run):
    for free, what in [(1_000, "the random target needs"), (60_000, "transformers' cache and its copy")]:
        run = make_run(memory_bytes=free, plan=dataclasses.replace(SMOKE, contexts=(128,)))
        gpu_forward.forwards(run)
        assert not of(run.records, "forward")
        reasons = [record["reason"] for record in of(run.records, "skipped")]
        assert any(what in reason for reason in reasons), reasons


def test_fp8_layers_are_close_to_what_they_replace():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64, bias=False), nn.Sequential(nn.Linear(64, 16, bias=False))).bfloat16()
    hidden = torch.randn(2, 3, 32).bfloat16()
    exact = model[0](hidden).double()
    assert gpu_forward.quantise(model) == 2 and isinstance(model[1][0], gpu_forward.Fp8Linear)
    off = (model[0](hidden).double() - exact).norm() / exact.norm()
    assert 1e-3 < off < 0.06  # three bits of mantissa in each factor: 2**-4 at most, half of that on average
    assert model(hidden).shape == (2, 3, 16)


def test_floors_of_drafts_follow_their_settings(make_run):
    at, target = make_run().roofline(1, 1000), tiny_target("llama")
    settings = {"num_assistant_tokens": 3, "sparse_ratio": 0.07, "sparse_min_tokens": 256}
    assert iteration_floor(SpecAttnDraftModel.from_target(target, **settings), at) == at.specattn(3, 0.256)
    tree = LongSpecDraftModel.from_target(target, window=512, tree_widths=[4, 4])
    assert iteration_floor(tree, at) == at.longspec([4, 4], 512)
    heads = TokenSwiftDraftModel.from_target(target)
    heads.generation_config.update(tree_branching=[1, 3], self_draft="partial_kv", partial_kv_budget=64)
    assert iteration_floor(heads, at) == at.tokenswift([1, 3], budget=64)
    heads.generation_config.self_draft = "verify_hidden"
    assert iteration_floor(heads, at) == at.tokenswift([1, 3], budget=None)
    assert iteration_floor(NgramDraftModel.from_target(target), at) is None


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
