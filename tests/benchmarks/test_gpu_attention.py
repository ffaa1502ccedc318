"""A backend that is wrong anywhere is not timed anywhere."""

import dataclasses

import pytest
import torch

from benchmarks.gpu_attention import AttentionSections, errors
from benchmarks.gpu_device import poisoned_outputs
from benchmarks.gpu_report import gpu_report
from benchmarks.gpu_run import TINY
from benchmarks.random_inputs import random_attention
from hf_longspec.attention_backends.lengths import SeqLens
from hf_longspec.attention_backends.torch_backend import TORCH_BACKEND
from tests.benchmarks.gpu_runs import CPU, PLAN, of, registered_backends, runs_in


@pytest.fixture
def make_run(tmp_path):
    with runs_in(tmp_path) as make:
        yield make


@pytest.fixture
def registered():
    with registered_backends() as register:
        yield register


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


def test_a_backend_that_reads_after_the_nodes_is_wrong(make_run, registered):
    def greedy(query, key, value, lengths, **options):
        everything = SeqLens.equal(key.shape[2], len(key))
        return TORCH_BACKEND.prefix_attention(query, key, value, everything, **options)

    registered("greedy", prefix_attention=greedy)
    run = make_run(["greedy"], plan=dataclasses.replace(PLAN, nodes=(5,)))
    AttentionSections(run).correctness()
    assert "greedy" in run.refused


def test_a_backend_that_is_wrong_on_the_timed_inputs_only_is_not_timed(make_run, registered):
    def breaks(query, key, value, lengths, **options):
        out, lse = TORCH_BACKEND.prefix_attention(query, key, value, lengths, **options)
        return (out if lengths.longest < 48 else out.flip(-1)), lse

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
