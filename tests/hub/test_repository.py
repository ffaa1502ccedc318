"""Folders and uploads of published drafts: their files, and refusals."""

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModel

import hf_longspec
from hf_longspec.hub import Card, push, repository, write_repository
from hf_longspec.hub.repository import MARK, write_engine

from .conftest import DRAFTS

KINDS = pytest.mark.parametrize("kind", DRAFTS)
CARD = Card(base_model="org/tiny-target")
SECRET = "hf_secretsecretsecret"


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def hub(monkeypatch):
    """Replace the Hub by a record of calls and uploaded files."""
    record = SimpleNamespace(calls=[], uploaded={}, tokens=[], exists=False)

    class Api:
        def __init__(self, token=None):
            record.tokens.append(token)

        def repo_exists(self, repo_id):
            return record.exists

        def create_repo(self, repo_id, **options):
            record.calls.append(("create_repo", repo_id, options))

        def upload_folder(self, *, folder_path, **options):
            from pathlib import Path

            record.calls.append(("upload_folder", options.pop("repo_id"), options))
            record.uploaded = contents(Path(folder_path))
            return SimpleNamespace(commit_url="https://huggingface.co/org/x/commit/1")

    monkeypatch.setattr(repository, "HfApi", Api)
    return record


@KINDS
def test_the_files_of_a_repository(make_draft, tmp_path, kind):
    draft = make_draft(kind)
    files = write_repository(draft, tmp_path / "repo", CARD)
    names = {file.as_posix() for file in files}
    assert names == set(contents(tmp_path / "repo"))
    assert names >= {"config.json", "generation_config.json", "README.md", "card.json", "custom_generate/generate.py"}
    assert ("model.safetensors" in names) == (not draft.weightless)
    assert not [name for name in names if "token" in name and "tokenswift" not in name]
    config = json.loads((tmp_path / "repo" / "config.json").read_text())
    for auto, cls in {"AutoConfig": type(draft.config), "AutoModel": type(draft)}.items():
        module, name = config["auto_map"][auto].split(".")
        assert name == cls.__name__ and f" {name}" in (tmp_path / "repo" / f"{module}.py").read_text()
    assert config["target_name_or_path"] == "org/tiny-target"
    assert all(text.decode().startswith(MARK) for name, text in contents(tmp_path / "repo").items() if ".py" in name)


@KINDS
def test_publishing_changes_nothing_in_the_draft(make_draft, tmp_path, kind):
    draft = make_draft(kind)
    draft.config.target_name_or_path = str(tmp_path)
    before = draft.config.to_dict(), draft.generation_config.to_dict()
    write_repository(draft, tmp_path / "repo", CARD)
    after = draft.config.to_dict(), draft.generation_config.to_dict()
    recorded = dict.fromkeys(("architectures", "dtype"))  # fields that every saving records
    for old, new in zip(before, after, strict=True):
        assert old | recorded == new | recorded
    assert not any(str(tmp_path).encode() in text for text in contents(tmp_path / "repo").values())


@KINDS
def test_the_installed_class_loads_without_trust_and_writes_the_same_files(make_draft, tmp_path, kind):
    write_repository(make_draft(kind), tmp_path / "one", CARD, "org/x")
    draft = AutoModel.from_pretrained(tmp_path / "one")
    assert type(draft) is DRAFTS[kind][0]
    write_repository(draft, tmp_path / "two", CARD, "org/x")
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    # the folder that the draft was loaded from is overwritten too
    write_repository(draft, tmp_path / "one", CARD, "org/x")
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    if not draft.weightless:
        fresh = AutoModel.from_pretrained(tmp_path / "one").state_dict()
        assert all(torch.equal(value, fresh[name]) for name, value in draft.state_dict().items())


@KINDS
def test_a_draft_saved_by_the_installed_class_refers_to_no_code(make_draft, tmp_path, kind):
    write_repository(make_draft(kind), tmp_path / "repo", CARD)
    AutoModel.from_pretrained(tmp_path / "repo").save_pretrained(tmp_path / "saved")
    assert "auto_map" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    assert type(AutoModel.from_pretrained(tmp_path / "saved")) is DRAFTS[kind][0]


def test_other_files_stay_and_code_that_is_not_needed_is_removed(make_draft, tmp_path):
    (tmp_path / "generation_old.py").write_text(f"{MARK}Apache-2.0.\n")
    (tmp_path / "mine.py").write_text("x = 1\n")
    (tmp_path / "notes.txt").write_text("mine")
    write_repository(make_draft("longspec_plain"), tmp_path, CARD)
    found = contents(tmp_path)
    assert "generation_old.py" not in found and found["mine.py"] == b"x = 1\n" and found["notes.txt"] == b"mine"
    assert not list(tmp_path.glob(".publish-*"))


ENGINE = "org/engine"


class TestEngine:
    @KINDS
    def test_the_draft_holds_no_code_and_names_the_engine(self, make_draft, tmp_path, kind):
        files = write_repository(make_draft(kind), tmp_path / "repo", CARD, "org/x", ENGINE)
        assert not [file for file in files if file.suffix == ".py"]
        named = json.loads((tmp_path / "repo" / "config.json").read_text())["auto_map"]
        assert set(named) == {"AutoConfig", "AutoModel"} and all(n.startswith(f"{ENGINE}--") for n in named.values())
        write_engine(tmp_path / "engine", ENGINE)
        assert all((tmp_path / "engine" / f"{n.split('--')[1].split('.')[0]}.py").is_file() for n in named.values())
        card = (tmp_path / "repo" / "README.md").read_text()
        assert 'code_revision="<commit of org/engine>"' in card and 'custom_generate="org/engine"' in card

    @pytest.mark.parametrize("exists", [False, True])
    def test_the_engine_is_uploaded_once(self, make_draft, hub, exists):
        hub.exists = exists
        push(make_draft("longspec_plain"), "org/x", card=CARD, engine=ENGINE)
        uploads = [repo for call, repo, _ in hub.calls if call == "upload_folder"]
        assert uploads == (["org/x"] if exists else [ENGINE, "org/x"])

    @pytest.mark.parametrize(
        ("engine", "complaint"),
        [("org/my--engine", "by --"), ("engine", "expected owner/name"), ("org/x", "the draft's own repository")],
    )
    def test_names_that_cannot_be_used(self, make_draft, hub, tmp_path, engine, complaint):
        with pytest.raises(ValueError, match=complaint):
            push(make_draft("longspec_plain"), "org/x", card=CARD, engine=engine)
        with pytest.raises(ValueError, match=complaint):
            write_repository(make_draft("longspec_plain"), tmp_path / "repo", CARD, "org/x", engine)
        assert hub.calls == [] and not (tmp_path / "repo").exists()


class TestUpload:
    @KINDS
    def test_push_to_hub_uploads_the_repository(self, make_draft, hub, tmp_path, kind):
        draft = make_draft(kind)
        commit = draft.push_to_hub("org/longspec-draft", private=True, token=SECRET, base_model="org/tiny-target")
        assert commit.commit_url.endswith("/commit/1")
        create, upload = hub.calls
        assert create == ("create_repo", "org/longspec-draft", {"private": True, "exist_ok": True})
        assert upload[:2] == ("upload_folder", "org/longspec-draft") and upload[2]["create_pr"] is False
        write_repository(draft, tmp_path / "repo", CARD, "org/longspec-draft")
        assert hub.uploaded == contents(tmp_path / "repo")
        assert b'from_pretrained("org/longspec-draft", trust_remote_code=True)' in hub.uploaded["README.md"]

    def test_the_token_goes_to_the_hub_and_nowhere_else(self, make_draft, hub, capfd):
        make_draft("longspec").push_to_hub("org/x", token=SECRET, base_model="org/tiny-target")
        assert hub.tokens == [SECRET]
        assert not any(SECRET.encode() in text for text in hub.uploaded.values())
        assert SECRET not in str(hub.calls) + "".join(capfd.readouterr())

    @pytest.mark.parametrize("name", ["name", "", "a/b/c", "org/", "org/a b", "../x"])
    def test_nothing_is_uploaded_without_an_owner_and_a_name(self, make_draft, hub, name):
        with pytest.raises(ValueError, match="expected owner/name"):
            make_draft("longspec_plain").push_to_hub(name, base_model="org/tiny-target")
        assert hub.calls == hub.tokens == []

    @pytest.mark.parametrize(
        ("options", "complaint"),
        [
            ({}, "no Hub id"),
            ({"base_model": "org/t", "licence": "mit"}, "a card has no licence"),
            ({"card": CARD, "license": "mit"}, "put all facts into the card"),
        ],
    )
    def test_nothing_is_uploaded_when_the_card_is_refused(self, make_draft, hub, options, complaint):
        draft = make_draft("longspec_plain")
        draft.config.target_name_or_path = None
        with pytest.raises(ValueError, match=complaint):
            draft.push_to_hub("org/x", **options)
        assert hub.calls == []

    def test_save_pretrained_does_not_upload_a_draft_without_its_code(self, make_draft, hub, tmp_path):
        for kind in ("longspec", "longspec_plain"):
            with pytest.raises(ValueError, match=r"without its code.*draft\.push_to_hub"):
                make_draft(kind).save_pretrained(tmp_path / kind, push_to_hub=True)
            assert not (tmp_path / kind).exists()


class TestRefusals:
    def refused(self, draft, folder, complaint):
        with pytest.raises(ValueError, match=complaint):
            push(draft, "org/x", card=CARD)
        with pytest.raises(ValueError, match=complaint):
            write_repository(draft, folder, CARD)
        assert not folder.exists()

    def test_other_models(self, hub_target, hub, tmp_path):
        self.refused(hub_target, tmp_path / "repo", "LlamaForCausalLM is no draft of hf_longspec")

    def test_drafts_with_an_adapter(self, make_draft, hub, tmp_path):
        from peft import LoraConfig

        draft = make_draft("longspec")
        draft.add_adapter(LoraConfig(target_modules=["q_proj"]))
        self.refused(draft, tmp_path / "repo", "merge it first")

    def test_classes_without_a_file(self, hub_target, hub, tmp_path):
        cls = type("MyDraft", (hf_longspec.PlainDraftModel,), {"__module__": "__main__"})
        self.refused(cls.from_target(hub_target), tmp_path / "repo", "MyDraft is defined in __main__")

    def test_classes_of_other_packages(self, hub_target, hub, tmp_path, monkeypatch):
        (tmp_path / "somebodys.py").write_text(
            "from hf_longspec import PlainDraftModel\nclass Mine(PlainDraftModel): ...\n"
        )
        monkeypatch.syspath_prepend(str(tmp_path))
        import somebodys

        self.refused(somebodys.Mine.from_target(hub_target), tmp_path / "repo", "needs hf_longspec installed")
