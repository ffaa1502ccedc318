"""`hf-longspec bench` on the tiny target of the repository, at sizes that take seconds."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hf_longspec import NgramDraftModel
from hf_longspec.bench import matrix
from hf_longspec.bench.calls import HF, PLAIN
from hf_longspec.bench.results import command_line, read_records
from hf_longspec.cli import CommandError, bench, session
from hf_longspec.cli.app import app
from hf_longspec.testing import tiny_target

CARDS = Path(__file__).resolve().parents[2] / "hub_cards"
TARGET, LONGSPEC = str(CARDS / "tiny-target"), str(CARDS / "tiny-longspec")
SMALL = ["--target", TARGET, "--context", "64", "--max-new-tokens", "8", "--repeats", "2"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Run in an empty folder, with a bandwidth that takes no second to measure."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "read_gb_per_second", lambda device: 10.0)
    return tmp_path


def invoke(*arguments):
    return CliRunner().invoke(app, ["bench", *SMALL, *arguments])


def runs(path):
    return [record for record in read_records(path) if record["kind"] == "run"]


def test_drafts_are_measured_beside_all_baselines(here, monkeypatch):
    monkeypatch.setattr("sys.argv", ["/somewhere/bin/hf-longspec", "bench", "--target", TARGET])
    result = invoke("--draft", LONGSPEC, "--draft", "ngram", "--context", "64,128", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["finished"]
    methods = [HF, PLAIN, "hf prompt lookup", "tiny-longspec", "ngram"]
    assert [(row["context"], row["method"]) for row in found["rows"]] == [(n, m) for n in (64, 128) for m in methods]
    for row in found["rows"]:
        assert row["text"] in ("reference", "identical")
        assert row["ttft_seconds"]["median"] > 0 and row["tokens_per_second"]["count"] == 2
        assert row["tau"] >= 1 and 0 < row["share_of_floor"]
        assert row["ratio_to_plain"]["count"] == 2
    assert sum(found["rows"][3]["acceptance_histogram"]) > 0
    assert {Path(name).name for name in found["files"]} == {
        "bench.jsonl",
        "bench.md",
        *(f"bench-{kind}.png" for kind in ("speed", "tau", "depth")),
    }
    written = (here / "bench.jsonl").read_text(encoding="utf-8") + (here / "bench.md").read_text(encoding="utf-8")
    assert found["environment"]["command"] == "hf-longspec bench --target tiny-target"
    assert str(CARDS) not in written and str(here) not in written and "/somewhere" not in written


def test_the_share_of_the_floor_is_bytes_over_bandwidth(here):
    assert invoke("--draft", "ngram", "--no-plots").exit_code == 0
    records = read_records(here / "bench.jsonl")
    (floor,) = (record for record in records if record["kind"] == "floor")
    model = session.load_target(TARGET, torch.float32)
    weights = sum(p.numel() for p in model.parameters())  # its embedding is its head
    cache = 2 * 6 * 2 * 32 * 64  # keys and values, layers, heads, head size, tokens
    assert floor["seconds"] == pytest.approx((weights + cache) * 4 / 10e9)
    assert not list(here.glob("*.png"))


def test_a_sweep_measures_every_point(here):
    result = invoke("--sweep", "sparse_ratio=0.1,0.5", "--sweep", "num_assistant_tokens=2,3", "--no-plots")
    assert result.exit_code == 0, result.output
    points = {tuple(run["point"].items()) for run in runs(here / "bench.jsonl") if run["point"]}
    assert points == {(("sparse_ratio", r), ("num_assistant_tokens", n)) for r in (0.1, 0.5) for n in (2, 3)}
    assert "| specattn, sparse_ratio=0.5, num_assistant_tokens=3 |" in result.output


def test_decoding_and_context_are_swept_too(here):
    result = invoke("--draft", "ngram", "--sweep", "context=32,48", "--sweep", "penalty=1.5", "--no-plots")
    assert result.exit_code == 0, result.output
    found = {
        (run["context"], run["decoding"]["penalty"], run["decoding"]["window"]) for run in runs(here / "bench.jsonl")
    }
    assert found == {(32, 1.5, 1024), (48, 1.5, 1024)}


def test_prompts_of_their_own_length(here):
    lines = [{"turns": ["def f(x):\n    return x + 1\n" * n]} for n in (2, 3, 5)]
    (here / "q.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    result = invoke("--data", "q.jsonl", "--context", "own", "--batch", "2", "--draft", "ngram", "--no-plots")
    assert result.exit_code == 0, result.output
    assert {run["context"] for run in runs(here / "bench.jsonl")} == {0}
    assert "## prompts of their own length, batch 2" in result.output


def test_an_interrupted_run_keeps_its_lines_and_is_gone_on_with(here, monkeypatch):
    real, calls = matrix.run_call, []

    def interrupted(*args, **kwargs):
        calls.append(None)
        if len(calls) == 7:  # three methods warm up and run, the fourth begins
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(matrix, "run_call", interrupted)
    result = invoke("--no-plots")
    assert result.exit_code == 130
    before = runs(here / "bench.jsonl")
    assert len(before) == 3
    assert "--resume goes on" in result.output
    monkeypatch.setattr(matrix, "run_call", real)
    assert invoke("--no-plots").exit_code == 2  # the file is there
    assert invoke("--no-plots", "--resume").exit_code == 0
    after = runs(here / "bench.jsonl")
    assert after[:3] == before and len(after) == 8


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (["--max-new-tokens", "9"], "tokens was 8, now 9"),
        (["--draft", "ngram"], "drafts was ['specattn'], now ['ngram']"),
    ],
)
def test_other_settings_are_not_resumed(changed, named, here):
    assert invoke("--no-plots", "--minutes", "0").exit_code == 0
    before = (here / "bench.jsonl").read_bytes()
    result = invoke("--no-plots", "--resume", *changed)
    assert result.exit_code == 2
    assert named in result.output
    assert (here / "bench.jsonl").read_bytes() == before


def test_another_environment_is_not_resumed(here, monkeypatch):
    assert invoke("--no-plots", "--minutes", "0").exit_code == 0
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    result = invoke("--no-plots", "--resume")
    assert result.exit_code == 2
    assert "threads was" in result.output and "now 77" in result.output


def test_a_wrong_text_is_the_exit_status(monkeypatch):
    real = matrix.run_call

    def spoiled(model, method, *args, **kwargs):
        call = real(model, method, *args, **kwargs)
        if type(method).__name__ == "NgramDraftModel":
            call.text[0, -1] ^= 1
        return call

    monkeypatch.setattr(matrix, "run_call", spoiled)
    result = invoke("--draft", "ngram", "--no-plots")
    assert result.exit_code == 1
    assert "## Wrong texts" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--context", "0"], "--context '0': expected numbers of at least 1"),
        (["--batch", "own"], "--batch 'own'"),
        (["--context", "99k"], "exceed the 16384 positions"),
        (["--dtype", "int8"], "--dtype int8: expected auto"),
        (["--data", "absent.jsonl"], "no such file or folder"),
        (["--draft", "/absent"], "cannot load the draft"),
        (["--draft", TARGET], "not a draft"),
        (["--draft", "ngram", "--draft", "ngram"], "two are called 'ngram'"),
        (["--assistant", "/absent"], "cannot load the assistant"),
        (["--sweep", "sparse_rate=1"], "no draft has such a setting"),
        (["--sweep", "sparse_ratio=7"], "sparse_ratio=7.0: expected a number in (0, 1]"),
        (["--sweep", "window=8"], "without a penalty"),
        (["--output", "x.txt"], "ends with .jsonl"),
    ],
)
def test_what_cannot_be_run_is_said_in_one_line(arguments, message, here):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert result.output.count("\n") == 1 and result.output.startswith("error: ")
    assert not list(here.iterdir())


def test_a_column_of_another_data_set(here):
    (here / "q.csv").write_text("title,story\nA," + "def f(x): return x; " * 30 + "\n", encoding="utf-8")
    result = invoke("--data", "q.csv", "--column", "story", "--draft", "ngram", "--no-plots")
    assert result.exit_code == 0, result.output
    assert '"layout": "column story"' in (here / "bench.jsonl").read_text(encoding="utf-8")


def test_a_missing_package_of_the_report_is_named_first(here, monkeypatch):
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    result = invoke()
    assert result.exit_code == 2 and "needs pandas and scipy, which is not installed" in result.output
    assert not list(here.iterdir())


def test_an_ordinary_model_assists():
    result = invoke("--assistant", TARGET, "--draft", "ngram", "--json", "--no-plots")
    assert result.exit_code == 0, result.output
    row = next(row for row in json.loads(result.stdout)["rows"] if row["method"] == "hf assisted")
    assert row["tau"] > 1 and row["text"] == "identical"


def test_commands_lose_their_folders():
    assert command_line(["/a/b/app.py", "bench", "--data", "/x/y/z.jsonl", "--set=a=/q/r", "org/model"]) == (
        "hf-longspec bench --data z.jsonl --set=a=r org/model"
    )
    assert command_line(["x", str(Path.cwd() / "sub" / "f")]) == "x sub/f"


@pytest.fixture
def target():
    return tiny_target("llama")


def test_the_gate_is_off_where_there_is_one(target, monkeypatch):
    monkeypatch.setattr(NgramDraftModel, "settings", NgramDraftModel.settings | {"gate": True})
    assert bench.load_draft("ngram", target).setting("gate") is False


def test_a_method_for_every_point_of_the_settings_that_a_draft_has(target):
    drafts = bench.load_drafts(["specattn", "ngram"], target)
    axes = {"sparse_ratio": ["0.5", "1"], "ngram_candidates": ["2"]}
    methods = bench.points_of(drafts, axes, target)
    assert [method.name for method in methods] == [
        "specattn, sparse_ratio=0.5, ngram_candidates=2",
        "specattn, sparse_ratio=1.0, ngram_candidates=2",
        "ngram, ngram_candidates=2",
    ]
    assert [method.how for method in methods] == [drafts["specattn"], drafts["specattn"], drafts["ngram"]]
    with pytest.raises(CommandError, match=r"--sweep: specattn, sparse_ratio=7\.0: .*sparse_ratio"):
        bench.points_of(drafts, {"sparse_ratio": ["7"]}, target)


def test_folders_of_one_name_cannot_be_told_apart(tmp_path, target):
    folders = [tmp_path / part / "draft" for part in "ab"]
    for folder in folders:
        folder.mkdir(parents=True)
    with pytest.raises(CommandError, match="two are called 'draft'"):
        bench.load_drafts([*map(str, folders), "ngram"], target)
