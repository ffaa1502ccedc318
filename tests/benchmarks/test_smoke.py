"""Every benchmark at sizes of seconds: each measurement is written, and only right results are timed."""

from itertools import product
from types import SimpleNamespace

import pytest
import torch

import hf_longspec
from benchmarks import hybrid, read_yaml, verification
from benchmarks.acceptance import measure, plan
from benchmarks.decoder import MODES, Decoder, Decoding
from benchmarks.gate import FIXED, StockRun, ways_for
from benchmarks.gate import measure as measure_gate
from benchmarks.long_generation import LongBenchmark, LongRow
from benchmarks.random_inputs import Shape
from benchmarks.records import of_kind
from benchmarks.runner import Run
from hf_longspec.cli.measuring import HF, PLAIN, HfMethod
from hf_longspec.modeling.register_draft import DRAFTS
from tests.benchmarks.conftest import make_drafts, specattn


@pytest.fixture
def run(tmp_path):
    """`run(benchmark, work, seconds)`: the lines that `work(run)` wrote, by kind of the benchmark and all."""

    def call(benchmark, work, seconds=600):
        with Run(tmp_path / f"{benchmark}.jsonl", benchmark, seconds, quiet=True) as results:
            work(results)
        return of_kind(results.records, benchmark), results.records

    return call


@pytest.mark.parametrize(
    ("name", "rows"), [(HF, slice(1, 3)), (PLAIN, slice(0, 1)), ("SpecAttn", slice(0, 1)), ("SpecAttn", slice(1, 3))]
)
def test_text_from_a_prefilled_cache_is_that_of_the_whole_prompt(target, prompts, name, rows):
    prompt = prompts.tokens[rows, :40]
    truth = target.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=9, do_sample=False)
    decoder = Decoder(target, prompts, tokens=9)
    for _ in range(2):  # the second run finds the buffer of the first
        call = decoder.run({HF: HfMethod(), **make_drafts(target)}[name], rows, 40, "greedy", seed=0)
        assert torch.equal(call.text, truth[:, 40:]) and call.tokens == 8 * len(truth)


def test_acceptance_compares_drafts_setting_by_setting_within_one_limit(target, prompts, run):
    """Differences are to the first draft's result of the same setting; one clock watches over all drafts."""
    drafts = {"long": specattn(target), "short": specattn(target, num_assistant_tokens=1)}
    planned = [(name, 40, MODES["greedy"], {"selection": kind}) for name in drafts for kind in ("two_rows", "window")]
    rows, _ = run("acceptance", lambda to: measure(to, planned, drafts, target, prompts, tokens=9, batch=3))
    assert [row["options"]["draft"] for row in rows] == ["long", "long", "short", "short"]
    assert ["difference" in row for row in rows] == [False, False, True, True]
    for first, second in zip(rows[:2], rows[2:], strict=True):
        gap = second["tau"]["mean"] - first["tau"]["mean"]
        assert second["difference"]["mean"] == pytest.approx(gap, abs=1e-2)  # four significant digits are stored
    _, records = run("acceptance", lambda to: measure(to, planned, drafts, target, prompts, tokens=9, batch=3), 0)
    assert [record["kind"] for record in records] == ["environment", *["skipped"] * 4, "end"]


def test_every_setting_of_the_acceptance_suite_is_one_of_its_draft():
    suite = read_yaml("suites/acceptance.yaml")
    kinds = {kind: draft.model for kind, draft in DRAFTS.items() if kind in suite}
    kinds |= dict.fromkeys(("draft_weights", "few_bits"), kinds["specattn"]) | {"vocabulary": kinds["longspec"]}
    assert set(kinds) == set(suite)
    for name, length, _, options in plan({kind: kind for kind in kinds}, [10, 20, 30]):
        assert length in (10, 20, 30) and set(options) <= set(kinds[name].settings)


def test_gate(target, prompts, run):
    """Drafts change no text, and those without a gate draft in every step."""
    ways = ways_for(target, [], fixed=True)
    texts = [row[None, :30] for row in prompts.tokens[:2]]
    rows, _ = run("gate", lambda to: measure_gate(target, ways, texts, [8, 20], 0.0, to, task="30", threads=1))
    assert [row["method"] for row in rows] == [*ways] * 2 and len(ways) == 10
    assert all(row["same_texts"] == row["texts"] == 2 for row in rows)
    by_name = {row["method"]: row for row in rows if row["tokens"] == 20}
    assert by_name[PLAIN]["speedup"]["mean"] == 1 and by_name[PLAIN]["plain_steps"] == 0
    assert by_name["random LongSpec"]["plain_steps"] >= 2  # a call begins with them
    assert by_name["random LongSpec" + FIXED]["plain_steps"] == 0
    assert by_name["random LongSpec" + FIXED]["cost"] > 0 and "cost" not in by_name[PLAIN]


def test_plain_generate_is_timed_from_its_first_tokens_on():
    """Also where prompt lookup emits several of them at once."""
    model = SimpleNamespace(
        generate=lambda prompt, streamer, **_: [streamer.put(x) for x in map(torch.tensor, emitted)]
    )
    emitted = [[5, 6]], [7, 8, 9], [3], [4, 4]
    run = StockRun(model, torch.tensor([[5, 6]]), 6)
    assert run.text == [7, 8, 9, 3, 4, 4] and len(run.seconds) == len(run.cpu_seconds) == 5
    assert run.seconds[:2] == [0, 0] and run.seconds[3] == run.seconds[4] >= run.seconds[2] > 0


def test_long_generation(target, prompts, run):
    """Each row has its marks, and baselines follow after them."""
    plain = hf_longspec.PlainDraftModel.from_target(target)
    ngram = hf_longspec.NgramDraftModel.from_target(target, num_assistant_tokens=3, ngram_candidates=1)
    sampled = Decoding(temperature=1.0, min_p=0.05, penalty=1.3, window=9)

    def work(results):
        benchmark = LongBenchmark(target, prompts.tokens[:1, :20], [15, 30])
        benchmark.measure(LongRow("mine", ngram, 15, MODES["greedy"]), {}, 5, results)
        benchmark.measure(LongRow(PLAIN, plain, 30, sampled), {HF: HfMethod(), PLAIN: plain}, 5, results)

    rows, records = run("long", work)
    found = [(row["method"], row["mode"], row["penalised"], row["mark"]) for row in rows]
    assert found == [("mine", "greedy", False, 15), (PLAIN, "sample", True, 15), (PLAIN, "sample", True, 30)]
    assert rows[1]["tau"] == 1.0 and rows[1]["alpha"] == rows[1]["beta"] == 0.0
    baselines = [(row["method"], row["mark"]) for row in of_kind(records, "baseline")]
    assert baselines == [(HF, 30), (PLAIN, 30), (HF, 15), (PLAIN, 15)]


def test_verification_times_right_results_alone(run, monkeypatch):
    shape = Shape(layers=2, hidden=64, intermediate=96, heads=4, kv_heads=2, head_dim=16, vocab=50)

    def work(results):
        verification.measure(results, shape, 64, [1, 5], ["float32", "bfloat16"], repeats=2, bandwidth=10.0)

    rows, _ = run("verification", work)
    cells = [*product(("float32", "bfloat16"), ("attention", "forward"), (1, 5))]
    assert [(row["dtype"], row["part"], row["nodes"]) for row in rows] == cells
    assert all(row["ratio"]["count"] == 2 and row["floor_ms"] > 0 for row in rows)
    monkeypatch.setattr(verification.AttentionCase, "check", lambda case: (float("nan"), 1.0, 0.0, {}))
    rows, records = run("verification", work)
    assert {row["part"] for row in rows} == {"forward"}
    assert sum("over the budget" in record.get("reason", "") for record in records) == 4


def test_hybrid(run, monkeypatch):
    small = hybrid.SHAPE | {"vocab_size": 50, "hidden_size": 64, "intermediate_size": 96, "head_dim": 8}
    monkeypatch.setattr(hybrid, "SHAPE", small)
    models = {"qwen3_5_text": hybrid.SUITE["models"]["qwen3_5_text"]}
    (row,), _ = run("hybrid", lambda to: hybrid.measure(to, models, 70, repeats=2))
    assert row["recurrence"] == "gated delta rule"
    assert all(row[name]["count"] == 2 and row[name]["median"] > 0 for name in ("stock", "commit", "chain", "tree"))
