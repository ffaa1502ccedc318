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


def check_round_trip(draft, save, folder, place):
    """A draft of a folder, saved in the format of speculators, has its tensors and the keys that its reader has."""
    save(draft, place)
    theirs, ours = weights_of(folder), weights_of(place)
    assert {key: value.dtype for key, value in ours.items()} == {key: value.dtype for key, value in theirs.items()}
    assert all(torch.equal(ours[key], value) for key, value in theirs.items())
    configs = [json.loads((one / "config.json").read_text()) for one in (folder, place)]
    unread = ("transformers_version", "bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "pretraining_tp")
    for raw in configs:
        for key in ("auto_map", "transformers_version", "max_anchors", "num_depths"):
            raw.pop(key, None)
        # who wrote it, what no draft reads, and how many tokens an engine drafts
        for key in (*unread, "max_window_layers", "attention_dropout"):
            raw["transformer_layer_config"].pop(key, None)
        raw["speculators_config"]["proposal_methods"][0].pop("speculative_tokens")
    assert configs[0] == configs[1]


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
