import pytest
import torch

from benchmarks.acceptance import AcceptanceBenchmark, Setting, plan
from benchmarks.harness import Run
from hf_longspec.bench.calls import Decoder, changed
from hf_longspec.bench.results import of_kind, read_records
from tests.bench.conftest import specattn


@pytest.fixture
def draft(target):
    return specattn(target)


def measured(benchmark, plan, path, seconds=60):
    """The rows of a run."""
    with Run(path, "acceptance", seconds) as results:
        benchmark.run(plan, results)
    return of_kind(read_records(path), "acceptance")


def test_settings_are_put_back_also_those_that_the_configuration_lacks(draft):
    with changed(draft, {"selection": "window"}):
        assert draft.setting("selection") == "window"
    assert draft.setting("selection") == "two_rows"
    del draft.generation_config.selection
    with changed(draft, {"selection": "window"}):
        assert draft.setting("selection") == "window"
    assert draft.setting("selection") == "two_rows"
    with pytest.raises(ValueError, match="selecton"), changed(draft, {"selecton": "window"}):
        pass


def test_drafts_are_compared_setting_by_setting_within_one_limit(target, prompts, draft, tmp_path):
    """Differences are to the first draft's result of the same setting; one clock watches over all drafts."""
    other = specattn(target, num_assistant_tokens=1)
    settings = [Setting.of("greedy", selection="two_rows"), Setting.of("greedy", selection="window")]
    plan = [(name, setting, 40) for name in ("long", "short") for setting in settings]
    benchmark = AcceptanceBenchmark(target, {"long": draft, "short": other}, prompts, tokens=9, batch=3)
    rows = measured(benchmark, plan, tmp_path / "a.jsonl")
    assert [row["options"]["draft"] for row in rows] == ["long", "long", "short", "short"]
    assert ["difference" in row for row in rows] == [False, False, True, True]
    for first, second in zip(rows[:2], rows[2:], strict=True):
        gap = second["tau"]["mean"] - first["tau"]["mean"]
        assert second["difference"]["mean"] == pytest.approx(gap, abs=1e-2)  # four significant digits are stored
    measured(benchmark, plan, tmp_path / "b.jsonl", seconds=0)
    kinds = [record["kind"] for record in read_records(tmp_path / "b.jsonl")]
    assert kinds == ["environment", *["skipped"] * 4, "end"]


def test_drafts_of_several_kinds_are_planned_by_their_own_settings():
    """All drafts first, by one setting of their kind; then the other settings of the first of each kind."""
    kinds = {"a": "longspec", "b": "tokenswift", "c": "longspec"}
    found = plan(kinds, [10, 20])
    compared, rest = found[:12], found[12:]
    assert [(name, length) for name, setting, length in compared if setting.mode == "greedy"] == [
        (name, length) for name in kinds for length in (10, 20)
    ]
    assert all(setting.options[0][0] == ("self_draft" if name == "b" else "tree_widths") for name, setting, _ in found)
    assert {name for name, *_ in rest} == {"a", "b"} and len(found) == len(set(map(str, found)))
    assert {str(setting.options) for name, setting, _ in found if name == "c"} == {"(('tree_widths', [4, 4, 4, 3]),)"}


def test_changed_decoding_is_named_in_the_results_and_used(target, prompts, draft):
    cold, hot = (Setting.of("sample", {"temperature": heat}) for heat in (0.5, 5.0))
    assert cold.mode == "sample, temperature=0.5" and Setting.of("sample", {"temperature": 1.0}).mode == "sample"
    assert Setting.of("greedy", {"penalty": 1.2, "window": 64}).mode == "greedy, penalty=1.2, window=64"
    decoder = Decoder(target, prompts, tokens=12)
    texts = [decoder.run(draft, slice(0, 3), 50, setting.decoding, seed=0).text for setting in (cold, hot)]
    assert not torch.equal(*texts)
