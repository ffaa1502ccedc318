"""Training from stored states against training beside a running target."""

import pytest
import torch
from safetensors.torch import load_file

from hf_longspec.training import TokenWindows
from hf_longspec.training.target_pass import TargetPass


def history(trainer):
    names = ("loss", "grad_norm")
    return [tuple(entry[name] for name in names) for entry in trainer.state.log_history if "loss" in entry]


@pytest.fixture
def rows(tokens):
    return [{"input_ids": tokens[start : start + length]} for start, length in ((0, 33), (50, 20), (100, 9))]


@pytest.mark.parametrize("loss", ["kl", "ce"])
def test_without_offsets_the_losses_are_those_beside_the_target(
    make_trainer, make_draft, rows, tmp_path, loss, monkeypatch
):
    settings = {"dataset": rows, "loss": loss, "max_offset": 0}
    beside = make_trainer(model=make_draft(), **settings)
    beside.train()
    folder = str(tmp_path / "kv")
    make_trainer(model=make_draft(), target_kv_dir=folder, max_steps=1, **settings).train()
    monkeypatch.setattr(TargetPass, "__call__", lambda *_: pytest.fail("the target was run"))
    stored = make_trainer(model=make_draft(), target_kv_dir=folder, **settings)
    stored.train()
    # rows of other batches are padded otherwise, which changes the order of float32 sums
    assert history(stored) == [pytest.approx(step, rel=1e-4) for step in history(beside)]


def test_keys_are_kept_with_the_positions_they_were_rotated_by(make_trainer, rows, tmp_path):
    trainer = make_trainer(dataset=rows, target_kv_dir=str(tmp_path / "kv"), max_steps=2)
    trainer.train()
    for number, row in enumerate(rows):
        stored = load_file(tmp_path / "kv" / f"row-{number:08d}.safetensors")
        positions = stored["position_ids"]
        assert positions[:4].tolist() == [0, 1, 2, 3] and positions[4] > 4
        states = trainer.method.target_pass(row["input_ids"][None], positions[None])
        torch.testing.assert_close(stored["keys"], states.keys[0])
        torch.testing.assert_close(stored["hidden"], states.hidden[0])
    assert len({int(load_file(file)["position_ids"][4]) for file in (tmp_path / "kv").glob("*.safetensors")}) == 3
    assert trainer.method.longest_position == max(
        int(load_file(file)["position_ids"].max()) for file in (tmp_path / "kv").glob("*.safetensors")
    )


def test_an_interrupted_store_is_completed(make_trainer, rows, tmp_path):
    folder = tmp_path / "kv"
    make_trainer(dataset=rows, target_kv_dir=str(folder), max_steps=1).train()
    kept, lost = folder / "row-00000000.safetensors", folder / "row-00000001.safetensors"
    content, written = lost.read_bytes(), kept.stat().st_mtime_ns
    lost.unlink()
    make_trainer(dataset=rows, target_kv_dir=str(folder), max_steps=1).train()
    assert lost.read_bytes() == content
    assert kept.stat().st_mtime_ns == written


@pytest.mark.parametrize(("change", "name"), [({"loss": "ce"}, "loss"), ({"anchors": 2}, "anchors"), ({}, "first_row")])
def test_a_store_of_something_else_is_refused(make_trainer, rows, tmp_path, change, name):
    folder = str(tmp_path / "kv")
    make_trainer(dataset=rows, target_kv_dir=folder, max_steps=1).train()
    others = rows if change else [{"input_ids": row["input_ids"] + 1} for row in rows]
    with pytest.raises(ValueError, match=f"was written with {name}=.*another folder"):
        make_trainer(dataset=others, target_kv_dir=folder, max_steps=1, **change).train()


def test_windows_of_a_stream_can_be_stored(make_trainer, tokens, tmp_path):
    trainer = make_trainer(dataset=TokenWindows(tokens[:100], 25), target_kv_dir=str(tmp_path / "kv"), max_steps=2)
    trainer.train()
    assert len(trainer.train_dataset) == 4 == len(list((tmp_path / "kv").glob("*.safetensors")))
