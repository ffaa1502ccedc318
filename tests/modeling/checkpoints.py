"""Changed copies of checkpoints of other projects, and how they are refused."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_longspec.modeling.loading import Checkpoint


def weights_of(folder):
    if (folder / "model.safetensors").exists():
        return load_file(folder / "model.safetensors")
    return torch.load(folder / "pytorch_model.bin", weights_only=True)


def changed_copy(source, place, rename=lambda name: name, tensors=None, drop=(), **changes):
    """A checkpoint below `place` with other values in config.json, other names, and other tensors."""
    folder = shutil.copytree(source, place / f"{source.name}-{len(list(place.iterdir()))}")
    raw = json.loads((folder / "config.json").read_text())
    raw = {key: value for key, value in (raw | changes).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(raw))
    weights = weights_of(folder) | (tensors or {})
    for file in ("model.safetensors", "pytorch_model.bin"):
        (folder / file).unlink(missing_ok=True)
    kept = {rename(key): value.clone() for key, value in weights.items() if key not in drop}
    save_file(kept, folder / "model.safetensors")
    return folder


def devices_of_refusal(kind, folder, message, monkeypatch):
    """Have a class of drafts refuse a checkpoint in one line; returns the devices to which it read tensors before."""
    read, devices = Checkpoint.read, []
    monkeypatch.setattr(
        Checkpoint, "read", lambda self, prefix="", device="cpu": devices.append(device) or read(self, prefix, device)
    )
    with pytest.raises(ValueError, match=message) as caught:
        kind.from_pretrained(folder)
    assert "\n" not in str(caught.value)
    return devices
