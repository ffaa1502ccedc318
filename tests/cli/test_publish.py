"""The command that publishes, through the typer application: dry runs, uploads to a stand-in, one-line errors."""

import json
import shutil
import sys

import pytest
from huggingface_hub.errors import HfHubHTTPError

import hf_longspec
from hf_longspec import LongSpecDraftModel
from hf_longspec.hub import repository
from hf_longspec.hub.repository import STUB
from tests.cli.conftest import run_command
from tests.tiny_targets import tiny_target

# The client of huggingface_hub: httpx or httpx2.
CLIENT = sys.modules[HfHubHTTPError.__bases__[0].__module__.split(".")[0]]
FORBIDDEN = CLIENT.Response(403, request=CLIENT.Request("POST", "https://huggingface.co"))


def run(*arguments):
    return run_command("publish", *arguments)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    LongSpecDraftModel.from_target(tiny_target("llama")).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """A saved draft."""
    return shutil.copytree(saved, tmp_path / "draft")


@pytest.fixture
def offline(monkeypatch):
    """The use of the Hub fails the test."""
    monkeypatch.setattr(repository, "HfApi", lambda *_, **__: pytest.fail("the network was used"))


@pytest.mark.usefixtures("offline")
class TestDryRun:
    def test_the_folder_and_what_would_be_uploaded(self, folder):
        result = run(folder, "--dry-run", "--base-model", "org/t", "--repo", "org/longspec-draft", "--license", "mit")
        assert result.exit_code == 0, result.output
        output = folder.with_name("draft-hub")
        sizes = [path.stat().st_size for path in output.rglob("*") if path.is_file()]
        assert result.output.startswith(f"{sum(sizes):,} bytes in {len(sizes)} files of {output} would be uploaded")
        text = (output / "README.md").read_text()
        assert (
            "license: mit" in text and 'from_pretrained("org/longspec-draft", trust' in text and "Not measured." in text
        )

    def test_over_what_exists_on_request(self, folder):
        """Into the folder of the draft, too."""
        (folder / "README.md").write_text("tau 2.5")
        result = run(folder, "--dry-run", "--base-model", "org/t", "--output", folder, "--overwrite")
        assert result.exit_code == 0 and "Not measured." in (folder / "README.md").read_text()

    def test_the_facts_beside_the_draft_and_what_was_measured(self, folder, tmp_path):
        facts = {"base_model": "org/t", "training": "3 steps.", "command": "hf-longspec train", "commit": "c0ffee"}
        (folder / "card.json").write_text(json.dumps(facts))
        measured = tmp_path / "measured.md"
        measured.write_text("tau 2.50 ± 0.10 at 1024 tokens.\n", encoding="utf-8")
        assert run(folder, "--dry-run", "--acceptance", measured).exit_code == 0
        text = (folder.with_name("draft-hub") / "README.md").read_text()
        assert "\ntau 2.50 ± 0.10 at 1024 tokens.\n" in text and "Not measured" not in text
        assert "3 steps." in text and "c0ffee" in text

    def test_an_engine_beside_a_draft_with_a_stub(self, folder):
        """An upload names the engine's commit, which a dry run does not know; a commit that is given is kept."""
        shared, pinned = f"org/hf-longspec-engine-{hf_longspec.__version__}", f"org/engine@{'c' * 40}"
        for where, name in ((["--repo", "org/x"], f"{shared}@main"), (["--engine", pinned, "--overwrite"], pinned)):
            result = run(folder, "--dry-run", "--base-model", "org/t", *where)
            assert result.exit_code == 0, result.output
            output = folder.with_name("draft-hub")
            assert f'ENGINE = "{name}"' in (output / STUB).read_text() and not (output / "hf_longspec").exists()
            assert (output / "engine/hf_longspec/__init__.py").is_file() == (name != pinned)
            assert (f"to {shared} if that does not exist" in result.output) == (name != pinned)
            shutil.rmtree(output / "engine", ignore_errors=True)

    @pytest.mark.parametrize(
        ("arguments", "text", "complaint"),
        [
            (["--dry-run"], "", "not a Hub id"),
            (["--dry-run", "--base-model", "org/t"], "{", "is not JSON"),
            (["--dry-run", "--base-model", "org/t"], "[]", "holds a list"),
        ],
    )
    def test_errors_take_one_line(self, folder, monkeypatch, arguments, text, complaint):
        """`text` is that of card.json, if there is one."""
        monkeypatch.chdir(folder)
        if text:
            (folder / "card.json").write_text(text)
        assert_refused(folder, arguments, complaint)
        assert [path.name for path in folder.parent.iterdir()] == ["draft"]

    def test_what_is_no_draft(self, tmp_path):
        tiny_target("llama").save_pretrained(tmp_path / "target")
        assert_refused(tmp_path / "target", ["--dry-run", "--base-model", "org/t"], "is not a draft of hf_longspec")


def assert_refused(folder, arguments, complaint):
    result = run(folder, *arguments)
    assert result.exit_code == 2 and result.output.startswith("error: ") and complaint in result.output
    assert len(result.output.splitlines()) == 1


class TestUpload:
    def test_to_the_named_repository(self, folder, hub):
        result = run(folder, "--repo", "org/x", "--base-model", "org/t", "--private")
        assert result.exit_code == 0 and result.output.strip().endswith("https://huggingface.co/org/x/commit/1")
        assert [repo for _, repo, _ in hub.calls][2:] == ["org/x", "org/x"]
        assert all(options["private"] is True for call, _, options in hub.calls if call == "create_repo")
        assert [path.name for path in folder.parent.iterdir()] == ["draft"]

    @pytest.mark.parametrize(
        ("failure", "remedy"),
        [
            (HfHubHTTPError("403 Forbidden: log in.", response=FORBIDDEN), "403 Forbidden: log in."),
            (CLIENT.ConnectError("no route"), "the Hub was not reached: no route. Check the connection"),
        ],
        ids=["rights", "network"],
    )
    def test_failures_name_a_remedy_in_one_line(self, folder, hub, failure, remedy):
        hub.fail = failure
        result = run(folder, "--repo", "org/x", "--base-model", "org/t")
        assert result.exit_code == 2 and hub.calls == []
        (line,) = [line for line in result.output.splitlines() if line.startswith("error: ")]
        assert remedy in line and "Traceback" not in result.output
