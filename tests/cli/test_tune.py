"""`tune`: the strategy on made-up measurements, real runs on the tiny drafts, and the file that is replaced."""

import json
import os
import shutil

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

from hf_longspec import Eagle3DraftModel, NgramDraftModel, PlainDraftModel, SpecAttnDraftModel
from hf_longspec.cli import tune as module
from hf_longspec.cli.measuring import endless
from hf_longspec.cli.tune import LARGE_GAMMA, Trial, plan_for, update_settings
from hf_longspec.generation.target import TargetView
from hf_longspec.modeling.eagle3.generation_eagle3 import Eagle3Drafter
from tests.robustness.enumeration import build
from tests.tiny_targets import tiny_prompts, tiny_target
from tests.watching import before

QUICK = ["--context", 64, "--max-new-tokens", 8, "--repeats", 1, "--prompts", 1]


@pytest.fixture
def drafts(tiny, tmp_path):
    """Copies that may be changed."""
    return {name: shutil.copytree(getattr(tiny, name), tmp_path / name) for name in ("longspec", "tokenswift")}


@pytest.fixture
def tune(command, tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        return command("tune", tiny.notes, "--target", tiny.target, *QUICK, *arguments)

    return run


@pytest.fixture
def rigged(monkeypatch):
    """Speeds by settings in place of the clock; unnamed settings run at 100 tokens/s. One is really decoded."""

    def rig(speeds):
        decode, taus = module.Tuner._decode, {}

        def clocked(self, draft, options):
            if type(draft) not in taus:
                taus[type(draft)] = decode(self, draft, options)[1]
            return speeds.get(json.dumps(list(options.values())), 100.0), taus[type(draft)]

        monkeypatch.setattr(module.Tuner, "_decode", clocked)

    return rig


def files(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


def simulated(tau, speed):
    """A `measure` that computes what would be measured, and the steps that asked it."""
    asked = []

    def measure(step, candidates, repeats=None):
        asked.append((step, list(candidates), repeats))
        return [Trial(step, options, tau(**options), speed(**options)) for options in candidates]

    return measure, asked


def test_eagle3_takes_the_reading_with_the_highest_tau():
    """A base of 10000 in place of the declared one, layers one below those of the file; then the fastest tree."""
    model = tiny_target("llama", num_hidden_layers=6)
    draft = Eagle3DraftModel.from_target(model, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    assert draft.layers_of(model.config) == (2, 3, 3)

    def tau(rope_theta, target_layer_ids, tree_widths=None):
        return 2 + (rope_theta == 1e4) * 0.2 + (target_layer_ids == [1, 2, 2]) * 0.3

    def speed(rope_theta, target_layer_ids, tree_widths=None):
        return 100 + 10 * (tree_widths == [1, 1, 1])

    measure, asked = simulated(tau, speed)
    best = plan_for(draft)(draft, TargetView(model), 10_000, measure)
    assert best == {"rope_theta": 1e4, "target_layer_ids": [1, 2, 2], "tree_widths": [1, 1, 1]}
    readings = [list(settings.values()) for settings in asked[0][1]]
    assert readings == [[theta, ids] for theta in (None, 1e4) for ids in (None, [1, 2, 2], [3, 4, 4])]
    # a gain within noise changes nothing
    measure, asked = simulated(lambda **settings: 2 + (settings["target_layer_ids"] is not None) * 0.02, speed)
    best = plan_for(draft)(draft, TargetView(model), 10_000, measure)
    assert best["rope_theta"] is None and best["target_layer_ids"] is None


@pytest.mark.parametrize("kind", [SpecAttnDraftModel])
def test_self_drafts_take_the_three_steps_of_the_paper(kind):
    """Acceptance saturates at a ratio of 5 %; speed peaks at gamma 6, and there at the next smaller ratio."""
    model = tiny_target("llama")
    draft = kind.from_target(model, sparse_min_tokens=1)

    def tau(sparse_ratio, num_assistant_tokens):
        return 1 + min(sparse_ratio, 0.05) * 100

    def speed(sparse_ratio, num_assistant_tokens):
        return 100 - (num_assistant_tokens - 6) ** 2 - (0 if num_assistant_tokens != 6 else 20 * (sparse_ratio - 0.03))

    measure, asked = simulated(tau, speed)
    best = plan_for(draft)(draft, TargetView(model), 10_000, measure)
    assert best == {"sparse_ratio": 0.03, "num_assistant_tokens": 6}
    (_, wide, once), (_, gammas, _), (_, around, _) = asked
    assert once == 1 and {options["num_assistant_tokens"] for options in wide} == {LARGE_GAMMA}
    assert {options["sparse_ratio"] for options in gammas} == {0.05}
    assert [tuple(options.values()) for options in around] == [(0.03, 6), (0.05, 6), (0.07, 6)]


@pytest.mark.parametrize(("kind", "name", "winner"), [
    ("longspec", "tree_widths", [2, 2]), ("tokenswift", "tree_branching", [1, 2, 2]),
])  # fmt: skip
def test_the_fastest_tree_is_written_and_nothing_else_changes(tune, tiny, drafts, rigged, kind, name, winner):
    file = drafts[kind] / "generation_config.json"
    before = json.loads(file.read_text())
    rigged({json.dumps([winner]): 150.0})
    result = tune("--draft", drafts[kind], "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 0 and found["winner"] == {name: winner}
    assert found["written"] == str(file)
    assert json.loads(file.read_text()) == before | {name: winner}
    assert found["gain"] == 0.5 and found["present"] == {name: before[name]}
    tried = [trial["options"] for trial in found["trials"]]
    assert {name: before[name]} in tried and len(tried) > 5
    assert any(trial["tau"] > 1 for trial in found["trials"]), "no candidate really drafted"
    draft = AutoModel.from_pretrained(drafts[kind])
    assert getattr(draft.generation_config, name) == winner


@pytest.mark.parametrize(
    ("speed", "arguments", "outcomes"),
    [
        (102.0, [], ["The present settings are kept: tree_widths="]),
        (150.0, ["--dry-run"], ["Not written (--dry-run): tree_widths=[2, 2]", "[4, 4, 4, 3]", "no draft"]),
    ],
    ids=["within noise", "dry run"],
)
def test_nothing_is_written(tune, drafts, rigged, speed, arguments, outcomes):
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files(drafts["longspec"])}
    rigged({json.dumps([[2, 2]]): speed})
    result = tune("--draft", drafts["longspec"], *arguments)
    assert result.exit_code == 0 and all(outcome in result.stdout for outcome in outcomes)
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files(drafts["longspec"])} == before


def test_specattn_goes_to_a_new_folder(tune, tiny, tmp_path, rigged, monkeypatch):
    monkeypatch.setattr(module, "GAMMAS", (2, 3))
    monkeypatch.setattr(module, "RATIOS", (0.1, 0.5))
    rigged({json.dumps([ratio, 3]): 150.0 for ratio in (0.07, 0.1, 0.5)})
    tuned = tmp_path / "tuned"
    result = tune("--set", "sparse_min_tokens=4", "--output", tuned, "--json")
    assert json.loads(result.stdout)["written"] == str(tuned / "generation_config.json")
    draft = AutoModel.from_pretrained(tuned)
    settings = draft.generation_config
    assert (settings.num_assistant_tokens, settings.sparse_min_tokens) == (3, 4)
    assert settings.gate is True  # measured without it, and used with it


def test_a_new_file_keeps_the_permissions_and_links_of_the_old(tmp_path):
    blob = tmp_path / "blob"
    blob.write_text('{"a": 1, "b": 2}')
    folder = tmp_path / "snapshot"
    folder.mkdir()
    (folder / "generation_config.json").symlink_to(blob)
    os.chmod(blob, 0o640)
    path = update_settings(folder, {"b": [3]})
    assert json.loads(path.read_text()) == {"a": 1, "b": [3]}
    assert blob.read_text() == '{"a": 1, "b": 2}'  # a cache may share it with others
    assert path.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("kind", ["llama", "mistral", "deepseek_v3"])
def test_every_run_continues_the_prompts_as_generate_does(kind, every_step_speculates):
    """Also the second one, which finds what the first has written, and after a drafter that reads more of the end."""
    model = endless(tiny_target(kind, attn_implementation="sdpa"))
    rows = torch.as_tensor(tiny_prompts(model.config.vocab_size, [40, 40, 40])[0])
    texts = model.generate(rows, attention_mask=torch.ones_like(rows), max_new_tokens=9, do_sample=False)[:, 40:]
    prompts = module.PrefilledPrompts(model, rows, batch=2, tokens=9)
    for draft in (NgramDraftModel.from_target(model), PlainDraftModel.from_target(model)) * 2:
        calls = prompts.decode(draft, 0.0)
        assert torch.equal(torch.cat([call.text for call in calls]), texts)
        assert [call.tokens for call in calls] == [16, 8]


def test_a_target_with_states_is_refused():
    with pytest.raises(ValueError, match="recurrent layers"):
        module.PrefilledPrompts(build("qwen3_5_text", 0), torch.ones(1, 4, dtype=torch.long), 1, 4)


def test_what_cannot_be_written_is_refused_before_anything_is_measured(tune, tmp_path, drafts, monkeypatch):
    monkeypatch.setattr(module.Tuner, "_decode", lambda *_: pytest.fail("measured"))
    assert "--output FOLDER" in tune().stderr
    assert "--output FOLDER" in tune("--draft", "org/draft").stderr
    other = tune("--draft", "ngram", "--dry-run")
    assert other.exit_code == 2 and "or longspec or specattn or tokenswift" in other.stderr
    short = tune("--draft", drafts["longspec"], "--context", 100_000)
    assert short.exit_code == 2 and "exceed the 16384 positions" in short.stderr


def test_eagle3_reads_the_end_of_the_prompt(tune, tiny, tmp_path, monkeypatch):
    """The prompts are decoded after a cache of their beginning, and the draft has entries of their end."""
    monkeypatch.setattr(module, "EAGLE3_WIDTHS", ([1],))
    stored = []
    before(monkeypatch, Eagle3Drafter, "remember", lambda *inputs: stored.append(int((inputs[-1] >= 0).sum())))
    target = AutoModelForCausalLM.from_pretrained(tiny.target)
    Eagle3DraftModel.from_target(target, window=16, tree_widths=[1]).save_pretrained(tmp_path / "eagle3")
    result = tune("--draft", tmp_path / "eagle3", "--dry-run", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert {trial["step"] for trial in found["trials"]} >= {"1 acceptance by reading", "2 speed by tree"}
    assert min(stored) >= 15  # the last one of the prompt is stored with the first verification
