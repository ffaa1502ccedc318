"""Weight files in every layout, opened and fetched only as far as their tensors are wanted."""

import json
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hf_longspec.modeling import loading as checkpoint_module
from hf_longspec.modeling.loading import Checkpoint

TENSORS = {"big.a": torch.arange(6.0), "big.b": torch.ones(3), "small.c": torch.tensor([2.0])}
SHARD_OF = {"big.a": "part-1", "big.b": "part-2", "small.c": "part-2"}


def write(folder, name, tensors):
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / name) if name.endswith(".safetensors") else torch.save(tensors, folder / name)


def sharded(folder, suffix):
    files = {name: f"{shard}.{suffix}" for name, shard in SHARD_OF.items()}
    for file in set(files.values()):
        write(folder, file, {name: TENSORS[name] for name in TENSORS if files[name] == file})
    index = {"safetensors": "model.safetensors.index.json", "bin": "pytorch_model.bin.index.json"}[suffix]
    (folder / index).write_text(json.dumps({"weight_map": files}))


@pytest.mark.parametrize("layout", ["model.safetensors", "pytorch_model.bin", "draft_model_weights.pth", "shards"])
@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_every_layout_gives_the_same_tensors(tmp_path, layout, suffix):
    sharded(tmp_path, suffix) if layout == "shards" else write(tmp_path, layout, TENSORS)
    checkpoint = Checkpoint(str(tmp_path))
    assert checkpoint.names == sorted(TENSORS)
    for prefix, expected in (("", set(TENSORS)), ("small.", {"small.c"}), ("none.", set())):
        found = checkpoint.read(prefix)
        assert set(found) == expected and all(torch.equal(found[name], TENSORS[name]) for name in found)


def test_a_file_by_its_own_name_and_one_of_an_old_torch(tmp_path):
    write(tmp_path, "mine.pth", TENSORS)
    torch.save(TENSORS, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    for name in ("mine.pth", "old.pth"):
        assert Checkpoint(str(tmp_path / name)).read("small.")["small.c"].tolist() == [2.0]


@pytest.mark.parametrize("name", ["../x.bin", r"..\\x.bin", "..", 3])
def test_an_index_names_files_beside_it_only(tmp_path, name):
    write(tmp_path, "x.bin", TENSORS)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"big.a": name}}))
    with pytest.raises(ValueError, match=r"index\.json refers to .*: expected names of files in the same folder"):
        Checkpoint(str(tmp_path / "a"))


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_a_shard_without_wanted_tensors_is_not_opened(tmp_path, suffix):
    sharded(tmp_path, suffix)
    (tmp_path / f"part-1.{suffix}").write_bytes(b"not weights")
    assert set(Checkpoint(str(tmp_path)).read("small.")) == {"small.c"}
    with pytest.raises(ValueError, match=f"part-1.{suffix} cannot be read"):
        Checkpoint(str(tmp_path)).read()


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("model.safetensors", cut),
        ("pytorch_model.bin", cut),
        ("draft_model_weights.pth", lambda path: torch.save([1, 2], path)),
        ("model.safetensors.index.json", lambda path: path.write_text("{}")),
    ],
    ids=["cut safetensors", "cut pickle", "list", "empty index"],
)
def test_what_is_no_weight_file_is_said_in_one_line(tmp_path, name, spoil):
    if not name.endswith(".json"):
        write(tmp_path, name, TENSORS)
    spoil(tmp_path / name)
    with pytest.raises(ValueError, match=r"cannot be read.*Download it again") as error:
        Checkpoint(str(tmp_path))
    assert str(tmp_path / name) in str(error.value) and len(str(error.value).splitlines()) == 1


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A Hub with one repository; the files that were asked for arrive in a snapshot."""
    repo, snapshot = tmp_path / "repo", tmp_path / "snapshot"
    snapshot.mkdir()

    def download(source, allow_patterns):
        assert source == "org/heads"
        for file in repo.iterdir():
            if any(fnmatch(file.name, pattern) for pattern in allow_patterns):
                (snapshot / file.name).write_bytes(file.read_bytes())
        return str(snapshot)

    monkeypatch.setattr(checkpoint_module, "snapshot_download", download)
    repo.mkdir()
    return repo, snapshot


def test_only_the_shards_with_wanted_tensors_are_downloaded(hub):
    repo, snapshot = hub
    sharded(repo, "safetensors")
    (repo / "optimizer.bin").write_bytes(b"large")
    checkpoint = Checkpoint("org/heads")
    assert [path.name for path in snapshot.iterdir()] == ["model.safetensors.index.json"]
    assert set(checkpoint.read("small.")) == {"small.c"}
    assert {path.name for path in snapshot.iterdir()} == {"model.safetensors.index.json", "part-2.safetensors"}


def test_nothing_to_read(hub, tmp_path):
    for source in ("org/heads", str(Path(tmp_path) / "repo")):
        with pytest.raises(ValueError, match=r"contains no weights: expected one of model\.safetensors\.index"):
            Checkpoint(source)
