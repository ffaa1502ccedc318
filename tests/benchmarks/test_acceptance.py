import pytest
import torch

from benchmarks import read_yaml
from benchmarks.acceptance import measure, plan, rounded_draft
from benchmarks.decoder import MODES
from benchmarks.runner import Run
from hf_longspec.cli.files import of_kind, read_records
from hf_longspec.cli.measuring import changed
from hf_longspec.modeling.register_draft import DRAFTS
from hf_longspec.modeling.shared.draft_weights import rounded_layers
from tests.benchmarks.conftest import specattn
from tests.modeling.shared.test_draft_weights import SIZES
from tests.tiny_targets import tiny_target


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
    drafts, greedy = {"long": draft, "short": other}, MODES["greedy"]
    planned = [(name, 40, greedy, {"selection": kind}) for name in drafts for kind in ("two_rows", "window")]
    for name, seconds in (("a.jsonl", 60), ("b.jsonl", 0)):
        with Run(tmp_path / name, "acceptance", seconds) as results:
            measure(results, planned, drafts, target, prompts, tokens=9, batch=3)
    rows = of_kind(read_records(tmp_path / "a.jsonl"), "acceptance")
    assert [row["options"]["draft"] for row in rows] == ["long", "long", "short", "short"]
    assert ["difference" in row for row in rows] == [False, False, True, True]
    for first, second in zip(rows[:2], rows[2:], strict=True):
        gap = second["tau"]["mean"] - first["tau"]["mean"]
        assert second["difference"]["mean"] == pytest.approx(gap, abs=1e-2)  # four significant digits are stored
    kinds = [record["kind"] for record in read_records(tmp_path / "b.jsonl")]
    assert kinds == ["environment", *["skipped"] * 4, "end"]


def test_every_setting_of_the_suite_is_one_of_its_draft():
    """The first of a kind has all settings, the second the first one alone, in both modes and at all lengths."""
    kinds = {kind: draft.model for kind, draft in DRAFTS.items() if kind in read_yaml("suites/acceptance.yaml")}
    kinds |= dict.fromkeys(("draft_weights", "few_bits"), kinds["specattn"]) | {"vocabulary": kinds["longspec"]}
    planned = plan({f"{name} {kind}": kind for name in ("first", "second") for kind in kinds}, [10, 20, 30])
    assert len(kinds) == len(read_yaml("suites/acceptance.yaml"))
    for kind, model in kinds.items():
        first, second = (
            [(length, decoding, options) for name, length, decoding, options in planned if name == f"{place} {kind}"]
            for place in ("first", "second")
        )
        assert second == first[: len(second)]
        assert {length for length, *_ in second} == {10, 20, 30}
        assert all(set(options) <= set(model.settings) for *_, options in first)


@pytest.mark.parametrize("bits", [2, 3, 7])
def test_weights_are_rounded_to_the_nearest_multiple_of_the_scale_of_their_group(bits):
    """All linear layers but the head; the target's own weights stay."""
    target = tiny_target("llama", **SIZES)
    layers = dict(rounded_layers(target, 4))
    own = {name: layer.weight.clone() for name, layer in layers.items()}
    copied = rounded_draft(target, bits).weights_for(target)
    most = 2 ** (bits - 1) - 1
    for name, layer in layers.items():
        assert torch.equal(layer.weight, own[name])
        for group, values in zip(own[name].view(-1, 64), copied.get_submodule(name).weight.view(-1, 64), strict=True):
            levels = group.abs().max() / most * torch.arange(-most, most + 1)
            nearest = (group[:, None] - levels).abs().min(dim=1).values
            # half a rounding of a weight below 1 in float32
            torch.testing.assert_close((group - values).abs(), nearest, rtol=0, atol=2**-24)
    assert torch.equal(copied.lm_head.weight, target.lm_head.weight)
