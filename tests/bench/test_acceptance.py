import pytest
import torch

import hf_longspec
from hf_longspec.bench.acceptance import AcceptanceBenchmark, RowSteps, Setting, changed
from hf_longspec.bench.decoding import Decoder
from hf_longspec.bench.progress import Progress
from hf_longspec.bench.reports import acceptance_report
from hf_longspec.bench.results import ResultFile, read_records
from hf_longspec.bench.timing import TimeGuard


@pytest.fixture
def draft(target):
    return hf_longspec.SpecAttnDraftModel.from_target(target, num_assistant_tokens=3, sparse_min_tokens=8)


@pytest.mark.parametrize("mode", ["greedy", "sample"])
def test_steps_per_row_add_up_to_the_statistics(target, prompts, draft, mode):
    decoder = Decoder(target, prompts, tokens=12)
    with RowSteps().of(draft) as steps:
        run = decoder.run(draft, slice(0, 3), 50, mode, seed=0)
    assert sum(steps.counts) == run.steps == draft.last_speculation.num_spec_steps
    assert "make_drafter" not in vars(draft)


def test_greedy_rows_of_a_batch_take_the_steps_they_take_alone(target, prompts, draft):
    decoder = Decoder(target, prompts, tokens=12)
    with RowSteps().of(draft) as together:
        decoder.run(draft, slice(0, 3), 50, "greedy", seed=0)
    alone = [decoder.run(draft, slice(row, row + 1), 50, "greedy", seed=0).steps for row in range(3)]
    assert together.counts == alone


def test_settings_are_put_back(draft):
    with changed(draft, {"selection": "window", "num_assistant_tokens": 2}):
        assert draft.setting("selection") == "window"
    assert draft.setting("selection") == "two_rows"
    assert draft.setting("num_assistant_tokens") == 3


def test_unknown_settings_are_refused(draft):
    with pytest.raises(ValueError, match=r"has no settings \['selecton'\]"), changed(draft, {"selecton": "window"}):
        pass


def test_settings_are_compared_on_the_same_prompts(target, prompts, draft, tmp_path):
    settings = [
        Setting.of("greedy", selection="two_rows"),
        Setting.of("greedy", selection="window"),
        Setting.of("greedy", selection="two_rows", num_assistant_tokens=1),
    ]
    benchmark = AcceptanceBenchmark(target, draft, prompts, tokens=9, batch=2)
    with ResultFile(tmp_path / "a.jsonl", "acceptance", acceptance_report, TimeGuard(1), {}) as results:
        benchmark.run(settings, [40, 60], results, Progress(1, quiet=True))
    rows = [record for record in read_records(tmp_path / "a.jsonl") if record["kind"] == "acceptance"]
    assert [(row["options"]["selection"], row["length"]) for row in rows[:3]] == [
        ("two_rows", 40),
        ("two_rows", 60),
        ("window", 40),
    ]
    for row in rows:
        assert row["same_text"]  # greedy text does not depend on how it was drafted
        assert len(row["per_prompt"]) == row["tau"]["count"] == 3
        assert all(1 <= tau <= row["options"].get("num_assistant_tokens", 3) + 1 for tau in row["per_prompt"])
        assert ("difference" in row) == (row["options"] != {"selection": "two_rows"})
    assert "| greedy | two_rows, num_assistant_tokens=1 |" in (tmp_path / "a.md").read_text()


def test_nothing_is_measured_without_time(target, prompts, draft, tmp_path):
    benchmark = AcceptanceBenchmark(target, draft, prompts, tokens=4, batch=3)
    guard = TimeGuard(minutes=1e-9)
    with ResultFile(tmp_path / "a.jsonl", "acceptance", acceptance_report, guard, {}) as results:
        benchmark.run([Setting.of()] * 2, [40], results, Progress(1, quiet=True))
        # the first one runs, as nobody knows yet how long it takes
    kinds = [record["kind"] for record in read_records(tmp_path / "a.jsonl")]
    assert kinds == ["environment", "acceptance", "skipped", "end"]


def test_tau_does_not_depend_on_the_batch(target, prompts, draft):
    setting = Setting.of("greedy", selection="all_rows")
    taus = [AcceptanceBenchmark(target, draft, prompts, 9, batch).measure(setting, 50) for batch in (1, 3)]
    assert taus[0]["per_prompt"] == taus[1]["per_prompt"]
    assert torch.tensor(taus[0]["per_prompt"]).mean().item() == pytest.approx(taus[0]["tau"]["mean"], rel=1e-3)
