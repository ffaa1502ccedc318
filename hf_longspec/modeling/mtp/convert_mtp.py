"""MTP layers in the checkpoints of targets: where they lie, by family, and how their tensors are read.

The names of the tensors decide the family, as a target may be loaded by code of its own. Names and shapes are compared
with those of the draft before a tensor is read, and only safetensors are read. The facts are those of transformers 5.23
(modeling_layers.py), speculators 0.9.0 and SGLang 0.5.23, whose chains agree for the families here.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any, Self

import torch
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError
from transformers import PreTrainedModel

from ...generation.target_modules import layer_at
from ..configuration_base import text_config
from ..loading import Checkpoint
from .modeling_mtp import MtpConfig, decoder_like


@dataclass(frozen=True)
class Family:
    """Names of the tensors of MTP layer j in a target of N layers, in which `{n}` stands for N + j and `{j}` for j."""

    block: str  # beginning of the names of the decoder layer
    parts: dict[str, str]  # beginning of the name of each other part, and its name in [`MtpLayer`]
    fields: dict[str, Any]  # fields of [`MtpConfig`] that differ from their defaults
    types: tuple[str, ...]  # model types of published checkpoints with these names


FAMILIES = {
    "DeepSeek": Family(
        "layers.{n}.",
        {
            **{f"layers.{{n}}.{part}.": f"{part}." for part in ("enorm", "hnorm", "eh_proj")},
            "layers.{n}.shared_head.norm.": "norm.",
        },
        {},
        ("deepseek_v3", "glm4_moe", "glm4_moe_lite"),
    ),
    "Qwen": Family(
        "mtp.layers.{j}.",
        {
            "mtp.pre_fc_norm_embedding.": "enorm.",
            "mtp.pre_fc_norm_hidden.": "hnorm.",
            "mtp.fc.": "eh_proj.",
            "mtp.norm.": "norm.",
        },
        {},
        ("qwen3_next", "qwen3_5", "qwen3_5_moe"),
    ),
    "MiMo": Family(
        "mtp_layers.{j}.",
        {
            "mtp_layers.{j}.token_layernorm.": "enorm.",
            "mtp_layers.{j}.hidden_layernorm.": "hnorm.",
            "mtp_layers.{j}.input_proj.": "eh_proj.",
            "mtp_layers.{j}.final_layernorm.": "norm.",
        },
        {"hidden_states_first": True, "zero_first_embedding": True},
        ("mimo",),
    ),
    "Ernie": Family(
        "mtp_block.{j}.",
        {"mtp_emb_norm.{j}.": "enorm.", "mtp_hidden_norm.{j}.": "hnorm.", "mtp_linear_proj.{j}.": "eh_proj."},
        {"zero_first_embedding": True, "final_norm": False},
        ("ernie4_5", "ernie4_5_moe"),
    ),
}
DISPUTED = "transformers and SGLang disagree on whether the next step reads the state before or after the norm"
UNTESTED = "its outputs have not been compared with those of its publisher's code"
# Why MTP layers are refused whose names may be those of a family, by the beginning of the model type.
REFUSED = dict.fromkeys(("step3", "mimo_v2"), DISPUTED)
REFUSED |= dict.fromkeys(("exaone_moe", "mellum", "nemotron_h", "bailing"), UNTESTED)
# Beginnings of names in multimodal targets and in others.
PREFIX = re.compile(r"^(model\.)?(language_model\.)?(model\.)?")
# Copies of the target's embedding and head, and what follows from the config.
UNUSED = ("embed_tokens.weight", "shared_head.head.weight", "rotary_emb.inv_freq")
EXPERT = re.compile(r"(.*\.experts\.)(\d+)\.(gate|up|down)_proj\.weight$")
# Files with weights in float8 hold a factor for each square of this many rows and columns.
SCALE, SQUARE = "_scale_inv", 128
FORMATS = ("model.safetensors.index.json", "model.safetensors")


@dataclass(frozen=True)
class MtpCheckpoint:
    """The MTP layers in a checkpoint."""

    checkpoint: Checkpoint
    names: dict[str, str]  # name of each tensor in a draft, experts apart, by its name in the checkpoint
    fields: dict[str, Any]  # fields of [`MtpConfig`]

    @classmethod
    def of(cls, target: PreTrainedModel, source: str | None) -> Self:
        """Find the MTP layers of a target in `source`, or in the checkpoint that it was loaded from.

        Raises:
            ValueError: If there are none, or none of a kind that is supported.
        """
        text = text_config(target)
        if reason := next((why for start, why in REFUSED.items() if text.model_type.startswith(start)), None):
            raise ValueError(
                f"the MTP layers of model_type={text.model_type!r} are not supported, as {reason}. Use another draft."
            )
        checkpoint = _opened(target, source)
        stripped = {name: PREFIX.sub("", name) for name in checkpoint.names if not name.endswith(UNUSED)}
        for family in FAMILIES.values():
            if names := _renamed(family, stripped, text.num_hidden_layers):
                break
        else:
            _refuse_none(checkpoint.source, stripped)
        second = family.block.format(n=text.num_hidden_layers + 1, j=1)
        if any(bare.startswith(second) for bare in stripped.values()):
            raise ValueError(f"{checkpoint.source} has several MTP layers: expected one. Use another draft.")
        return cls(checkpoint, names, family.fields | {"layer_idx": _kind_of_layer(target, set(names.values()))})

    def tensors(self, expected: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Return the tensors of a draft, see [`Checkpoint`]; `dtype` is that of weights that are stored in float8."""
        whole = partial(_stacked_and_scaled, dtype=dtype)
        return self.checkpoint.tensors(self.names, expected, "complete MTP layers of this target", whole)


def _stacked_and_scaled(weights: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return weights with those of float8 multiplied by the factors of their squares, and experts joined."""
    for name in [name for name in weights if name.endswith(SCALE)]:
        scale, weight = weights.pop(name), weights.get(name.removesuffix(SCALE))
        if weight is not None and scale.dim() == 2 and scale.shape == tuple(ceil(n / SQUARE) for n in weight.shape):
            factor = scale.repeat_interleave(SQUARE, 0).repeat_interleave(SQUARE, 1)
            whole = weight.float() * factor[: weight.shape[0], : weight.shape[1]]
            weights[name.removesuffix(SCALE)] = whole.to(dtype)
        else:
            weights[name] = scale
    return stacked(weights)


def stacked(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return weights with those of experts joined as classes of transformers hold them.

    >>> names = [f"mlp.experts.{k}.{part}_proj.weight" for k in (0, 1) for part in ("gate", "up", "down")]
    >>> {name: tuple(x.shape) for name, x in stacked({name: torch.zeros(3, 3) for name in names}).items()}
    {'mlp.experts.gate_up_proj': (2, 6, 3), 'mlp.experts.down_proj': (2, 3, 3)}
    """
    joined: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[int, dict[str, torch.Tensor]]] = {}
    for name, value in weights.items():
        if match := EXPERT.match(name):
            experts.setdefault(match[1], {}).setdefault(int(match[2]), {})[match[3]] = value
        else:
            joined[name] = value
    for prefix, of_layer in experts.items():
        parts = [of_layer[number] for number in sorted(of_layer)]
        if any(part.keys() != {"gate", "up", "down"} for part in parts):
            joined |= {f"{prefix}{n}.{kind}_proj.weight": x for n, part in of_layer.items() for kind, x in part.items()}
            continue
        joined[f"{prefix}gate_up_proj"] = torch.stack([torch.cat([part["gate"], part["up"]]) for part in parts])
        joined[f"{prefix}down_proj"] = torch.stack([part["down"] for part in parts])
    return joined


def _opened(target: PreTrainedModel, source: str | None) -> Checkpoint:
    """Return the checkpoint of a target. That which it was loaded from is not downloaded again."""
    name, hub = source, {}
    if source is None:
        name = target.config._name_or_path
        hub = {"local_files_only": True, "revision": getattr(target.config, "_commit_hash", None)}
    if not name:
        raise ValueError(
            f"this {type(target).__name__} exists in memory only, and its MTP layers would be in its checkpoint. Pass "
            "checkpoint=, the folder or Hub id with its weights."
        )
    try:
        return Checkpoint(str(name), FORMATS, **({} if Path(name).exists() else hub))
    except (HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError) as error:
        raise ValueError(
            f"{name} is neither a folder nor in the cache of the Hub, so the target's MTP layers cannot be read. Pass "
            "checkpoint=, the folder or Hub id with its weights."
        ) from error


def _renamed(family: Family, stripped: Mapping[str, str], num_layers: int) -> dict[str, str]:
    """Return the names of a family's tensors in a draft, by those in a checkpoint; none if it has no such layer."""
    places = {"n": num_layers, "j": 0}
    parts = {old.format(**places): f"layers.0.{new}" for old, new in family.parts.items()}
    block = family.block.format(**places)
    projections = tuple(old for old, new in parts.items() if new.endswith("eh_proj."))
    if not all(any(bare.startswith(part) for bare in stripped.values()) for part in (block, projections)):
        return {}
    parts[block] = "layers.0.block."  # last, as the others may begin with it
    found = {
        name: next((new + bare.removeprefix(old) for old, new in parts.items() if bare.startswith(old)), None)
        for name, bare in stripped.items()
    }
    return {name: new_name for name, new_name in found.items() if new_name is not None}


def _refuse_none(source: str, stripped: Mapping[str, str]) -> None:
    unknown = [name for name, bare in stripped.items() if bare.startswith("mtp")]
    if unknown:
        raise ValueError(
            f"{source} has MTP layers under names that are not supported, such as {unknown[0]}. Use another draft."
        )
    raise ValueError(
        f"{source} has no MTP layers: the model has none, or it was saved again by save_pretrained, which leaves them "
        "out. Pass checkpoint=, the folder or Hub id with the original weights, or use another draft."
    )


def _kind_of_layer(target: PreTrainedModel, names: set[str]) -> int:
    """Return the last layer of the target with full attention whose tensors have the names of the first MTP layer."""
    config = MtpConfig.from_target(target)
    decoder, last = decoder_like(config), config.layer_idx
    prefix = "layers.0.block."
    own = {name.removeprefix(prefix) for name in names if name.startswith(prefix) and not name.endswith(SCALE)}
    own = set(stacked({name: torch.empty(1, 1, device="meta") for name in own}))
    kinds = getattr(decoder.config, "layer_types", None)
    for layer in range(last, -1, -1):
        is_like_last = kinds is None or kinds[layer] == kinds[last]
        if is_like_last and layer_at(decoder, layer).state_dict().keys() == own:
            return layer
    return last
