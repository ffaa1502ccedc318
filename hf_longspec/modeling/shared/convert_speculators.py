"""The format of speculators, which vLLM and SGLang read, as far as drafts that are written in it have it in common.

Reading is the same for other formats with tensors of the same names: names and shapes are compared with those of the
draft before a tensor is read.
"""

import copy
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from ..configuration_base import DraftConfig, text_config
from ..loading import Checkpoint
from ..register_draft import DRAFTS

# Tensors that are in some files and are the target's, or follow from config.json.
UNUSED = ("verifier_norm.", "verifier_lm_head.")
# Fields that the configuration of a layer and that of a draft have in common.
LAYER_FIELDS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("max_position_embeddings", "hidden_act", "rms_norm_eps"),
)
# Default `max_position_embeddings` of drafts is their target's in some files: no draft is trained on so long texts.
USUAL_LENGTH = 2048


def draft_of(checkpoint: Checkpoint, names: dict[str, str], config: DraftConfig, what: str, dtype: Any) -> Any:
    """Return the draft of a configuration with the tensors of a checkpoint, in eval mode.

    Args:
        checkpoint ([`Checkpoint`]): The checkpoint.
        names (`dict[str, str]`): Name in the draft of every tensor, by its name in the checkpoint.
        config ([`DraftConfig`]): Configuration of the draft.
        what (`str`): What the draft is, for messages.
        dtype (`torch.dtype` or `str`, *optional*): Type of the weights; that of the checkpoint by default.
    """
    with torch.device("meta"):
        draft: Any = DRAFTS[config.model_type].model(config)
    expected = draft.state_dict()
    if "d2t" in expected and "t2d" in names.values():
        expected["t2d"] = torch.empty(config.vocab_size, dtype=torch.bool, device="meta")
    unused = {"d2t", "t2d"} - expected.keys()
    names = {name: new_name for name, new_name in names.items() if new_name not in unused}
    weights = checkpoint.tensors(names, expected, what)
    marks = weights.pop("t2d", None)
    if "d2t" in expected:
        weights["d2t"] = weights["d2t"].long()
        _check_vocabulary(checkpoint.source, weights["d2t"], marks, config.vocab_size)
    if dtype in (None, "auto"):
        dtype = next(value.dtype for value in weights.values() if value.is_floating_point())
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    typed = {name: value.to(dtype) if value.is_floating_point() else value for name, value in weights.items()}
    draft.load_state_dict(typed, assign=True)
    draft.config.dtype = dtype
    return draft.eval()


def renamed(names: Iterable[str], beginnings: Mapping[str, str]) -> dict[str, str]:
    """Return the name of this package for each tensor of a checkpoint that is used; some beginnings are replaced.

    >>> renamed(["model.fc.weight", "midlayer.norm.weight", "verifier_norm.weight"], {"midlayer.": "layers.0."})
    {'model.fc.weight': 'fc.weight', 'midlayer.norm.weight': 'layers.0.norm.weight'}
    """
    new_names = {}
    for name in names:
        new_name = name.removeprefix("model.")
        for old, new in beginnings.items():
            new_name = new + new_name.removeprefix(old) if new_name.startswith(old) else new_name
        if not new_name.startswith(UNUSED) and not new_name.endswith("rotary_emb.inv_freq"):
            new_names[name] = new_name
    return new_names


def refuse(source: str, fact: str, rule: str) -> NoReturn:
    """Raise the error of a checkpoint that is not supported."""
    raise ValueError(f"{source}: {fact}, {rule}. Use another draft.")


def plain_fields(inner: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a layer's configuration that are needed, numbers as numbers."""
    fields = (*LAYER_FIELDS, "rope_theta", "rope_scaling", "rope_parameters")
    values = {name: copy.copy(inner[name]) for name in fields if inner.get(name) is not None}
    numbers = {name: int(value) for name, value in values.items() if isinstance(value, str) and value.isdecimal()}
    return {"max_position_embeddings": USUAL_LENGTH} | values | numbers


def _check_vocabulary(source: str, d2t: torch.Tensor, marks: torch.Tensor | None, vocab_size: int) -> None:
    """Refuse a map of the reduced vocabulary whose ids are out of range or not distinct, or not those of t2d."""
    ids = (torch.arange(len(d2t)) + d2t).sort().values
    is_wrong = len(ids.unique()) != len(ids) or ids[0] < 0 or ids[-1] >= vocab_size
    if is_wrong or (marks is not None and not torch.equal(marks.nonzero().flatten(), ids)):
        raise ValueError(
            f"{source}: d2t maps to {len(ids.unique())} tokens from {int(ids[0])} to {int(ids[-1])}, expected "
            f"{len(ids)} distinct ids below {vocab_size}, those that t2d marks. d2t holds offsets: the target's id of "
            "draft token i is i + d2t[i]. Use files that were saved together."
        )


def _layer_config(draft: Any) -> dict[str, Any]:
    """Return the configuration of a draft's layers, as a model of transformers would have it."""
    config, theta = draft.config, draft.effective("rope_theta")
    rope = dict(config.rope_parameters or {}) | ({} if theta is None else {"rope_theta": float(theta)})
    windows = config.window_of_layers
    kind = "qwen3" if config.qk_norm else "llama"
    window = next(filter(None, windows), None)
    extra: dict[str, Any] = {}
    if kind == "qwen3" or window is not None:
        kinds = ["full_attention" if size is None else "sliding_attention" for size in windows]
        extra = {"layer_types": kinds, "sliding_window": window, "use_sliding_window": window is not None}
    names = (*LAYER_FIELDS, "num_hidden_layers", "initializer_range", "attention_bias")
    layer = {name: getattr(config, name) for name in names} | extra
    layer |= {"model_type": kind, "rope_parameters": rope, "tie_word_embeddings": False}
    return layer | ({"mlp_bias": config.mlp_bias} if kind == "llama" else {})


def fields_of(draft: Any, kind: str, count: int, target: PreTrainedModel | None) -> dict[str, Any]:
    """Return the fields of config.json that all drafts have: a draft of this kind, greedy chains of `count` tokens."""
    method = {"proposal_type": "greedy", "speculative_tokens": count, "accept_tolerance": 0.0, "verifier_accept_k": 1}
    architectures = [] if target is None else [type(target).__name__]
    proposals: dict[str, Any] = {"algorithm": kind, "default_proposal_method": "greedy", "proposal_methods": [method]}
    proposals["verifier"] = {"name_or_path": draft.config.target_name_or_path, "architectures": architectures}
    return {
        "draft_vocab_size": draft.config.draft_vocab_size or draft.config.vocab_size,
        "dtype": str(draft.dtype).removeprefix("torch."),
        "speculators_config": proposals,
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "tie_word_embeddings": False,
        "transformer_layer_config": _layer_config(draft),
    }


def read_layers(draft: Any, target: PreTrainedModel | None) -> list[int]:
    """Return the layers of the target that a draft reads, or refuse a draft of which only a target decides them."""
    layers = draft.effective("target_layer_ids") or ()
    if not layers and target is None:
        raise ValueError("the draft's config does not name the target's layers that it reads: pass target=.")
    return list(layers) or list(draft.layers_of(text_config(target)))


# Parts that some drafts have of their own and that the format requires, and the method of a target that gives its part.
OF_TARGET = {"embed_tokens.weight": "get_input_embeddings", "lm_head.weight": "get_output_embeddings"}


def write_speculators(
    draft: Any, config: dict[str, Any], folder: Any, target: PreTrainedModel | None, required: Iterable[str]
) -> None:
    """Write config.json and model.safetensors, with the mask of a reduced vocabulary.

    Args:
        target (`PreTrainedModel`, *optional*): Gives the rows of the parts that the draft lacks.
        required (`Iterable[str]`): Names of `OF_TARGET` that the format requires.

    Raises:
        ValueError: If one is missing, and there is no target.
    """
    tensors = {name: value.detach().cpu().contiguous() for name, value in draft.state_dict().items()}
    for name in set(required) - tensors.keys():
        if target is None:
            raise ValueError(f"the draft has no {name} of its own, which the format requires: pass target=.")
        rows = getattr(target, OF_TARGET[name])().weight.detach().cpu()
        rows = rows if name == "embed_tokens.weight" else rows[draft.token_ids.cpu()]
        tensors[name] = rows.to(draft.dtype).contiguous()
    if draft.d2t is not None:
        tensors["t2d"] = torch.zeros(draft.config.vocab_size, dtype=torch.bool)
        tensors["t2d"][draft.token_ids.cpu()] = True
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
