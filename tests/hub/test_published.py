"""Published drafts, loaded by transformers alone and beside the installed package, in separate processes."""

from pathlib import Path

import pytest

from .conftest import DRAFTS, run_offline

SCRIPT = Path(__file__).with_name("loading.py")
KINDS = pytest.mark.parametrize("kind", DRAFTS)
TEXTS = (
    "hub",
    "folder",
    "saved",
    "saved_with_code",
    "streamed",
    "custom_generate",
    "custom_generate_folder",
    "settings",
    "engine",
)


@pytest.fixture(scope="module")
def absent(published):
    return run_offline(SCRIPT, "absent", published, folder=published)


@pytest.fixture(scope="module")
def installed(published):
    return run_offline(SCRIPT, "installed", published, folder=published, package=True)


@pytest.fixture(scope="module")
def remote_first(published):
    return run_offline(SCRIPT, "remote-first", published, folder=published, package=True)


@pytest.fixture(scope="module")
def package_first(published):
    return run_offline(SCRIPT, "package-first", published, folder=published, package=True)


@pytest.fixture(params=["remote_first", "package_first"])
def both(request):
    return request.getfixturevalue(request.param)


class TestWithoutThePackage:
    @KINDS
    @pytest.mark.parametrize("what", TEXTS)
    def test_generates_the_text_of_the_target(self, absent, kind, what):
        assert absent[kind][what] is True

    @KINDS
    def test_the_code_of_the_repository_is_used(self, absent, kind):
        assert absent[kind]["modules"] == ["transformers_modules"] * 3
        assert not absent["imported"]

    @KINDS
    def test_the_route_is_one_wrapper_though_every_copy_installs_it(self, absent, kind):
        assert absent[kind]["route_layers"] == 1
        assert absent["stock"] == "transformers.generation.utils"


class TestBesideThePackage:
    @KINDS
    @pytest.mark.parametrize(
        "what", ["installed", "copied", "installed_again", "cache_of_the_other", "custom_generate"]
    )
    def test_both_copies_generate_the_text_of_the_target(self, both, kind, what):
        assert both[kind][what] is True

    @KINDS
    def test_the_installed_classes_are_used_once_they_are_imported(self, both, kind):
        assert both[kind]["modules"] == ["hf_longspec", "transformers_modules"]
        assert both[kind]["wins"] == ["hf_longspec"] * 2  # with the flag and without

    @KINDS
    def test_the_route_is_one_wrapper(self, both, kind):
        assert both[kind]["route_layers"] == 1
        assert both["stock"] == "transformers.generation.utils"

    @KINDS
    def test_a_copy_is_published_like_the_draft_itself(self, both, kind):
        assert both[kind]["published_again"] is True

    def test_the_package_was_hidden_while_the_copies_were_loaded(self, remote_first):
        assert remote_first["alone_imported"] is False


class TestInstalledAndNotImported:
    @KINDS
    def test_the_package_is_used_and_nothing_of_the_copy(self, installed, kind):
        assert not installed["imported_before"] and installed["imported"]
        assert installed[kind]["module"] == installed[kind]["engine"] == "hf_longspec"
        assert installed[kind]["hub"] is True and installed[kind]["copies_imported"] == []

    @KINDS
    def test_loading_changes_nothing_in_what_is_saved_later(self, installed, kind):
        weights = [] if kind in ("specattn", "longspec_plain", "longspec_ngram") else [".safetensors"]
        assert installed[kind]["saved"] == sorted([".json", ".json", *weights])
        assert not installed[kind]["names_code"]


@pytest.mark.parametrize("setting", ["compile", "ngram_candidates", "ranks"])
def test_a_copy_refuses_in_one_line_what_needs_the_package(absent, setting):
    message = absent["refused"][setting]
    assert "pip install hf_longspec" in message and "\n" not in message


@KINDS
def test_the_gate_is_off_in_a_copy(absent, kind):
    assert absent[kind]["gate"] == 0
