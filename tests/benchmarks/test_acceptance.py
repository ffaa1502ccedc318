import pytest
import torch

import hf_longspec
from benchmarks.acceptance import AcceptanceBenchmark, Setting, plan
from benchmarks.harness import Run
from hf_longspec.bench.calls import Decoder, HfMethod, changed
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
    with changed(draft, {"selection": "window", "num_assistant_tokens": 2}):
        assert draft.setting("selection") == "window" and draft.setting("num_assistant_tokens") == 2
    assert draft.setting("selection") == "two_rows" and draft.setting("num_assistant_tokens") == 3
    del draft.generation_config.selection
    with changed(draft, {"selection": "window"}):
        assert draft.setting("selection") == "window"
    assert draft.setting("selection") == "two_rows"
    with pytest.raises(ValueError, match=r"has no settings \['selecton'\]"), changed(draft, {"selecton": "window"}):
        pass


def test_settings_are_compared_on_the_same_prompts(target, prompts, draft, tmp_path):
    settings = [
        Setting.of("greedy", selection="two_rows"),
        Setting.of("greedy", selection="window"),
        Setting.of("greedy", selection="two_rows", num_assistant_tokens=1),
    ]
    benchmark = AcceptanceBenchmark(target, {None: draft}, prompts, tokens=9, batch=2)
    rows = measured(benchmark, [(None, s, n) for s in settings for n in (40, 60)], tmp_path / "a.jsonl")
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


def test_tau_does_not_depend_on_the_batch(target, prompts, draft):
    setting = Setting.of("greedy", selection="all_rows")
    taus = [
        AcceptanceBenchmark(target, {None: draft}, prompts, 9, batch).measure(None, setting, 50) for batch in (1, 3)
    ]
    assert taus[0]["per_prompt"] == taus[1]["per_prompt"]
    assert torch.tensor(taus[0]["per_prompt"]).mean().item() == pytest.approx(taus[0]["tau"]["mean"], rel=1e-3)


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
    measured(benchmark, plan, tmp_path / "b.jsonl", seconds=1e-9)  # nobody knows how long the first one takes: it runs
    kinds = [record["kind"] for record in read_records(tmp_path / "b.jsonl")]
    assert kinds == ["environment", "acceptance", "skipped", "skipped", "skipped", "end"]


def test_prompt_lookup_is_measured_beside_drafts(target, prompts, tmp_path):
    """transformers' method runs prompt by prompt, ours in batches; greedily both write the same text."""
    methods = {
        "hf prompt lookup": HfMethod({"prompt_lookup_num_tokens": 3}, max_batch=1),
        "n-grams": hf_longspec.NgramDraftModel.from_target(target, num_assistant_tokens=3),
    }
    plan = [(name, Setting.of("greedy"), 50) for name in methods]
    benchmark = AcceptanceBenchmark(target, methods, prompts, tokens=9, batch=3)
    first, second = measured(benchmark, plan, tmp_path / "n.jsonl")
    assert first["same_text"] and second["same_text"]
    assert len(first["per_prompt"]) == len(second["per_prompt"]) == 3
    assert first["histogram"] == [] and sum(second["histogram"]) > 0
    assert "difference" not in first and "difference" in second
    assert "| greedy | draft=n-grams |" in (tmp_path / "n.md").read_text()


def test_a_method_of_transformers_takes_the_steps_that_were_counted(target, prompts):
    method = HfMethod({"prompt_lookup_num_tokens": 3}, max_batch=1)
    run = Decoder(target, prompts, tokens=9).run(method, slice(1, 2), 50, "greedy", seed=0)
    measured = AcceptanceBenchmark(target, {"hf": method}, prompts, 9, 3).measure("hf", Setting.of("greedy"), 50)
    assert measured["per_prompt"][1] == pytest.approx(run.tokens / run.steps, rel=1e-3)


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
