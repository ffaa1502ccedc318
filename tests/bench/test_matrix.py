import json

import pytest
import torch
from matplotlib.figure import Figure

import hf_longspec
from hf_longspec.bench import matrix as module
from hf_longspec.bench.calls import HF, PLAIN, Decoding, HfMethod, endless
from hf_longspec.bench.matrix import Cell, Matrix, Method
from hf_longspec.bench.plots import plot_all
from hf_longspec.bench.probes import analyse_cell
from hf_longspec.bench.prompts import Document, DocumentPrompts
from hf_longspec.bench.report import by_depth, matrix_report, rows_of
from hf_longspec.bench.results import ResultFile, TimeGuard, read_records
from hf_longspec.testing import tiny_prompts, tiny_target

CELL = Cell("float32", 40, 1)
PNG = b"\x89PNG\r\n\x1a\n"


class Quiet:
    """Counts steps and prints nothing."""

    def __init__(self):
        self.steps = 0

    def say(self, text):
        pass

    def step(self, count=1):
        self.steps += count


@pytest.fixture(scope="module")
def documents(target):
    rows, _ = tiny_prompts(target.config.vocab_size, [400, 300])
    texts = [Document(f"{row}", " ".join(map(str, torch.as_tensor(rows)[row].tolist()))) for row in range(2)]
    return DocumentPrompts(lambda text, **_: {"input_ids": [int(part) for part in text.split()]}, texts)


@pytest.fixture
def methods(target):
    draft = hf_longspec.SpecAttnDraftModel.from_target(target, num_assistant_tokens=3, sparse_min_tokens=8)
    return [
        Method(HF, HfMethod()),
        Method(PLAIN, hf_longspec.PlainDraftModel.from_target(target)),
        Method("hf prompt lookup", HfMethod({"prompt_lookup_num_tokens": 3}, max_batch=1)),
        *(Method(f"specattn, selection={name}", draft, (("selection", name),)) for name in ("two_rows", "window")),
    ]


def opened(path, minutes=10.0, resume=False, settings=None, **facts):
    guard = TimeGuard(minutes)
    return ResultFile(path, "bench", matrix_report, guard, {"repeats": 2} | (settings or {}), facts, resume)


def measured(target, methods, documents, path, *cells, **options):
    with opened(path, **options) as file:
        made = Matrix(target, methods, documents, file, tokens=8, repeats=2)
        for cell in cells:
            made.measure(cell, Quiet())
    return file.records


def runs(records):
    return [record for record in records if record["kind"] == "run"]


def runs_of(records, row):
    """The calls of a row, found without it."""
    keys = {**row.cell, "method": row.method}
    return [record for record in runs(records) if all(record[name] == value for name, value in keys.items())]


def test_every_method_runs_in_every_turn_after_the_same_prompts(target, methods, documents, tmp_path):
    records = measured(target, methods, documents, tmp_path / "b.jsonl", CELL, Cell("float32", 60, 2))
    found = [(r["context"], r["method"], r["turn"]) for r in runs(records)]
    assert len(found) == len(set(found)) == 2 * (5 + 4)  # prompt lookup decodes one row
    rows = rows_of(records)
    assert {row.verdict for row in rows} == {"reference", "identical"}
    assert [row.method for row in rows][:2] == [HF, PLAIN]
    for row in rows:
        values = row.to_dict()
        own = runs_of(records, row)
        speeds = sorted(run["tokens"] / run["decode_seconds"] for run in own)
        assert values["tokens_per_second"]["median"] == pytest.approx(sum(speeds) / 2, rel=1e-3)
        assert values["tau"] == pytest.approx(sum(r["tokens"] for r in own) / sum(r["steps"] for r in own), 1e-3)
    lookup = [r for r in records if r["kind"] == "skipped"]
    assert [(r["method"], r["batch"]) for r in lookup] == [("hf prompt lookup", 2)]
    report = (tmp_path / "b.md").read_text(encoding="utf-8")
    assert "## 60 tokens, batch 2, float32, greedy" in report
    assert "| specattn, selection=window |" in report
    for name in ("Token Recycling", "EAGLE", "TriForce"):
        assert f"- {name}" in report.partition("## Not run")[2]


def test_ratios_are_taken_within_turns(target, methods, documents, tmp_path):
    records = measured(target, methods, documents, tmp_path / "b.jsonl", CELL)
    for number, record in enumerate(runs(records)):
        record["decode_seconds"] = 1.0 + number
    by_name = {row.method: row for row in rows_of(records)}
    own, base = by_name["specattn, selection=window"], by_name[PLAIN]
    expected = []
    for turn in (0, 1):
        speed = {
            name: next(r["tokens"] / r["decode_seconds"] for r in runs_of(records, row) if r["turn"] == turn)
            for name, row in (("own", own), ("base", base))
        }
        expected.append(speed["own"] / speed["base"])
    assert own.ratio_to(PLAIN)["low"] == pytest.approx(min(expected), rel=1e-3)
    assert own.ratio_to(PLAIN)["high"] == pytest.approx(max(expected), rel=1e-3)


def test_nothing_is_measured_twice(target, methods, documents, tmp_path):
    path = tmp_path / "b.jsonl"
    before = runs(measured(target, methods, documents, path, CELL))
    again = measured(target, methods, documents, path, CELL, resume=True)
    assert runs(again) == before
    assert [r["kind"] for r in again].count("resumed") == 1
    lines = [
        line for line in path.read_text(encoding="utf-8").split("\n") if '"turn": 1' not in line or PLAIN not in line
    ]
    path.write_text("\n".join(lines) + '{"kind": "run", "cut', encoding="utf-8")
    third = runs(measured(target, methods, documents, path, CELL, resume=True))
    assert [(r["method"], r["turn"]) for r in third if r not in before] == [(PLAIN, 1)]
    assert sorted(map(hash_of, third)) == sorted(map(hash_of, before))  # the same prompts, hence the same texts
    assert read_records(path)[-1]["kind"] == "end"


def hash_of(run):
    return run["method"], run["turn"], run["text"]


def test_an_interruption_keeps_what_was_measured(target, methods, documents, tmp_path, monkeypatch):
    path, real, calls = tmp_path / "b.jsonl", module.run_call, []

    def interrupted(*args, **kwargs):
        calls.append(kwargs["tokens"])
        if len(calls) == 6:  # every method warms up once
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(module, "run_call", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measured(target, methods, documents, path, CELL)
    kept = read_records(path)
    assert [r["method"] for r in runs(kept)] == [HF, PLAIN]
    assert kept[-1]["kind"] == "run"
    assert "The run was not finished." in (tmp_path / "b.md").read_text(encoding="utf-8")
    monkeypatch.undo()
    rest = runs(measured(target, methods, documents, path, CELL, resume=True))
    assert rest[:2] == runs(kept)
    assert len(rest) == 10
    assert {row.verdict for row in rows_of(rest)} == {"reference", "identical"}


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"settings": {"tokens": 9}}, "tokens was None, now 9"),
        ({"device": "another"}, "device was one, now another"),
    ],
)
def test_another_run_is_not_gone_on_with(options, complaint, tmp_path):
    path = tmp_path / "b.jsonl"
    with opened(path, device="one"):
        pass
    before = path.read_bytes()
    with pytest.raises(ValueError, match=complaint):
        opened(path, resume=True, **({"device": "one"} | options))
    with pytest.raises(ValueError, match="pass --resume to go on with it"):
        opened(path, device="one")
    assert path.read_bytes() == before


def test_a_file_of_something_else_is_left_alone(tmp_path):
    path = tmp_path / "b.jsonl"
    path.write_text('{"kind": "environment", "benchmark": "engine", "settings": {}}\n', encoding="utf-8")
    with pytest.raises(ValueError, match="no result file of `hf-longspec bench`"):
        opened(path, resume=True)
    path.write_text('{"kind"\n{"a": 1}\n', encoding="utf-8")
    with pytest.raises(ValueError, match="line 1 is no JSON"):
        opened(path, resume=True)


def test_without_time_calls_are_left_out_and_made_up_for_later(target, methods, documents, tmp_path):
    path = tmp_path / "b.jsonl"
    records = measured(target, methods, documents, path, CELL, minutes=0.0)
    assert not runs(records)
    assert {r["reason"] for r in records if r["kind"] == "skipped"} == {"no time left"}
    assert "## Left out" in (tmp_path / "b.md").read_text(encoding="utf-8")
    assert len(runs(measured(target, methods, documents, path, CELL, resume=True))) == 10
    assert "## Left out" not in (tmp_path / "b.md").read_text(encoding="utf-8")


def spoiled(real, spoil):
    """`run_call` whose draft emits another last token."""

    def call(model, method, *args, **kwargs):
        made = real(model, method, *args, **kwargs)
        if spoil(method):
            made.text[0, -1] = (made.text[0, -1] + 1) % model.config.vocab_size
        return made

    return call


@pytest.mark.parametrize(("dtype", "verdict"), [("float32", "differs"), ("bfloat16", "NOT lossless")])
def test_a_wrong_text_has_no_speed(dtype, verdict, documents, tmp_path, monkeypatch):
    model = endless(tiny_target("llama", dtype=getattr(torch, dtype), attn_implementation="sdpa"))
    draft = hf_longspec.NgramDraftModel.from_target(model)
    own = [Method(HF, HfMethod()), Method(PLAIN, hf_longspec.PlainDraftModel.from_target(model)), Method("n", draft)]
    monkeypatch.setattr(module, "run_call", spoiled(module.run_call, lambda method: method is draft))
    records = measured(model, own, documents, tmp_path / "b.jsonl", Cell(dtype, 40, 1))
    wrong = rows_of(records)[2]
    assert (wrong.verdict, wrong.failed) == (verdict, True)
    assert "tokens_per_second" not in wrong.to_dict()
    assert "NOT lossless" in wrong.audit["report"]
    assert "## Wrong texts" in (tmp_path / "b.md").read_text(encoding="utf-8")
    assert not rows_of(records)[1].failed


def test_right_texts_of_other_types_pass(documents, tmp_path):
    model = endless(tiny_target("llama", dtype=torch.bfloat16, attn_implementation="sdpa"))
    draft = hf_longspec.SpecAttnDraftModel.from_target(model, sparse_min_tokens=8)
    own = [Method(HF, HfMethod()), Method(PLAIN, hf_longspec.PlainDraftModel.from_target(model)), Method("s", draft)]
    records = measured(model, own, documents, tmp_path / "b.jsonl", Cell("bfloat16", 40, 2))
    assert {row.verdict for row in rows_of(records)} <= {"reference", "identical", "exact", "near-tie"}


def test_sampled_texts_are_those_of_the_plain_loop(target, documents, tmp_path):
    rejecting = hf_longspec.SpecAttnDraftModel.from_target(target, sparse_min_tokens=8)
    own = [
        Method(HF, HfMethod()),
        Method(PLAIN, hf_longspec.PlainDraftModel.from_target(target)),
        Method("ngram", hf_longspec.NgramDraftModel.from_target(target)),
        Method("coupled", rejecting, (("acceptance", "coupled"),)),
        Method("rejection", rejecting),
    ]
    records = measured(target, own, documents, tmp_path / "b.jsonl", Cell("float32", 40, 1, Decoding(temperature=1.0)))
    assert {row.method: row.verdict for row in rows_of(records)} == {
        HF: "not compared",
        PLAIN: "reference",
        "ngram": "identical",
        "coupled": "identical",
        "rejection": "not compared",
    }


def test_a_refusal_of_one_method_does_not_stop_the_others(target, methods, documents, tmp_path):
    draft = methods[-1].how
    own = [*methods[:2], Method("bad", draft, (("sparse_ratio", 7.0),))]
    records = measured(target, own, documents, tmp_path / "b.jsonl", CELL)
    assert len(runs(records)) == 4
    assert [r["reason"].startswith("sparse_ratio=7.0") for r in records if r["kind"] == "skipped"] == [True]
    assert draft.setting("sparse_ratio") == 0.07


def test_settings_are_rows_with_differences(target, methods, documents, tmp_path):
    records = measured(target, methods, documents, tmp_path / "b.jsonl", CELL)
    rows = {row.method: row for row in rows_of(records)}
    first, second = rows["specattn, selection=two_rows"], rows["specattn, selection=window"]
    pairs = list(zip(runs_of(records, first), runs_of(records, second), strict=True))
    gaps = [b["tokens"] / b["steps"] - a["tokens"] / a["steps"] for a, b in pairs]
    assert all(a["turn"] == b["turn"] for a, b in pairs)
    assert second.difference_to(first)["mean"] == pytest.approx(sum(gaps) / 2, abs=1e-3)
    assert "## Settings: 40 tokens, batch 1, float32, greedy" in (tmp_path / "b.md").read_text(encoding="utf-8")


def test_acceptance_by_depth_is_conditional():
    assert by_depth([4, 3, 2, 1]) == [6 / 10, 3 / 6, 1 / 3]
    assert by_depth([0, 0, 5]) == [1.0, 1.0]
    assert by_depth([5]) == by_depth([]) == []


def test_plots_are_pictures(target, methods, documents, tmp_path):
    records = measured(target, methods, documents, tmp_path / "b.jsonl", CELL, Cell("float32", 80, 1))
    paths = plot_all(records, tmp_path / "b")
    assert [path.name for path in paths] == ["b-speed.png", "b-tau.png", "b-depth.png"]
    assert all(path.read_bytes().startswith(PNG) and path.stat().st_size > 10_000 for path in paths)
    assert plot_all(records[:1], tmp_path / "none") == []


@pytest.mark.parametrize("label", ["n", "specattn, selection=last_accepted, num_assistant_tokens=6, sparse_ratio=0.15"])
def test_legends_and_labels_lie_inside_the_picture(label, target, methods, documents, tmp_path, monkeypatch):
    own = [*methods[:3], *(Method(f"{label}, {number}", methods[-1].how) for number in range(3))]
    records = measured(target, own, documents, tmp_path / "b.jsonl", CELL)
    figures = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k)))
    plot_all(records, tmp_path / "b")
    assert len(figures) == 3
    for figure in figures:
        box, legend = figure.bbox, figure.legends[0].get_window_extent()
        assert box.x0 <= legend.x0 and legend.x1 <= box.x1 and box.y0 <= legend.y0
        axes = figure.axes[0]
        assert axes.get_xlabel() and axes.get_ylabel() and axes.get_title()
        assert legend.y1 < axes.xaxis.label.get_window_extent().y0
        names = {text.get_text() for text in figure.legends[0].get_texts()}
        assert names == set(figure.axes[0].get_legend_handles_labels()[1])


def test_a_cell_is_analysed_once(target, methods, documents, tmp_path):
    with opened(tmp_path / "b.jsonl") as file:
        made = Matrix(target, methods, documents, file, tokens=12, repeats=2)
        analyse_cell(made, CELL, Quiet())
        analyse_cell(made, CELL, Quiet())
    found = [r for r in file.records if r["kind"] == "analysis"]
    assert [r["method"] for r in found] == ["specattn, selection=two_rows", "specattn, selection=window"]
    assert all(0 < r["overlap"]["all layers"] <= 1 for r in found)
    assert set(found[0]["pair_overlap"]) == {"1", "2", "3"}
    assert methods[-1].how.setting("selection") == "two_rows"
    report = (tmp_path / "b.md").read_text(encoding="utf-8")
    assert "## Analysis: specattn, selection=window, 40 tokens, batch 1, float32, greedy" in report
    json.dumps(found)
