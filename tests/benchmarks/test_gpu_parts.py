"""Parts of the GPU benchmark: forwards, time and memory limits, predictions, FP8, floors of drafts."""

import pytest
import torch
from torch import nn

from benchmarks.gpu_device import Device, Skip
from benchmarks.gpu_forward import ForwardSections, Fp8Linear, HfForward, quantise
from benchmarks.gpu_iterations import TimedDraft, compiled_step, iteration_floor
from benchmarks.gpu_report import PREDICTIONS
from tests.benchmarks.gpu_runs import CPU, PLAN, of, runs_in


@pytest.fixture
def make_run(tmp_path):
    with runs_in(tmp_path) as make:
        yield make


def test_both_sides_are_captured_where_that_can_be_done(make_run, monkeypatch):
    # a graph that calls what it has recorded
    monkeypatch.setattr(Device, "capture", lambda self, function: function)
    run = make_run()
    ForwardSections(run).all(PLAN.contexts[:1])
    lines = run.results.records
    assert not of(lines, "failed")
    for side, nodes in [("transformers", {1, 8}), ("ours", {*PLAN.nodes, 8})]:
        for mode, how in [("eager", "wall"), ("captured", "graph")]:
            found = of(lines, "forward", side=side, mode=mode)
            assert {record["nodes"] for record in found} == nodes and {record["how"] for record in found} == {how}


def test_a_forward_whose_logits_differ_is_not_timed(make_run, monkeypatch):
    run = make_run()
    honest = HfForward.__call__
    monkeypatch.setattr(HfForward, "__call__", lambda self, tree: 1.2 * honest(self, tree))
    ForwardSections(run).all(PLAN.contexts[:1])
    assert not of(run.results.records, "forward", side="ours")
    assert sum("its logits are off by" in r["reason"] for r in of(run.results.records, "skipped")) == len(
        {*PLAN.nodes, 8}
    )


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
    where = {"side": "transformers", "mode": "eager", "batch": 1, "context": 32768}
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
    """The attributes of a draft that the benchmark reads."""

    def __init__(self, **values):
        self.settings = values
        self.generation_config = type("GenerationConfig", (), dict(values))()
        self.config = type("Config", (), {"window": 512})()

    def setting(self, name):
        return getattr(self.generation_config, name)


def test_the_compiled_step_is_a_setting_that_is_put_back(monkeypatch):
    draft = Settings(compile="auto")
    with compiled_step(draft, False):
        assert draft.setting("compile") == "off"
    assert draft.setting("compile") == "auto"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with compiled_step(draft, True):
        assert draft.setting("compile") == "graph"
    assert draft.setting("compile") == "auto"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Skip, match="there is no CUDA device"), compiled_step(draft, True):
        pass
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
