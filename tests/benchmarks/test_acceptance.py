import pytest

from benchmarks.acceptance import AcceptanceBenchmark, Setting
from benchmarks.harness import Run
from hf_longspec.bench.calls import changed
from hf_longspec.bench.results import of_kind, read_records
from tests.bench.conftest import specattn


def test_settings_are_put_back_also_those_that_the_configuration_lacks(target):
    draft = specattn(target)
    for is_set in (True, False):
        if not is_set:
            del draft.generation_config.selection
        with changed(draft, {"selection": "window"}):
            assert draft.setting("selection") == "window"
        assert draft.setting("selection") == "two_rows"
    with pytest.raises(ValueError, match="selecton"), changed(draft, {"selecton": "window"}):
        pass


def test_drafts_are_compared_setting_by_setting_within_one_limit(target, prompts, tmp_path):
    """Differences are to the first draft's result of the same setting; one clock watches over all drafts."""
    draft, other = specattn(target), specattn(target, num_assistant_tokens=1)
    settings = [Setting.of("greedy", selection="two_rows"), Setting.of("greedy", selection="window")]
    plan = [(name, setting, 40) for name in ("long", "short") for setting in settings]
    benchmark = AcceptanceBenchmark(target, {"long": draft, "short": other}, prompts, tokens=9, batch=3)
    for name, seconds in (("a.jsonl", 60), ("b.jsonl", 0)):
        with Run(tmp_path / name, "acceptance", seconds) as results:
            benchmark.run(plan, results)
    rows = of_kind(read_records(tmp_path / "a.jsonl"), "acceptance")
    assert [row["options"]["draft"] for row in rows] == ["long", "long", "short", "short"]
    assert ["difference" in row for row in rows] == [False, False, True, True]
    for first, second in zip(rows[:2], rows[2:], strict=True):
        gap = second["tau"]["mean"] - first["tau"]["mean"]
        assert second["difference"]["mean"] == pytest.approx(gap, abs=1e-2)  # four significant digits are stored
    kinds = [record["kind"] for record in read_records(tmp_path / "b.jsonl")]
    assert kinds == ["environment", *["skipped"] * 4, "end"]
