"""Drafts of every kind for a tiny target, published to folders and to a hand-made Hub cache."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from hf_longspec.hub import Card, repository, write_repository
from hf_longspec.hub.repository import write_engine
from hf_longspec.modeling import register_draft
from tests.modeling.test_contract import SETTINGS
from tests.tiny_targets import made_for, tiny_target

DRAFTS = {kind: (draft.model, SETTINGS.get(kind, {})) for kind, draft in register_draft.DRAFTS.items()}
CARD = Card(base_model="org/tiny-target")
# Commits of engines: of one that is uploaded, and of one that exists.
NEW_COMMIT, LAST_COMMIT = "a" * 40, "b" * 40
ENGINE = f"org/engine@{99:040x}"


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def hub(monkeypatch):
    """Replace the Hub by a record of calls and uploaded files; `fail` is raised when it is set."""
    record = SimpleNamespace(calls=[], uploaded={}, tokens=[], exists=False, fail=None)
    commit = SimpleNamespace(commit_url="https://huggingface.co/org/x/commit/1", oid=NEW_COMMIT)

    class Api:
        def __init__(self, token=None):
            record.tokens.append(token)

        def repo_exists(self, repo_id):
            return record.exists

        def model_info(self, repo_id):
            return SimpleNamespace(sha=LAST_COMMIT)

        def create_repo(self, repo_id, **options):
            if record.fail is not None:
                raise record.fail
            record.calls.append(("create_repo", repo_id, options))

        def upload_folder(self, *, folder_path, **options):
            record.calls.append(("upload_folder", options.pop("repo_id"), options))
            record.uploaded = contents(Path(folder_path))
            return commit

    monkeypatch.setattr(repository, "HfApi", Api)
    return record


@pytest.fixture(scope="session")
def hub_target():
    return tiny_target("llama")


@pytest.fixture(scope="session")
def make_draft(hub_target):
    """Return `make_draft(kind)`, which makes a draft with settings other than the defaults."""

    def make(kind):
        cls, settings = DRAFTS[kind]
        return made_for(cls, hub_target, **settings)

    return make


def publish(folder, kinds, hub_target, make_draft):
    """Write `target`, `drafts/<kind>`, `on-engine/<kind>`, and `hub`, a cache that has them and the engine."""
    hub_target.save_pretrained(folder / "target")
    for number, kind in enumerate(kinds):
        draft = make_draft(kind)
        write_repository(draft, folder / "drafts" / kind, CARD, f"org/{kind}")
        write_repository(draft, folder / "on-engine" / kind, CARD, f"org/{kind}-on-engine", ENGINE)
        into_cache(folder, f"org/{kind}", folder / "drafts" / kind, number)
        into_cache(folder, f"org/{kind}-on-engine", folder / "on-engine" / kind, number)
    write_engine(folder / "engine")
    into_cache(folder, "org/engine", folder / "engine", 99)
    return folder


@pytest.fixture(scope="session")
def published(tmp_path_factory, hub_target, make_draft):
    """All kinds, see [`publish`]."""
    return publish(tmp_path_factory.mktemp("published"), DRAFTS, hub_target, make_draft)


def into_cache(folder, repo_id, files, commit):
    """Put a repository with one commit into the Hub cache of `folder`, whose files are links to numbered ones."""
    repo = folder / "hub" / f"models--{repo_id.replace('/', '--')}"
    shutil.copytree(files, snapshot := repo / "snapshots" / f"{commit:040x}")
    (repo / "blobs").mkdir()
    for number, path in enumerate([path for path in snapshot.rglob("*") if path.is_file()]):
        path.rename(repo / "blobs" / str(number))
        path.symlink_to(repo / "blobs" / str(number))
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(f"{commit:040x}")
