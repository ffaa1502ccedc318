"""`hf-longspec bench` on the tiny target, at sizes that take seconds."""

import json
from pathlib import Path

import pytest
import torch

from hf_longspec import NgramDraftModel
from hf_longspec.bench import matrix
from hf_longspec.bench.calls import HF, PLAIN
from hf_longspec.bench.results import of_kind, read_records
from hf_longspec.cli import bench, models
from tests.cli.conftest import HUB_CARDS, run_command
from tests.tiny_targets import tiny_target
from tests.tiny_tokenizers import save_byte_target
from tests.watching import after, before

TEXT = str(HUB_CARDS.parent / "README.md")
SMALL = ["--context", "64", "--max-new-tokens", "8", "--repeats", "1", "--no-plots"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Run in an empty folder, with a bandwidth that takes no second to measure."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "read_gb_per_second", lambda device: 10.0)
    return tmp_path


@pytest.fixture
def invoke(tiny):
    def call(*arguments):
        data = [] if "--data" in arguments else ["--data", TEXT]
        return run_command("bench", "--target", tiny.target, *SMALL, *data, *arguments)

    return call


@pytest.fixture
def run(invoke):
    """`run(*arguments)`: output and calls of a run that must succeed."""

    def call(*arguments):
        result = invoke(*arguments)
        assert result.exit_code == 0, result.output
        return result, of_kind(read_records(Path("bench.jsonl")), "run")

    return call


def test_drafts_are_measured_beside_all_baselines(run, tiny, here, monkeypatch):
    monkeypatch.setattr("sys.argv", ["/somewhere/bin/hf-longspec", "bench", "--target", str(tiny.target)])
    options = f"--draft {tiny.longspec} --draft ngram --assistant {tiny.target} --repeats 2 --json --plots".split()
    options += ["--max-new-tokens", "32"]  # transformers drafts up to 20 tokens in one step
    result, _ = run(*options, "--data", "builtin")
    found = json.loads(result.stdout)
    assert found["finished"]
    methods = [HF, PLAIN, "hf prompt lookup", "hf assisted", "tiny-longspec", "ngram"]
    assert [row["method"] for row in found["rows"]] == methods
    for row in found["rows"]:
        assert row["text"] in ("reference", "identical")
        assert row["ttft_seconds"]["median"] > 0 and row["tokens_per_second"]["count"] == 2
        assert row["tau"] >= 1 and 0 < row["share_of_floor"] and row["tau_interval"] is None
        assert row["ratio_to_plain"]["count"] == 2
    assert found["rows"][3]["tau"] > 1  # the target assists itself
    assert sum(found["rows"][4]["acceptance_histogram"]) > 0
    pictures = (f"bench-{kind}.png" for kind in ("speed", "tau", "depth"))
    assert {Path(name).name for name in found["files"]} == {"bench.jsonl", "bench.md", *pictures}
    written = (here / "bench.jsonl").read_text(encoding="utf-8") + (here / "bench.md").read_text(encoding="utf-8")
    assert found["environment"]["command"] == "hf-longspec bench --target tiny-target"
    assert str(tiny.target.parent) not in written and str(here) not in written and "/somewhere" not in written


def test_a_sweep_measures_every_point_and_the_terminal_shows_less_than_the_file(run, here):
    """Of the settings that a draft has."""
    sweeps = ["--sweep", "sparse_ratio=0.5", "--sweep", "num_assistant_tokens=2,3"]
    result, calls = run("--draft", "specattn", "--draft", "ngram", *sweeps)
    specattn = [{"sparse_ratio": 0.5, "num_assistant_tokens": number} for number in (2, 3)]
    assert [call["point"] for call in calls if call["method"].startswith("specattn")] == specattn
    assert "| specattn, sparse_ratio=0.5, num_assistant_tokens=3 |" in result.stdout
    names = {call["method"] for call in calls if call["method"].startswith("ngram")}
    assert names == {"ngram, num_assistant_tokens=2", "ngram, num_assistant_tokens=3"}
    file = (here / "bench.md").read_text(encoding="utf-8")
    assert "share of floor |" in file and "share of floor |" not in result.stdout


def test_tau_by_category_of_several_data_sets(run, here):
    (here / "first.jsonl").write_text(json.dumps({"text": ["word " * 90], "category": "math"}), encoding="utf-8")
    (here / "second.jsonl").write_text(json.dumps({"text": "other " * 90}), encoding="utf-8")
    _, calls = run("--data", "first.jsonl", "--data", "second.jsonl", "--draft", "ngram", "--batch", "2")
    call = next(call for call in calls if call["method"] == "ngram")
    assert call["categories"] == ["math", "second"] and sum(call["row_steps"]) == call["steps"]
    taus = [f"{call['tokens'] / 2 / steps:.2f}" for steps in call["row_steps"]]
    assert f"| ngram | {taus[0]} | {taus[1]} |" in (here / "bench.md").read_text(encoding="utf-8")


def test_decoding_and_context_are_swept_and_the_floor_is_bytes_over_bandwidth(run, tiny, here):
    _, calls = run("--draft", "ngram", "--sweep", "context=32,48", "--sweep", "penalty=1.5")
    found = {(call["context"], call["decoding"]["penalty"], call["decoding"]["window"]) for call in calls}
    assert found == {(32, 1.5, 1024), (48, 1.5, 1024)}
    assert not list(here.glob("*.png"))
    model = models.load_target(str(tiny.target), torch.float32)
    weights = sum(p.numel() for p in model.parameters())  # its embedding is its head
    cache = 2 * 2 * 2 * 64  # keys and values, layers, heads, head size
    floors = {record["context"]: record["seconds"] for record in of_kind(read_records(here / "bench.jsonl"), "floor")}
    assert floors == {n: pytest.approx((weights + cache * n) * 4 / 10e9) for n in (32, 48)}


def test_prompts_of_their_own_length_from_a_column(run, here):
    lines = [json.dumps({"title": n, "story": "def f(x): return x + 1; " * n}) for n in (2, 3, 5)]
    (here / "q.jsonl").write_text("\n".join(lines), encoding="utf-8")
    options = ["--data", "q.jsonl", "--column", "story", "--context", "own", "--batch", "2", "--draft", "ngram"]
    result, calls = run(*options)
    assert {call["context"] for call in calls} == {0}
    assert "## prompts of their own length, batch 2" in result.output
    assert '"column": "story"' in (here / "bench.jsonl").read_text(encoding="utf-8")


def test_an_interrupted_run_keeps_its_lines_and_is_gone_on_with(invoke, run, here, monkeypatch):
    calls = []

    def interrupt(*_, **__):
        calls.append(None)
        if len(calls) == 5:  # two methods warm up and run, the third begins
            raise KeyboardInterrupt

    before(monkeypatch, matrix, "run_call", interrupt)
    result = invoke("--draft", "ngram")
    assert result.exit_code == 130
    first = of_kind(read_records(here / "bench.jsonl"), "run")
    assert len(first) == 2
    assert "--resume" in result.output and "The run was not finished." in result.output
    with monkeypatch.context() as patch:
        patch.setattr(models, "load_tokenizer", None)  # said before anything is loaded
        again = invoke("--draft", "ngram")
    assert again.exit_code == 2 and "--resume" in again.output
    absent = invoke("--draft", "ngram", "--resume", "--output", "other.jsonl")
    assert absent.exit_code == 2 and "other.jsonl" in absent.output
    _, resumed = run("--draft", "ngram", "--resume")
    assert resumed[:2] == first and len(resumed) == 4


def test_other_settings_and_another_environment_are_not_resumed(invoke, here, monkeypatch):
    assert invoke("--minutes", "1e-9").exit_code == 0
    written = (here / "bench.jsonl").read_bytes()
    settings = invoke("--resume", "--max-new-tokens", "9", "--draft", "specattn")
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 77)
        environment = invoke("--resume")
        unchanged = (here / "bench.jsonl").read_bytes()
        assert invoke("--minutes", "1e-9", "--overwrite").exit_code == 0
    assert settings.exit_code == environment.exit_code == 2
    assert "tokens was 8, now 9" in settings.output
    assert "drafts was ['ngram'], now ['specattn']" in settings.output
    assert "threads was" in environment.output and "now 77" in environment.output
    assert unchanged == written != (here / "bench.jsonl").read_bytes()


def test_a_wrong_text_is_the_exit_status(invoke, monkeypatch):

    def spoil(call, model, method, *_, **__):
        if type(method).__name__ == "NgramDraftModel":
            call.text[0, -1] ^= 1

    after(monkeypatch, matrix, "run_call", spoil)
    result = invoke("--draft", "ngram")
    assert result.exit_code == 1
    assert "## Wrong texts" in result.output


def test_a_missing_package_of_the_report_is_named_first(invoke, here, monkeypatch):
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    result = invoke()
    assert result.exit_code == 2 and "not installed: pip install pandas scipy" in result.output
    assert not list(here.iterdir())


def test_the_gate_is_off_where_there_is_one(monkeypatch):
    monkeypatch.setattr(NgramDraftModel, "settings", NgramDraftModel.settings | {"gate": True})
    assert bench.load_draft("ngram", tiny_target("llama")).setting("gate") is False


def test_the_preset_measures_every_draft_without_training_at_the_lengths_that_fit(here):
    """1K is the only length of the preset that this text has."""
    (here / "short.txt").write_text("one two three four " * 80, encoding="utf-8")
    target = save_byte_target(here / "target", max_position_embeddings=2048)
    arguments = ["--target", target, "--max-new-tokens", "4", "--repeats", "1", "--no-plots", "--data", "short.txt"]
    result = run_command("bench", *arguments, "--preset", "all", "--draft", "specattn")
    assert result.exit_code == 0, result.output
    calls = of_kind(read_records(Path("bench.jsonl")), "run")
    assert {(call["context"], call["decoding"].get("temperature")) for call in calls} == {(1024, None), (1024, 1.0)}
    assert {call["method"] for call in calls} - {HF, PLAIN, "hf prompt lookup"} == set(bench.ALL_DRAFTS)
