"""One run of the whole GPU benchmark on a CPU. Parts that need a GPU are left out by name."""

import dataclasses
import importlib.util
import json

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu import GpuBenchmark
from benchmarks.gpu_baselines import BASELINES, LOWER_BOUND
from benchmarks.gpu_report import PREDICTIONS
from benchmarks.gpu_run import PLANS, SECONDS
from hf_longspec.bench.calls import PLAIN
from hf_longspec.bench.results import read_records
from tests.benchmarks.gpu_runs import PLAN, of, runs_in


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """One run over everything, as on the command line."""
    output = tmp_path_factory.mktemp("gpu") / "gpu.jsonl"
    arguments = ["--device", "cpu", "--shape", "tiny", "--quiet", "--threads", "1", "--output", str(output)]
    gpu.main([*arguments, "--backends", "hf_longspec_torch,hf_longspec_reference,not_there"])
    return read_records(output)


@pytest.fixture
def make_run(tmp_path):
    with runs_in(tmp_path) as make:
        yield make


def test_every_kind_of_line_is_there_and_nothing_failed(records):
    assert not of(records, "failed")
    kinds = {record["kind"] for record in records}
    timed = {"kernel", "score_rows", "baseline", "forward", "commit", "iteration", "batch", "fp8"}
    assert kinds == timed | {
        *("environment", "prediction", "gpu_ceilings", "correctness", "profile", "section", "skipped", "outcome", "end")
    }
    assert [record["section"] for record in of(records, "section")] == [
        *("ceilings", "correctness", "kernels", "baselines", "forwards", "iterations", "profile", "batches", "long"),
        "quantised",
    ]
    for record in records:
        if record["kind"] in timed:
            assert record["ms"]["median"] > 0 and record["floor_ms"] > 0 and record["how"] == "wall"
            # iterations are timed a few times over many steps, the others as often as the plan says
            assert record["ms"]["count"] == (3 if record["kind"] == "iteration" else PLAN.repeats)


def test_every_case_of_the_plan_is_measured(records):
    points = [*PLAN.points, (1, PLAN.long_context)]
    for backend in ("hf_longspec_torch", "hf_longspec_reference"):
        for batch, context in points:
            for nodes in PLAN.nodes:
                where = {"backend": backend, "batch": batch, "context": context, "nodes": nodes}
                assert len(of(records, "kernel", **where)) == len(of(records, "score_rows", **where)) == 1
        for lengths in [[length] for length in PLAN.lengths] + [list(PLAN.lengths[-2:])]:
            assert [r["right"] for r in of(records, "correctness", backend=backend, lengths=lengths)] == [True] * 3
        for context in (*PLAN.contexts, PLAN.long_context):
            where = {"side": "ours", "backend": backend, "context": context, "mode": "eager"}
            assert {r["nodes"] for r in of(records, "forward", **where)} == {*PLAN.nodes, 8}
        assert {r["batch"] for r in of(records, "batch", backend=backend)} == set(PLAN.batches)
        assert {r["nodes"] for r in of(records, "fp8", backend=backend)} == set(PLAN.nodes)
    for context in (*PLAN.contexts, PLAN.long_context):
        assert {r["nodes"] for r in of(records, "forward", side="transformers", context=context)} == {1, 8}
        drafts = {r["draft"]: r for r in of(records, "iteration", context=context)}
        assert set(drafts) == {
            *(PLAIN, "SpecAttn, gamma 2", "LongSpec, 2+2", "TokenSwift, verify_hidden", "TokenSwift, partial_kv"),
            "n-grams",
        }
        assert drafts[PLAIN]["c"] == 1 and all(0 < r["c"] for r in drafts.values())
        assert "c_floor" in drafts["LongSpec, 2+2"] and drafts["LongSpec, 2+2"]["tau_of_paper"] is None
        found = drafts["TokenSwift, partial_kv"]
        assert found["c_times_tau"] == pytest.approx(found["c"] * 3.28, rel=1e-3)
    sides = {r["side"] for r in of(records, "profile")}
    assert sides == {"transformers", "ours, hf_longspec_torch", "ours, hf_longspec_reference"}
    assert all(r["top"][0]["ms"] > 0 for r in of(records, "profile"))


def test_what_is_missing_is_named(records):
    reasons = [record["reason"] for record in of(records, "skipped")]
    assert sum("'not_there' is not an attention backend" in reason for reason in reasons) == 1
    captured = [r for r in of(records, "skipped") if "CUDA graphs need a CUDA device" in r["reason"]]
    assert {(r.get("backend"), r["nodes"]) for r in captured} >= {
        *(("hf_longspec_torch", nodes) for nodes in PLAN.nodes),
        *((None, nodes) for nodes in (1, 8)),  # transformers' side
    }
    installed = {name for name in ("flashinfer", "xformers") if importlib.util.find_spec(name)}
    for name in {"flashinfer", "xformers"} - installed:
        assert f"{name} is not installed" in reasons
    baselines = {record["baseline"] for record in of(records, "baseline")}
    assert baselines >= {name for name in BASELINES if not name.startswith(("flashinfer", "xformers"))}


def test_predictions_come_before_the_first_measurement_and_outcomes_after_the_last(records):
    kinds = [record["kind"] for record in records]
    assert kinds[1 : 1 + len(PREDICTIONS)] == ["prediction"] * len(PREDICTIONS)
    assert kinds[-1 - len(PREDICTIONS) : -1] == ["outcome"] * len(PREDICTIONS)
    outcome = {record["name"]: record for record in of(records, "outcome")}
    assert outcome["prefix bandwidth"]["holds"] is None  # nothing was measured at 32K
    assert outcome["score rows"]["holds"] in (True, False) and outcome["score rows"]["values"]


def test_lines_are_json_without_nan(records):
    for record in records:
        json.loads(json.dumps(record, allow_nan=False))
    assert LOWER_BOUND in {record["baseline"] for record in of(records, "baseline")}


def test_no_time_left_is_said_and_the_run_ends(make_run):
    run = make_run(minutes=0)
    GpuBenchmark(run, gpu.make_drafts).execute()
    lines = run.results.records
    assert {r["kind"] for r in lines} == {"environment", "prediction", "skipped", "section", "outcome"}
    assert {r["reason"] for r in of(lines, "skipped")} == {"no time left"}
    assert [r["part"] for r in of(lines, "skipped")] == list(GpuBenchmark(run, None).sections())


def test_a_section_ends_with_its_own_seconds(make_run):
    run = make_run(plan=dataclasses.replace(PLAN, seconds={**SECONDS, "kernels": 0.0}))
    benchmark = GpuBenchmark(run, gpu.make_drafts)
    run.section("kernels", lambda: benchmark.attention.kernels(PLAN.points))
    assert not of(run.results.records, "kernel")
    assert {r["reason"] for r in of(run.results.records, "skipped")} == {"no time left"}
    run.section("correctness", benchmark.attention.correctness)  # the time of the next one is its own
    assert of(run.results.records, "correctness")


def test_sections_of_a_whole_run_fit_into_nine_minutes():
    assert sum(SECONDS.values()) <= 9 * 60
    for plan in PLANS.values():
        assert set(plan.seconds) == set(SECONDS)


def test_a_cuda_run_without_a_gpu_is_refused(capsys, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit):
        gpu.main(["--output", str(tmp_path / "gpu.jsonl")])
    assert "there is no CUDA device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
