"""Cells measured in turns, files that are gone on with, wrong texts."""

import pytest
import torch

import hf_longspec
from hf_longspec.bench import matrix as module
from hf_longspec.bench.calls import HF, PLAIN, Decoding, HfMethod, endless
from hf_longspec.bench.report import rows_of
from hf_longspec.bench.results import of_kind, read_records
from hf_longspec.bench.runner import Cell, Method
from tests.bench.conftest import CELL, LOOKUP, REPEATS, measure, opened
from tests.tiny_targets import tiny_target
from tests.watching import after

# Steps and acceptance are counted.
pytestmark = pytest.mark.usefixtures("every_step_speculates")


def runs(records):
    return of_kind(records, "run")


def report(path):
    return path.with_suffix(".md").read_text(encoding="utf-8")


def test_every_method_runs_in_every_turn_after_the_same_prompts(measured, result):
    found = [(r["context"], r["method"], r["turn"]) for r in runs(measured)]
    assert len(found) == len(set(found)) == REPEATS * (5 + 4)  # prompt lookup decodes one row
    assert [(r["method"], r["batch"]) for r in of_kind(measured, "skipped")] == [(LOOKUP, 2)]
    assert "- transformers decodes at most 1 row at a time this way: hf prompt lookup (60 tokens" in report(result)


def test_nothing_is_measured_twice(target, methods, documents, measured, result, tmp_path):
    path = tmp_path / "b.jsonl"
    lines = result.read_text(encoding="utf-8").split("\n")
    gone = [line for line in lines if '"turn": 1' in line and PLAIN in line and '"context": 40' in line]
    kept = [line for line in lines if line not in gone[:1]]
    path.write_text("\n".join(kept) + '{"kind": "run", "cut', encoding="utf-8")
    again = measure(target, methods, documents, path, CELL, resume=True)
    before = runs(measured)
    assert [(r["method"], r["turn"]) for r in runs(again) if r not in before] == [(PLAIN, 1)]
    names = ("method", "context", "turn", "text")  # the same prompts, hence the same texts
    assert sorted(str([r[n] for n in names]) for r in runs(again)) == sorted(str([r[n] for n in names]) for r in before)
    assert len(of_kind(again, "resumed")) == 1
    assert read_records(path)[-1]["kind"] == "end"


def test_a_file_of_something_else_is_left_alone(tmp_path):
    path = tmp_path / "b.jsonl"
    path.write_text('{"kind": "environment", "benchmark": "gate", "settings": {}}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"--resume .*`hf-longspec bench`"):
        opened(path, resume=True)
    path.write_text('{"kind"\n{"a": 1}\n', encoding="utf-8")
    with pytest.raises(ValueError, match="line 1: "):
        opened(path, resume=True)
    assert path.read_text(encoding="utf-8").startswith('{"kind"\n')


def test_without_time_calls_are_left_out_and_made_up_for_later(target, methods, documents, tmp_path):
    path, own = tmp_path / "b.jsonl", methods[:2]
    records = measure(target, own, documents, path, CELL, minutes=0.0)
    assert not runs(records)
    assert {r["reason"] for r in of_kind(records, "skipped")} == {"no time left"}
    assert "## Left out" in report(path)
    assert len(runs(measure(target, own, documents, path, CELL, resume=True))) == 2 * REPEATS
    assert "## Left out" not in report(path)


@pytest.mark.parametrize(("dtype", "verdict"), [("float32", "differs"), ("bfloat16", "NOT lossless")])
def test_a_wrong_text_has_no_speed(dtype, verdict, documents, tmp_path, monkeypatch):
    """The n-gram draft emits another last token; SpecAttn's text in bfloat16 may differ from generate's, and passes."""
    model = endless(tiny_target("llama", dtype=getattr(torch, dtype), attn_implementation="sdpa"))
    draft = hf_longspec.NgramDraftModel.from_target(model)
    right = hf_longspec.SpecAttnDraftModel.from_target(model, sparse_min_tokens=8)
    own = [Method(HF, HfMethod()), Method(PLAIN, hf_longspec.PlainDraftModel.from_target(model))]
    own += [Method("n", draft), Method("s", right)]

    def spoil(call, model, method, *_, **__):
        if method is draft:
            call.text[0, -1] = (call.text[0, -1] + 1) % model.config.vocab_size

    after(monkeypatch, module, "run_call", spoil)
    rows = rows_of(measure(model, own, documents, tmp_path / "b.jsonl", Cell(dtype, 40, 1)))
    wrong = rows[2]
    assert wrong["text"] == verdict and "NOT lossless" in wrong["audit"]
    assert "tokens_per_second" not in wrong and "ratio_to_plain" not in wrong
    assert {row["text"] for row in rows if row is not wrong} <= {"reference", "identical", "exact", "near-tie"}
    assert "## Wrong texts" in report(tmp_path / "b.jsonl")


def test_sampled_texts_are_those_of_the_plain_loop(target, documents, tmp_path):
    rejecting = hf_longspec.SpecAttnDraftModel.from_target(target, sparse_min_tokens=8)
    own = [Method(HF, HfMethod()), Method(PLAIN, hf_longspec.PlainDraftModel.from_target(target))]
    own += [Method("ngram", hf_longspec.NgramDraftModel.from_target(target))]
    own += [Method("coupled", rejecting, (("acceptance", "coupled"),)), Method("rejection", rejecting)]
    cell = Cell("float32", 40, 1, Decoding(temperature=1.0))
    rows = rows_of(measure(target, own, documents, tmp_path / "b.jsonl", cell))
    texts = ["not compared", "reference", "identical", "identical", "not compared"]
    assert [(row["method"], row["text"]) for row in rows] == list(zip([each.name for each in own], texts, strict=True))


def test_a_refusal_of_one_method_does_not_stop_the_others(target, methods, documents, tmp_path):
    draft = methods[-1].how
    own = [*methods[:2], Method("bad", draft, (("sparse_ratio", 7.0),))]
    records = measure(target, own, documents, tmp_path / "b.jsonl", CELL)
    assert len(runs(records)) == 2 * REPEATS
    assert [r["reason"].startswith("sparse_ratio=7.0") for r in of_kind(records, "skipped")] == [True]
    assert draft.setting("sparse_ratio") == 0.07
