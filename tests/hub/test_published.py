"""Published drafts, loaded by transformers alone and beside the installed package, in separate processes."""

from pathlib import Path

import pytest

from .conftest import DRAFTS, run_offline
from .loading import KINDS

SCRIPT = Path(__file__).with_name("loading.py")


@pytest.mark.parametrize("mode", ["absent", "package-first", "remote-first"])
def test_loading_and_generating(published, mode):
    """The checks are in the script, whose name of a kind or a check is in the message when one fails."""
    told = run_offline(SCRIPT, mode, published, folder=published, package=mode != "absent")
    assert told == f"{mode}: {' '.join(KINDS)}"


def test_every_registered_draft_is_loaded():
    assert sorted(KINDS) == sorted(DRAFTS)
