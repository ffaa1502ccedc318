"""Published drafts, loaded by transformers alone and beside the installed package, in separate processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import hf_longspec

from .conftest import DRAFTS
from .loading import KINDS, MODES

SCRIPT = Path(__file__).with_name("loading.py")


@pytest.fixture(scope="module")
def loaded(published):
    """The finished script, which ran without network and with caches of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    settings = {
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(published / "home"),
        "HF_HUB_CACHE": str(published / "hub"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(hf_longspec.__file__).parents[1]),
    }
    command = [sys.executable, str(SCRIPT), str(published)]
    return subprocess.run(command, env=kept | settings, cwd=published, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("mode", MODES)
def test_loading_and_generating(loaded, mode):
    """The checks are in the script, whose name of a kind or a check is in the message when one fails."""
    assert f"{mode}: {' '.join(KINDS)}" in loaded.stdout.splitlines(), loaded.stderr


def test_every_registered_draft_is_loaded():
    assert sorted(KINDS) == sorted(DRAFTS)
