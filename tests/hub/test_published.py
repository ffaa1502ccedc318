"""Published drafts, loaded by transformers in processes with the package and without it."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import hf_longspec

from .conftest import DRAFTS, publish
from .loading import CASES

SCRIPT = Path(__file__).with_name("loading.py")


# Two with weights of their own, and two without. `make soak` publishes all.
FEW = ["longspec", "longspec_ngram", "specattn", "tokenswift"]


@pytest.mark.parametrize("kinds", [FEW, pytest.param(sorted(DRAFTS), marks=pytest.mark.soak)], ids=["few", "all"])
def test_loading_and_generating(tmp_path, hub_target, make_draft, kinds):
    """The checks are in the script, which runs without network and names a kind and a check when one fails."""
    published = publish(tmp_path, kinds, hub_target, make_draft)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    settings = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(published / "home"), "HF_HUB_CACHE": str(published / "hub")}
    settings |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": sysconfig.get_paths()["purelib"]}
    command = [sys.executable, "-S", SCRIPT, published, Path(hf_longspec.__file__).parents[1]]
    done = subprocess.run(command, env=kept | settings, cwd=published, capture_output=True, text=True, check=False)
    finished = {f"{case.__name__} {' '.join(kinds)}" for case in CASES}
    assert finished <= set(done.stdout.splitlines()), done.stderr
