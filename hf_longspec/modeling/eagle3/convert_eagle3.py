"""Reading and writing of EAGLE-3 drafts in the formats of other projects.

There are two: the authors' (`midlayer.*`, a flat config.json) and that of speculators and ModelOpt (`layers.0.*`),
which other engines serve. Both hold the same tensors. The code that a folder may contain is never run.
"""

from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from ..configuration_base import text_config
from ..loading import Checkpoint
from ..register_draft import Converter
from ..shared.convert_speculators import (
    LAYER_FIELDS,
    OF_TARGET,
    USUAL_LENGTH,
    draft_of,
    fields_of,
    plain_fields,
    read_layers,
    refuse,
    renamed,
    write_speculators,
)
from .modeling_eagle3 import Eagle3Config

logger = logging.get_logger(__name__)

# Draft -> target it was trained for.
EAGLE3_TARGETS = {
    "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B": "meta-llama/Llama-3.1-8B-Instruct",
    "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B": "meta-llama/Llama-3.3-70B-Instruct",
    "yuhuili/EAGLE3-DeepSeek-R1-Distill-LLaMA-8B": "deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
    "yuhuili/EAGLE3-Vicuna1.3-13B": "lmsys/vicuna-13b-v1.3",
    "AngelSlim/Qwen3-1.7B_eagle3": "Qwen/Qwen3-1.7B",
    "AngelSlim/Qwen3-4B_eagle3": "Qwen/Qwen3-4B",
    "AngelSlim/Qwen3-8B_eagle3": "Qwen/Qwen3-8B",
    "AngelSlim/Qwen3-14B_eagle3": "Qwen/Qwen3-14B",
    "AngelSlim/Qwen3-32B_eagle3": "Qwen/Qwen3-32B",
    "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3": "meta-llama/Llama-3.1-8B-Instruct",
    "RedHatAI/Qwen3-8B-speculator.eagle3": "Qwen/Qwen3-8B",
    "RedHatAI/Qwen3-14B-speculator.eagle3": "Qwen/Qwen3-14B",
    "RedHatAI/Qwen3-32B-speculator.eagle3": "Qwen/Qwen3-32B",
}
# Beginnings of names of the authors, and of norms of the auxiliary hidden states in older files -> here.
OTHER_NAMES = {"midlayer.": "layers.0."}
OTHER_NAMES |= {"aux_norm_low.": "fc_norm.0.", "aux_norm_mid.": "fc_norm.1.", "aux_norm_high.": "fc_norm.2."}
# Architectures whose layer is the one of this package. The difference, norms of queries and keys, shows in the tensors.
LAYER_TYPES = ("llama", "qwen3", "qwen2", "mistral")
# Values of config.json and its eagle_config that are EAGLE-3's.
AS_EAGLE3 = {
    "speculators_model_type": "eagle3",
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "parallel_draft_step": 1,
}
# Tokens that P-EAGLE drafts if its config.json does not say how many.
DRAFTED = 4
KIN = {"speculators_model_type": ("peagle",)}


def is_eagle3(raw: Mapping[str, Any]) -> bool:
    """Return whether a config.json is that of an EAGLE-3 draft of another project."""
    named = {str(name) for name in raw.get("architectures") or ()}
    return (
        raw.get("speculators_model_type") in ("eagle3", "peagle")
        or "eagle_config" in raw
        or any("eagle3" in name.lower() for name in named)
        or ("draft_vocab_size" in raw and raw.get("model_type") in LAYER_TYPES)
    )


def eagle3_draft(checkpoint: Checkpoint, target: PreTrainedModel | PreTrainedConfig | None, dtype: Any = None) -> Any:
    """Return the draft of a checkpoint, see [`Converter`].

    Raises:
        ValueError: If it is not an EAGLE-3 draft, or its files do not fit together or to the target.
    """
    raw = checkpoint.read_config()
    names = renamed(checkpoint.names, OTHER_NAMES)
    config = _config_of(checkpoint.source, raw, set(names.values()), target)
    draft = draft_of(checkpoint, names, config, "complete EAGLE-3 draft", dtype)
    if config.mask_token_id is not None:
        methods = (raw.get("speculators_config") or {}).get("proposal_methods") or [{}]
        draft.generation_config.tree_widths = [1] * int(methods[0].get("speculative_tokens") or DRAFTED)
    return draft


# In DFlash drafts the norm of this name belongs to no layer.
EAGLE3 = Converter(EAGLE3_TARGETS, r"layer(s\.0)?\.hidden_norm\.", eagle3_draft)


def _config_of(
    source: str, raw: Mapping[str, Any], names: set[str], target: PreTrainedModel | PreTrainedConfig | None
) -> Eagle3Config:
    inner, nested = dict(raw.get("transformer_layer_config") or raw), raw.get("eagle_config") or {}
    kind = inner.pop("model_type", None) or "llama"
    if kind not in LAYER_TYPES:
        refuse(source, f"the draft's layer has model_type={kind!r}", f"expected one of {', '.join(LAYER_TYPES)}")
    for name, value in AS_EAGLE3.items():
        if (field := nested.get(name, raw.get(name))) not in (None, value, *(KIN.get(name, ()))):
            refuse(source, f"config.json has {name}={field!r}", f"expected {value!r} for EAGLE-3")
    is_parallel = raw.get("speculators_model_type") == "peagle"
    if is_parallel and raw.get("mask_token_id") is None:
        refuse(source, "config.json has no mask_token_id", "expected the token of the entries of P-EAGLE's masks")
    for name in ("pard_token", "ptd_token_id"):
        if name in raw or name in nested:
            refuse(source, f"config.json has {name}", "a variant of P-EAGLE of which no checkpoint is known")
    if "speculators_model_type" in raw and "norm_before_residual" not in {*nested, *raw}:
        logger.warning(
            "%s: config.json has no norm_before_residual, so False is assumed. If few drafted tokens are accepted, set "
            "it to True in config.json and load the draft again.",
            source,
        )

    def flag(*names: str) -> bool:
        return any(bool(part.get(name)) for name in names for part in (nested, raw))

    layer = AutoConfig.for_model("qwen3" if kind == "qwen3" else "llama", **plain_fields(inner))
    num_layers = len({name.split(".")[1] for name in names if name.startswith("layers.")})
    text = None if target is None else text_config(target)
    width = raw.get("target_hidden_size") or nested.get("target_hidden_size") or layer.hidden_size
    size = int(raw.get("draft_vocab_size") or raw.get("truncated_vocab_size") or layer.vocab_size)
    rope = _rope(source, raw, dict(layer.rope_parameters))
    longest = layer.max_position_embeddings
    layers = _layer_ids(raw, text)
    facts = {} if target is None else Eagle3Config.facts_of(target)
    return Eagle3Config(
        **(facts | {name: getattr(layer, name) for name in LAYER_FIELDS}),
        target_hidden_size=int(width) if text is None else text.hidden_size,
        num_aux_hidden_states=len(layers) or 3,
        target_layer_ids=layers,
        num_hidden_layers=num_layers,
        attention_bias="layers.0.self_attn.q_proj.bias" in names,
        mlp_bias="layers.0.mlp.gate_proj.bias" in names,
        fc_bias="fc.bias" in names,
        qk_norm="layers.0.self_attn.q_norm.weight" in names,
        draft_vocab_size=None if size == layer.vocab_size else size,
        own_embedding=is_parallel or "embed_tokens.weight" in names,
        own_head="lm_head.weight" in names,
        norm_before_residual=flag("norm_before_residual"),
        norm_before_fc=flag("norm_before_fc"),
        fc_norm=flag("fc_norm", "use_aux_norm"),
        norm_output=flag("norm_output"),
        mask_token_id=raw["mask_token_id"] if is_parallel else None,
        rope_parameters=rope,
        layer_windows=_windows(inner, num_layers),
        trained_max_length=longest if rope["rope_type"] == "yarn" else min(longest, USUAL_LENGTH),
    )


def _layer_ids(raw: Mapping[str, Any], text: Any) -> list[int]:
    """Return the layers whose inputs are read; none if config.json does not say it."""
    name = "eagle_aux_hidden_state_layer_ids"
    if layers := raw.get(name):
        return [int(layer) for layer in layers]
    layers = [int(layer) for layer in (raw.get("eagle_config") or {}).get(name) or ()]
    if text is not None and layers and max(layers) == text.num_hidden_layers:
        return layers
    return [layer + 1 for layer in layers]  # these are layers whose output is read


def _windows(inner: Mapping[str, Any], num_layers: int) -> list[int | None] | None:
    """Return the window that each layer was trained with."""
    window, kinds = inner.get("sliding_window"), inner.get("layer_types")
    if window is None or not kinds or inner.get("use_sliding_window") is False:
        return None
    windows = [window if kind == "sliding_attention" else None for kind in kinds]
    return (windows + [None] * num_layers)[:num_layers] if any(windows) else None


def _rope(source: str, raw: Mapping[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    """Return the draft's rotary settings, which are never the target's."""
    kind = rope.setdefault("rope_type", "default")
    rope.setdefault("rope_theta", 10000.0)
    if kind == "yarn" and "transformer_layer_config" not in raw and rope["rope_theta"] != 10000.0:
        logger.warning(
            "%s: rope_theta=%s with yarn is ignored by the code that trains such drafts, so 10000 is used. Set "
            "draft.generation_config.rope_theta to use another value.",
            source,
            rope["rope_theta"],
        )
        rope["rope_theta"] = 10000.0
    return rope


def save_speculators(draft: Any, folder: Any, target: PreTrainedModel | None = None) -> None:
    """Write a draft in the format of speculators, which vLLM and SGLang read.

    Args:
        draft ([`Eagle3DraftModel`]): The draft.
        folder (`str` or `os.PathLike`): Folder to write config.json and model.safetensors to.
        target (`PreTrainedModel`, *optional*): The target, whose embedding and head are written for a draft that has
            none of its own.

    Raises:
        ValueError: If embedding or head are missing, or the layers of the target are not known.
    """
    write_speculators(draft, speculators_config(draft, target), folder, target, OF_TARGET)


def speculators_config(draft: Any, target: PreTrainedModel | None = None) -> dict[str, Any]:
    """Return config.json of a draft in the format of speculators; see [`save_speculators`]."""
    config, count = draft.config, len(draft.setting("tree_widths"))
    width, kind = config.target_hidden_size, "eagle3" if config.mask_token_id is None else "peagle"
    is_parallel = kind == "peagle"
    return ({"mask_token_id": config.mask_token_id} if is_parallel else {}) | {
        "architectures": ["PEagleDraftModel" if is_parallel else "Eagle3DraftModel"],
        **fields_of(draft, kind, count, target),
        "eagle_aux_hidden_state_layer_ids": read_layers(draft, target),
        "embed_requires_grad": is_parallel,
        "fc_norm": config.fc_norm,
        "norm_before_fc": config.norm_before_fc,
        "norm_before_residual": config.norm_before_residual,
        "norm_output": bool(draft.effective("norm_output")),
        "target_hidden_size": None if width == config.hidden_size else width,
    }
