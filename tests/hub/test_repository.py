"""Folders and uploads of published drafts: their files, and refusals."""

import json
import shutil

import pytest
import torch
from transformers import AutoModel
from transformers.dynamic_module_utils import check_imports

import hf_longspec
from hf_longspec.hub import push, write_repository
from hf_longspec.hub.repository import PACKAGE, STUB

from .conftest import CARD, DRAFTS, ENGINE, LAST_COMMIT, NEW_COMMIT, contents

KINDS = pytest.mark.parametrize("kind", DRAFTS)
SECRET = "hf_secretsecretsecret"


def auto_map(folder):
    return json.loads((folder / "config.json").read_text()).get("auto_map")


@KINDS
def test_the_files_of_a_repository(published, make_draft, kind):
    """One stub, which transformers can check; and the package without commands, if the draft holds it itself."""
    draft = make_draft(kind)
    names = {"config.json", "generation_config.json", "README.md", "card.json", STUB, "custom_generate/generate.py"}
    names |= set() if draft.weightless else {"model.safetensors"}
    paths = [path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    sources = {f"hf_longspec/{path.relative_to(PACKAGE).as_posix()}": path.read_bytes() for path in paths}
    commands = ("hf_longspec/cli/",)
    sources = {name: text for name, text in sources.items() if not name.startswith(commands)}
    assert len(sources) > 100
    for place, more, engine in (("drafts", sources, "."), ("on-engine", {}, ENGINE)):
        files = contents(folder := published / place / kind)
        assert files.keys() == names | more.keys() and more.items() <= files.items()
        assert auto_map(folder) == {
            "AutoConfig": "longspec_draft.DraftConfig",
            "AutoModel": "longspec_draft.DraftModel",
        }
        config = json.loads(files["config.json"])
        assert config["target_name_or_path"] == "org/tiny-target" and config["hf_longspec_version"] == "0.1.0"
        assert f'ENGINE = "{engine}"' in files[STUB].decode() and len(files[STUB].splitlines()) < 60
        assert check_imports(folder / STUB) == []  # raises for packages that are not installed
        assert f'custom_generate="org/{kind}' in files["README.md"].decode()
    assert "[org/engine](https://huggingface.co/org/engine), at the commit" in files["README.md"].decode()
    assert contents(published / "engine") == sources | {"README.md": (published / "engine/README.md").read_bytes()}


@KINDS
def test_publishing_again(published, tmp_path, kind):
    """The installed class loads without trust, writes the same files over its own, and saves no word of the code."""
    one = shutil.copytree(published / "drafts" / kind, tmp_path / "one")
    draft = AutoModel.from_pretrained(one)
    assert type(draft) is DRAFTS[kind][0]
    draft.save_pretrained(tmp_path / "saved")
    assert auto_map(tmp_path / "saved") is None
    assert type(AutoModel.from_pretrained(tmp_path / "saved")) is DRAFTS[kind][0]
    draft.config.target_name_or_path = str(tmp_path)
    before = draft.config.to_dict(), draft.generation_config.to_dict()
    files = write_repository(draft, one, CARD, f"org/{kind}")
    assert contents(one) == contents(published / "drafts" / kind)  # and so without the path of this machine
    assert {file.as_posix() for file in files} == set(contents(one))
    recorded = dict.fromkeys(("architectures", "dtype"))  # fields that every saving records
    for old, new in zip(before, (draft.config.to_dict(), draft.generation_config.to_dict()), strict=True):
        assert old | recorded == new | recorded
    fresh = AutoModel.from_pretrained(one).state_dict()
    assert all(torch.equal(value, fresh[name]) for name, value in draft.state_dict().items())


def test_other_files_stay(make_draft, tmp_path):
    (tmp_path / "mine.py").write_text("x = 1\n")
    (tmp_path / "notes.txt").write_text("mine")
    write_repository(make_draft("longspec_plain"), tmp_path, CARD)
    found = contents(tmp_path)
    assert found["mine.py"] == b"x = 1\n" and found["notes.txt"] == b"mine"
    assert not list(tmp_path.glob(".publish-*"))


@pytest.mark.parametrize("kind", ["longspec", "longspec_plain"])
def test_push_to_hub_uploads_the_repository(published, make_draft, hub, kind, capfd):
    """The token goes to the Hub and nowhere else."""
    draft = make_draft(kind)
    if kind == "longspec":  # whose weights are drawn
        draft.load_state_dict(AutoModel.from_pretrained(published / "drafts" / kind).state_dict())
    where = {"private": True, "token": SECRET, "self_contained": True}
    commit = draft.push_to_hub(f"org/{kind}", base_model="org/tiny-target", **where)
    assert commit.commit_url.endswith("/commit/1")
    create, upload = hub.calls
    assert create == ("create_repo", f"org/{kind}", {"private": True, "exist_ok": True})
    assert upload[:2] == ("upload_folder", f"org/{kind}") and upload[2]["create_pr"] is False
    assert hub.uploaded == contents(published / "drafts" / kind)
    assert f'from_pretrained("org/{kind}", trust_remote_code=True)' in hub.uploaded["README.md"].decode()
    assert hub.tokens == [SECRET]
    assert not any(SECRET.encode() in text for text in hub.uploaded.values())
    assert SECRET not in str(hub.calls) + "".join(capfd.readouterr())


def test_the_engine_is_uploaded_once_and_named_with_its_commit(make_draft, hub):
    """By default it belongs to the owner of the draft, and has the version of the package in its name."""
    shared = f"org/hf-longspec-engine-{hf_longspec.__version__}"
    for engine, name in (("org/engine", "org/engine"), (None, shared), (ENGINE, None)):
        for hub.exists, uploaded, commit in ((False, [name, "org/x"], NEW_COMMIT), (True, ["org/x"], LAST_COMMIT)):
            hub.calls.clear()
            push(make_draft("longspec_plain"), "org/x", card=CARD, engine=engine)
            where = [repo for call, repo, _ in hub.calls if call == "upload_folder"]
            assert where == (uploaded if name else ["org/x"])
            assert f'ENGINE = "{f"{name}@{commit}" if name else ENGINE}"' in hub.uploaded[STUB].decode()
            assert {file for file in hub.uploaded if file.endswith(".py")} == {"custom_generate/generate.py", STUB}


@pytest.mark.parametrize(
    ("name", "options", "complaint"),
    [
        *((name, {"base_model": "org/t"}, "owner/name") for name in ("x", "a/b/c", "o/a b")),
        ("org/x", {}, "base_model"),
        ("org/x", {"base_model": "org/t", "licence": "mit"}, "licence"),
        ("org/x", {"card": CARD, "license": "mit"}, "license"),
        ("org/x", {"card": CARD, "engine": "org/engine@main"}, "40 digits"),
        ("org/x", {"card": CARD, "engine": "engine"}, "owner/name"),
        ("org/x", {"card": CARD, "engine": "org/x"}, "engine 'org/x'"),
        ("org/x", {"card": CARD, "self_contained": True, "engine": ENGINE}, "opposites"),
    ],
)
def test_nothing_is_uploaded_under_a_wrong_name_or_with_a_wrong_card(
    make_draft, hub, tmp_path, name, options, complaint
):
    draft = make_draft("longspec_plain")
    draft.config.target_name_or_path = None
    with pytest.raises(ValueError, match=complaint):
        draft.push_to_hub(name, **options)
    if "engine" in options and "self_contained" not in options:
        with pytest.raises(ValueError, match=complaint):
            write_repository(draft, tmp_path / "repo", CARD, name, options["engine"])
    with pytest.raises(ValueError, match="push_to_hub=True"):
        draft.save_pretrained(tmp_path / "repo", push_to_hub=True)
    assert hub.calls == hub.tokens == [] and not (tmp_path / "repo").exists()


@pytest.mark.parametrize(
    ("case", "complaint"),
    [
        ("target", "LlamaForCausalLM"),
        ("adapter", "LoRA adapter"),
        ("no file", "MyDraft.*__main__"),
        ("other package", "Mine"),
    ],
)
def test_what_cannot_be_published(hub_target, make_draft, hub, tmp_path, monkeypatch, case, complaint):
    if case == "target":
        draft = hub_target
    elif case == "adapter":
        from peft import LoraConfig, inject_adapter_in_model

        # what `add_adapter` calls; with transformers 5.24 that one needs peft 0.22
        draft = inject_adapter_in_model(LoraConfig(target_modules=["q_proj"]), make_draft("longspec"))
    elif case == "no file":
        cls = type("MyDraft", (hf_longspec.PlainDraftModel,), {"__module__": "__main__"})
        draft = cls.from_target(hub_target)
    else:
        (tmp_path / "somebodys.py").write_text(
            "from hf_longspec import PlainDraftModel\nclass Mine(PlainDraftModel): ...\n"
        )
        monkeypatch.syspath_prepend(str(tmp_path))
        import somebodys

        draft = somebodys.Mine.from_target(hub_target)
    with pytest.raises(ValueError, match=complaint):
        push(draft, "org/x", card=CARD)
    with pytest.raises(ValueError, match=complaint):
        write_repository(draft, tmp_path / "repo", CARD)
    assert hub.calls == [] and not (tmp_path / "repo").exists()
