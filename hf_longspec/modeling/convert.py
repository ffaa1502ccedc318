"""Drafts that the authors of LongSpec published, in the format of this package.

Their checkpoints hold one block of 20 tensors; the six published ones lie in an ordinary Hugging Face repository, their
trainer writes the same tensors to `draft_model_weights.pth`. Shapes are the target's, so its configuration decides.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors.torch import load_file
from transformers import AutoConfig

from .configuration_longspec import LongSpecConfig
from .modeling_longspec import LongSpecDraftModel

# Draft -> target it was trained for.
PUBLISHED = {
    "sail/longspec-vicuna-7b-v1.5-16k": "lmsys/vicuna-7b-v1.5-16k",
    "sail/longspec-vicuna-13b-v1.5-16k": "lmsys/vicuna-13b-v1.5-16k",
    "sail/longspec-longchat-7b-v1.5-32k": "lmsys/longchat-7b-v1.5-32k",
    "sail/longspec-longchat-13b-16k": "lmsys/longchat-13b-16k",
    "sail/longspec-Llama-3-8B-Instruct-262k": "gradientai/Llama-3-8B-Instruct-262k",
    "sail/longspec-QwQ-32B-Preview": "Qwen/QwQ-32B-Preview",
}
# Wrappers that may stand before a name.
PREFIXES = ("module.", "model.", "glide.", "draft_model.")
# The target's own keys and values are attended; these projections are in the files and were never used.
UNUSED = ("cross_attn.k_proj.", "cross_attn.v_proj.", "self_attn.rotary_emb.", "cross_attn.rotary_emb.")
# In order of preference.
WEIGHT_FILES = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
    "draft_model_weights.pth",
)
# How the authors ran them: a query saw itself and 512 tokens before it; in training its newest target key was 1 to 4
# places behind; 68 nodes in five levels.
AS_TRAINED: dict[str, Any] = {"qkv_bias": True, "window": 513, "noise_range": [1, 4]}
TREE_WIDTHS = [4, 16, 16, 16, 16]


def convert(source: str, target: str | None = None) -> LongSpecDraftModel:
    """A LongSpec draft from one of the authors' checkpoints.

    Args:
        source (`str`): One of the published ids, a folder, or a weight file.
        target (`str`, *optional*):
            Id, folder or config.json of the target. Known for the published ids.

    Raises:
        ValueError: If there are no weights, tensors are missing or unknown, or their shapes are not the target's.
    """
    if target is None and source not in PUBLISHED:
        raise ValueError(
            f"no target is known for {source!r}: pass its id or config.json. Known are {', '.join(PUBLISHED)}."
        )
    target_config = AutoConfig.from_pretrained(target or PUBLISHED[source])
    config = LongSpecConfig.from_target(target_config, kv_layer=target_config.num_hidden_layers - 1, **AS_TRAINED)
    draft = LongSpecDraftModel(config)
    weights = renamed(read_weights(source))
    _check(weights, draft.block.state_dict(), source)
    biases = {name: torch.zeros_like(value) for name, value in draft.block.state_dict().items() if "bias" in name}
    draft.block.load_state_dict(biases | weights)
    draft.generation_config.tree_widths = list(TREE_WIDTHS)
    return draft.to(next(iter(weights.values())).dtype)


def read_weights(source: str) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, by the names that they have there.

    Raises:
        ValueError: If `source` holds no weight file.
    """
    path = Path(source)
    if path.is_file():
        return _read_file(path)
    if not path.is_dir():
        path = Path(snapshot_download(source, allow_patterns=["*.safetensors", "*.bin", "*.pth", "*.json"]))
    for name in WEIGHT_FILES:
        if not (path / name).exists():
            continue
        if not name.endswith(".index.json"):
            return _read_file(path / name)
        parts = sorted(set(json.loads((path / name).read_text(encoding="utf-8"))["weight_map"].values()))
        return {tensor: value for part in parts for tensor, value in _read_file(path / part).items()}
    raise ValueError(f"{source} holds no weights: expected one of {', '.join(WEIGHT_FILES)}.")


def renamed(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors without wrappers before their names, and without those that were never used.

    >>> list(renamed({"module.glide.mlp.up_proj.weight": torch.ones(1), "cross_attn.k_proj.bias": torch.ones(1)}))
    ['mlp.up_proj.weight']
    """
    found = {}
    for name, value in weights.items():
        while prefix := next((prefix for prefix in PREFIXES if name.startswith(prefix)), None):
            name = name.removeprefix(prefix)
        if not name.startswith(UNUSED):
            found[name] = value
    return found


def _read_file(path: Path) -> dict[str, torch.Tensor]:
    if path.suffix == ".safetensors":
        return load_file(path)
    weights: dict[str, torch.Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    return weights


def _check(weights: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], source: str) -> None:
    missing = sorted(name for name in expected.keys() - weights.keys() if not name.endswith(".bias"))
    unknown = sorted(weights.keys() - expected.keys())
    if missing or unknown:
        raise ValueError(
            f"{source} is no LongSpec draft: missing tensors {missing}, unknown tensors {unknown}. Pass a checkpoint "
            "that holds the draft alone."
        )
    for name, value in weights.items():
        if value.shape != expected[name].shape:
            raise ValueError(
                f"{name} has shape {tuple(value.shape)} in {source}, and this target needs "
                f"{tuple(expected[name].shape)}. Pass the target that the draft was trained for."
            )
