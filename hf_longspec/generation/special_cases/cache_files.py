"""Files of caches: safetensors, with the lengths of the rows and a fingerprint of the config."""

import hashlib
import json
import os
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedConfig

# Fields of a config that leave keys, values and states as they are.
WITHOUT_EFFECT = {"architectures", "output_attentions", "output_hidden_states", "return_dict", "transformers_version"}
WITHOUT_EFFECT |= {"use_cache"}


def fingerprint_of(config: PreTrainedConfig) -> str:
    """Return a hash of the fields of a config that keys, values and states depend on."""
    fields = config.get_text_config(decoder=True).to_dict()
    kept = {
        name: value
        for name, value in fields.items()
        if name not in WITHOUT_EFFECT and not name.startswith("_") and not name.endswith("_token_id")
    }
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()


def save_cache(cache: Any, path: str | os.PathLike) -> None:
    """Write a cache, see [`SpeculativeCache.save`]. A file of this name is replaced once the new one is whole."""
    entries = {name: entry.contiguous() for name, entry in cache.entries().items()}
    metadata = {"format": "pt", "config": fingerprint_of(cache.config), "lengths": json.dumps(cache.counts)}
    part = f"{os.fspath(path)}.part"
    save_file(entries, part, metadata)
    os.replace(part, path)


def load_cache(cls: Any, path: str | os.PathLike, config: PreTrainedConfig, device: Any) -> Any:
    """Read a cache, see [`SpeculativeCache.load`]."""
    with safe_open(path, "pt", device=str(device)) as file:
        metadata = file.metadata() or {}
        if "lengths" not in metadata:
            raise ValueError(f"{path} holds no cache. Pass a file that SpeculativeCache.save has written.")
        if metadata["config"] != (wanted := fingerprint_of(config)):
            raise ValueError(
                f"{path} holds a cache of another config: its fingerprint is {metadata['config'][:12]}, and that of "
                f"this config {wanted[:12]}. Load it with the config of its model, or read the text again."
            )
        entries = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    return cls.holding(config, entries, json.loads(metadata["lengths"]))
