"""Every path of the GPU benchmark, on a CPU. What only a GPU can do is seen to be left out by name."""

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from hf_longspec.attention_backends import registry
from hf_longspec.attention_backends.registry import AttentionBackend, register_backend
from hf_longspec.attention_backends.torch_sdpa import TORCH_BACKEND
from hf_longspec.bench.engine import PLAIN
from hf_longspec.bench.gpu import GpuBenchmark
from hf_longspec.bench.gpu_attention import AttentionSections, errors
from hf_longspec.bench.gpu_baselines import BASELINES, LOWER_BOUND
from hf_longspec.bench.gpu_device import Device, Skip, poisoned_outputs
from hf_longspec.bench.gpu_forward import ForwardSections, HfForward
from hf_longspec.bench.gpu_inputs import random_attention
from hf_longspec.bench.gpu_iterations import TimedDraft, compiled_step, iteration_floor
from hf_longspec.bench.gpu_plan import PLANS, SECONDS, TINY
from hf_longspec.bench.gpu_predictions import PREDICTIONS
from hf_longspec.bench.gpu_report import gpu_report
from hf_longspec.bench.gpu_run import GpuRun
from hf_longspec.bench.gpu_variants import Fp8Linear, quantise
from hf_longspec.bench.progress import Progress
from hf_longspec.bench.results import ResultFile, read_records
from hf_longspec.bench.roofline_shapes import Machine
from hf_longspec.bench.timing import TimeGuard

CPU = torch.device("cpu")
PLAN = PLANS["tiny"]


def script():
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu.py"
    spec = importlib.util.spec_from_file_location("benchmarks_gpu", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """One run over everything, as on the command line."""
    output = tmp_path_factory.mktemp("gpu") / "gpu.jsonl"
    arguments = ["--device", "cpu", "--shape", "tiny", "--quiet", "--threads", "1", "--output", str(output)]
    script().main([*arguments, "--backends", "hf_longspec_torch,hf_longspec_reference,not_there"])
    return read_records(output)


@pytest.fixture
def make_run(tmp_path):
    """Runs of single sections; every line of the last one is in `run.results.records`."""
    opened = []

    def make(backends=("hf_longspec_torch",), minutes=5, plan=PLAN, dtype=torch.bfloat16, **device):
        results = ResultFile(tmp_path / "run.jsonl", "gpu", gpu_report, TimeGuard(minutes), {})
        opened.append(results)
        target = Device(CPU, plan.repeats, **device)
        return GpuRun(plan, target, dtype, list(backends), results, Progress(1, quiet=True), Machine("m", 1.0, 1.0))

    yield make
    for results in opened:
        results.__exit__(None, None, None)


@pytest.fixture
def registered():
    """Backends made from the torch backend for one test."""
    names = []

    def register(name, **functions):
        names.append(name)
        return register_backend(dataclasses.replace(TORCH_BACKEND, name=name, hybrid_attention=None, **functions))

    yield register
    for name in names:
        del registry._backends[name], registry._priorities[name]
    registry._selected.clear()


def of(records, kind, **where):
    return [r for r in records if r["kind"] == kind and all(r.get(k) == v for k, v in where.items())]


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
    assert {(r["backend"], r["nodes"]) for r in captured} >= {("hf_longspec_torch", nodes) for nodes in PLAN.nodes}
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


def test_a_wrong_backend_is_not_timed_anywhere(make_run, registered):
    def louder(query, key, value, lengths, **options):
        out, lse = TORCH_BACKEND.prefix_attention(query, key, value, lengths, **options)
        return out * 1.03, lse

    registered("louder", prefix_attention=louder)
    run = make_run(["louder", "hf_longspec_torch"])
    sections = AttentionSections(run)
    sections.correctness()
    sections.kernels(PLAN.points)
    lines = run.results.records
    assert "louder" in run.refused and len(of(lines, "correctness", backend="louder", right=False)) == 1
    assert not of(lines, "kernel", backend="louder") and of(lines, "kernel", backend="hf_longspec_torch")
    assert next(r["reason"] for r in of(lines, "skipped", backend="louder")).startswith("not timed: ")


def test_a_wrong_log_sum_exp_is_found_though_the_output_is_right(make_run, registered):
    def off(query, key, value, lengths, **options):
        out, lse = TORCH_BACKEND.prefix_attention(query, key, value, lengths, **options)
        return out, lse * 1.01

    registered("off", prefix_attention=off)
    run = make_run(["off"])
    AttentionSections(run).correctness()
    first = of(run.results.records, "correctness")[0]  # a lone node: nothing is merged
    assert first["error"] <= run.budget and not first["right"]


def test_a_backend_that_leaves_places_unwritten_is_wrong(make_run, registered):
    def lazy(query, key, value, lengths, **options):
        out, lse = TORCH_BACKEND.prefix_attention(query, key, value, lengths, **options)
        unwritten = torch.empty_like(out)
        unwritten[:, :, :, :-1] = out[:, :, :, :-1]
        return unwritten, lse

    registered("lazy", prefix_attention=lazy)
    run = make_run(["lazy"])
    AttentionSections(run).correctness()
    assert of(run.results.records, "correctness")[0]["error"] == "nan" and "lazy" in run.refused
    with poisoned_outputs():
        assert bool(torch.empty(3).isnan().all())
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_backend_that_reads_behind_the_nodes_is_wrong(make_run, registered):
    def greedy(query, key, value, lengths, **options):
        everything = torch.full_like(lengths, key.shape[2])
        options["host_lengths"] = (key.shape[2],) * len(lengths)
        return TORCH_BACKEND.prefix_attention(query, key, value, everything, **options)

    registered("greedy", prefix_attention=greedy)
    run = make_run(["greedy"], plan=dataclasses.replace(PLAN, nodes=(5,)))
    AttentionSections(run).correctness()
    assert "greedy" in run.refused


def test_a_backend_that_is_wrong_on_the_timed_inputs_only_is_not_timed(make_run, registered):
    def breaks(query, key, value, lengths, **options):
        out, lse = TORCH_BACKEND.prefix_attention(query, key, value, lengths, **options)
        return (out if int(lengths.max()) < 48 else out.flip(-1)), lse

    registered("breaks", prefix_attention=breaks)
    run = make_run(["breaks"], plan=dataclasses.replace(PLAN, lengths=(1, 17)))
    sections = AttentionSections(run)
    sections.correctness()
    assert not run.refused
    sections.kernels(PLAN.points)
    assert not of(run.results.records, "kernel")
    assert all("its error is" in r["reason"] for r in of(run.results.records, "skipped"))


def test_an_error_is_a_line_and_the_run_goes_on(make_run, registered):
    def broken(*args, **options):
        raise RuntimeError("no such instruction")

    registered("broken", prefix_attention=broken)
    run = make_run(["broken", "hf_longspec_torch"])
    AttentionSections(run).kernels(PLAN.points[:1])
    failed = of(run.results.records, "failed", backend="broken")
    assert len(failed) == len(PLAN.nodes) and "no such instruction" in failed[0]["reason"]
    assert len(of(run.results.records, "kernel", backend="hf_longspec_torch")) == len(PLAN.nodes)
    assert "no such instruction" in gpu_report(run.results.records)


def test_a_forward_whose_logits_differ_is_not_timed(make_run, monkeypatch):
    run = make_run()
    honest = HfForward.__call__
    monkeypatch.setattr(HfForward, "__call__", lambda self, tree: 1.2 * honest(self, tree))
    ForwardSections(run).all(PLAN.contexts[:1])
    assert not of(run.results.records, "forward", side="ours")
    assert sum("its logits are off by" in r["reason"] for r in of(run.results.records, "skipped")) == len(
        {*PLAN.nodes, 8}
    )


def test_no_time_left_is_said_and_the_run_ends(make_run):
    run = make_run(minutes=0)
    GpuBenchmark(run, script().make_drafts).execute()
    lines = run.results.records
    assert {r["kind"] for r in lines} == {"environment", "prediction", "skipped", "section", "outcome"}
    assert {r["reason"] for r in of(lines, "skipped")} == {"no time left"}
    assert [r["part"] for r in of(lines, "skipped")] == list(GpuBenchmark(run, None).sections())


def test_a_section_ends_with_its_own_seconds(make_run):
    run = make_run(plan=dataclasses.replace(PLAN, seconds={**SECONDS, "kernels": 0.0}))
    benchmark = GpuBenchmark(run, script().make_drafts)
    run.section("kernels", lambda: benchmark.attention.kernels(PLAN.points))
    assert not of(run.results.records, "kernel")
    run.section("correctness", benchmark.attention.correctness)  # the time of the next one is its own
    assert of(run.results.records, "correctness")


def test_a_call_that_takes_too_long_is_not_repeated():
    calls = []

    def slow():
        calls.append(None)
        torch.randn(200, 200) @ torch.randn(200, 200)

    with pytest.raises(Skip, match=r"5 do not fit into 0\.0 s"):
        Device(CPU).time(slow, limit=1e-6)
    assert len(calls) == 1
    # as many repeats as fit, five at least
    assert 5 <= len(Device(CPU, repeats=50).time(slow, limit=10.0).milliseconds) <= 50


def test_what_does_not_fit_into_memory_is_said(make_run):
    for free, what in [(1_000, "the random target needs"), (150_000, "transformers' cache and its copy")]:
        run = make_run(memory_bytes=free)
        ForwardSections(run).all(PLAN.contexts[:1], batch=6)
        assert not of(run.results.records, "forward")
        reasons = [record["reason"] for record in of(run.results.records, "skipped")]
        assert any(what in reason for reason in reasons), reasons


def test_sections_of_a_whole_run_fit_into_nine_minutes():
    assert sum(SECONDS.values()) <= 9 * 60
    for plan in PLANS.values():
        assert set(plan.seconds) == set(SECONDS)


def test_the_exact_state_is_a_loop_over_keys():
    case = random_attention(TINY, (3, 7), 4, 1, CPU, torch.float32)
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
    assert errors((out, lse), (out, lse)) == (0.0, 0.0)
    assert errors((out * torch.nan, lse), (out, lse))[0] != errors((out, lse), (out, lse))[0]


def line(kind, ms, **values):
    return {"kind": kind, "ms": {"median": ms}, **values}


def test_predictions_are_judged_by_the_lines():
    outcome = lambda name, lines: next(p for p in PREDICTIONS if p.name == name).outcome(lines)  # noqa: E731
    at = {"backend": "b", "batch": 1, "context": 32768}
    kernels = [line("kernel", ms, nodes=nodes, **at) for nodes, ms in [(1, 1.0), (17, 1.1), (69, 3.5)]]
    assert outcome("17 nodes", kernels) | {"text": ""} == {
        "name": "17 nodes",
        "text": "",
        "values": [1.1],
        "holds": True,
    }
    assert outcome("69 nodes", kernels)["holds"] is False
    assert outcome("69 nodes", [])["holds"] is None
    for tbs, times, holds in [(3.1, 1.3, True), (2.9, 1.3, False), (3.1, 1.5, False)]:
        fast = [line("kernel", 1.0, nodes=1, tb_per_second=tbs, times_floor=times, **at)]
        assert outcome("prefix bandwidth", fast)["holds"] is holds
    where = {"side": "transformers", "batch": 1, "context": 32768}
    for extra, holds in [(8.0, True), (2.0, False)]:
        pair = [line("forward", 12.0, nodes=1, **where), line("forward", 12.0 + extra, nodes=8, **where)]
        assert outcome("masked block", pair)["holds"] is holds
    assert outcome("floors", [line("iteration", 1.0, draft="d", times_floor=0.9)])["holds"] is False


def test_fp8_layers_are_close_to_what_they_replace():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64, bias=False), nn.Sequential(nn.Linear(64, 16, bias=False))).bfloat16()
    hidden = torch.randn(2, 3, 32).bfloat16()
    exact = model[0](hidden).double()
    assert quantise(model) == 2 and isinstance(model[1][0], Fp8Linear)
    off = (model[0](hidden).double() - exact).norm() / exact.norm()
    assert 1e-3 < off < 0.06  # three bits of mantissa in each factor: 2**-4 at most, half of that on average
    assert model(hidden).shape == (2, 3, 16)


class Settings:
    """What a draft shows of itself."""

    def __init__(self, **values):
        self.settings = values
        self.generation_config = type("GenerationConfig", (), dict(values))()
        self.config = type("Config", (), {"window": 512})()

    def setting(self, name):
        return getattr(self.generation_config, name)


def test_the_compiled_step_is_a_setting_that_is_put_back():
    draft = Settings(compile="auto")
    for compiled in (False, True):
        with compiled_step(draft, compiled):
            assert draft.setting("compile") is compiled
        assert draft.setting("compile") == "auto"
    with pytest.raises(Skip, match="no setting `compile`"), compiled_step(Settings(), True):
        pass
    with compiled_step(Settings(), False):
        pass


def test_floors_of_drafts_follow_their_settings(make_run):
    at = make_run().roofline(1, 1000)
    specattn = Settings(num_assistant_tokens=3, sparse_ratio=0.07, sparse_min_tokens=256)
    assert iteration_floor(TimedDraft(specattn, "specattn"), at) == at.specattn(3, 0.256)
    longspec = Settings(tree_widths=[4, 4])
    assert iteration_floor(TimedDraft(longspec, "longspec"), at) == at.longspec([4, 4], 512)
    heads = Settings(tree_branching=[1, 3], self_draft="partial_kv", partial_kv_budget=64)
    assert iteration_floor(TimedDraft(heads, "tokenswift"), at) == at.tokenswift([1, 3], budget=64)
    heads.generation_config.self_draft = "verify_hidden"
    assert iteration_floor(TimedDraft(heads, "tokenswift"), at) == at.tokenswift([1, 3], budget=None)
    assert iteration_floor(TimedDraft(Settings(), "ngram"), at) is None


def test_a_cuda_run_without_a_gpu_is_refused(capsys, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit):
        script().main(["--output", str(tmp_path / "gpu.jsonl")])
    assert "there is no CUDA device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_lines_are_json_without_nan(records):
    for record in records:
        json.loads(json.dumps(record, allow_nan=False))
    assert LOWER_BOUND in {record["baseline"] for record in of(records, "baseline")}


def test_the_wrong_backends_above_are_gone():
    assert {"louder", "off", "lazy", "greedy", "breaks", "broken"}.isdisjoint(registry.backend_names())
    assert isinstance(TORCH_BACKEND, AttentionBackend)
