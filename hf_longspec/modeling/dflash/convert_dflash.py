"""Reading of DFlash, DSpark and DFlash2 drafts in the formats of other projects, and writing in that of speculators.

There are four: those of z-lab, of DeepSpec, of speculators, and of the assistant of Muse in transformers. They differ
in names of fields and tensors, in the numbers of the layers that are read, in the slots that are used, and in the
windows. The code that a folder may contain is never run.
"""

from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from ..configuration_base import text_config
from ..loading import Checkpoint
from ..register_draft import Converter
from ..shared.aux_hidden_states import default_layer_ids
from ..shared.convert_speculators import (
    LAYER_FIELDS,
    draft_of,
    fields_of,
    plain_fields,
    read_layers,
    refuse,
    renamed,
    write_speculators,
)
from .modeling_dflash import DFlashConfig

# Draft -> target it was trained for.
DFLASH_TARGETS = {
    "z-lab/Qwen3-4B-DFlash-b16": "Qwen/Qwen3-4B",
    "z-lab/Qwen3-8B-DFlash-b16": "Qwen/Qwen3-8B",
    "z-lab/Qwen3-Coder-30B-A3B-DFlash": "Qwen/Qwen3-Coder-30B-A3B-Instruct",
    "z-lab/gpt-oss-20b-DFlash": "openai/gpt-oss-20b",
    "z-lab/gpt-oss-120b-DFlash": "openai/gpt-oss-120b",
    "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat": "meta-llama/Llama-3.1-8B-Instruct",
    "deepseek-ai/dflash_qwen3_4b_block7": "Qwen/Qwen3-4B",
    "deepseek-ai/dflash_qwen3_8b_block7": "Qwen/Qwen3-8B",
    "deepseek-ai/dflash_qwen3_14b_block7": "Qwen/Qwen3-14B",
    "deepseek-ai/dspark_qwen3_4b_block7": "Qwen/Qwen3-4B",
    "deepseek-ai/dspark_qwen3_8b_block7": "Qwen/Qwen3-8B",
    "deepseek-ai/dspark_qwen3_14b_block7": "Qwen/Qwen3-14B",
}
# Beginnings of names in the assistant of Muse -> name here.
MUSE_NAMES = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}
SPECULATORS = ("dflash", "dspark", "dflash2")
LAYER_TYPES = ("qwen3", "muse_glimmer_assistant")
MUSE_THETA, MUSE_LAYERS, MUSE_WINDOW = 500000.0, (1, 13, 25, 37, 49), 2048
# Tokens of the texts that DeepSpec's drafts were trained on. No other file says it; max_position_embeddings does not.
USUAL_LENGTH = 4096

OF_DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
# Whether slots see only earlier ones, in the words of vLLM, of SGLang and of JetSpec.
CAUSAL = ("causal", "is_causal", "causal_head")
LAYOUTS = ("z-lab", "DeepSpec", "Muse", "speculators")


def is_dflash(raw: Mapping[str, Any]) -> bool:
    """Return whether a config.json is that of a DFlash draft of another project."""
    return layout_of(raw) is not None


def layout_of(raw: Mapping[str, Any]) -> str | None:
    """Return the layout of a config.json, one of `LAYOUTS`; `None` if it is another model's.

    >>> layout_of({"architectures": ["Qwen3DSparkModel"]}), layout_of({"model_type": "llama"})
    ('DeepSpec', None)
    """
    named = {str(name) for name in raw.get("architectures") or ()}
    if raw.get("speculators_model_type") is not None:
        return "speculators" if raw["speculators_model_type"] in SPECULATORS else None
    if raw.get("model_type") == "muse_glimmer_assistant":
        return "Muse"
    if any("DSpark" in name for name in named):
        return "DeepSpec"
    return "z-lab" if "dflash_config" in raw or "DFlashDraftModel" in named else None


def dflash_draft(checkpoint: Checkpoint, target: PreTrainedModel | PreTrainedConfig | None, dtype: Any = None) -> Any:
    """Return the draft of a checkpoint, see [`Converter`].

    Raises:
        ValueError: If it is not a DFlash draft, or its files do not fit together or to the target.
    """
    raw = checkpoint.read_config()
    names = renamed(checkpoint.names, MUSE_NAMES)
    config = _config_of(checkpoint.source, raw, set(names.values()), target)
    draft = draft_of(checkpoint, names, config, "complete DFlash draft", dtype)
    if (scale := (raw.get("dflash_config") or {}).get("attention_value_scale")) is not None:
        for layer in draft.layers:  # values are used only here, so their factor may be part of the projection
            for weight in layer.self_attn.v_proj.parameters():
                weight.data.mul_(float(scale))
    return draft


DFLASH = Converter(DFLASH_TARGETS, r"^(model\.)?(hidden_norm|encoder\.output_norm_enc)\.", dflash_draft)


def _config_of(
    source: str, raw: dict[str, Any], names: set[str], target: PreTrainedModel | PreTrainedConfig | None
) -> DFlashConfig:
    layout = layout_of(raw)
    if layout is None:
        named = raw.get("speculators_model_type") or raw.get("model_type") or raw.get("architectures")
        refuse(source, f"config.json is that of {named!r}", f"expected one of the layouts {', '.join(LAYOUTS)}")
    nested = dict(raw.get("dflash_config") or {})
    inner = dict(raw.get("transformer_layer_config") or raw)
    if (window := nested.get("swa_window_size") or nested.get("sliding_window")) and not inner.get("sliding_window"):
        inner["sliding_window"] = window
    if (projector := nested.get("projector_type")) not in (None, "linear"):
        refuse(source, f"projector_type={projector!r}", "Domino drafts are not supported")
    if raw.get("quantization_config") is not None:
        refuse(source, "config.json has a quantization_config", "quantized drafts are not supported")
    if (width := raw.get("target_hidden_size")) not in (None, inner.get("hidden_size")):
        refuse(source, f"target_hidden_size={width}", f"expected the draft's width {inner.get('hidden_size')}")
    values = raw | nested
    kind = inner.get("model_type") or "qwen3"
    architecture = str((raw.get("architectures") or [""])[0])
    if kind not in LAYER_TYPES or architecture == "Gemma4DSparkModel":
        refuse(source, f"the draft's layer has model_type={kind!r} ({architecture})", f"expected {LAYER_TYPES[0]!r}")
    if layout == "Muse":
        inner = {"rope_parameters": {"rope_type": "default", "rope_theta": MUSE_THETA}} | inner
    text = None if target is None else text_config(target)
    if (mask := values.get("mask_token_id", 201818 if layout == "Muse" else None)) is None:
        refuse(source, "config.json has no mask_token_id", "add the id of the mask, a row of the target's embedding")
    if inner.get("vocab_size") is None:  # the target's, of which the mask is one of the last tokens (Muse)
        inner["vocab_size"] = mask + 1 if text is None else text.vocab_size
    layer = AutoConfig.for_model("qwen3", **plain_fields(inner))
    num_layers = int(inner.get("num_hidden_layers") or layer.num_hidden_layers)
    layers = _layer_ids(source, layout, values, num_layers, text)
    speculators = str(raw.get("speculators_model_type"))
    is_dspark = layout == "DeepSpec" or speculators == "dspark"
    rank = int(raw.get("markov_rank", 256 if speculators == "dspark" else 0) or 0) if is_dspark else 0
    confidence = None
    if is_dspark and raw.get("enable_confidence_head", speculators == "dspark"):
        confidence = "markov" if raw.get("confidence_head_with_markov", True) and rank else "hidden"
    size = int(raw.get("draft_vocab_size") or layer.vocab_size)
    size = layer.vocab_size if layout != "speculators" else size
    facts = {} if target is None else DFlashConfig.facts_of(target)
    rope = dict(layer.rope_parameters) | {"rope_type": layer.rope_parameters.get("rope_type", "default")}
    rope.setdefault("rope_theta", 10000.0)
    return DFlashConfig(
        **(facts | {name: getattr(layer, name) for name in LAYER_FIELDS}),
        target_hidden_size=layer.hidden_size,
        num_aux_hidden_states=len(layers),
        target_layer_ids=layers,
        num_hidden_layers=num_layers,
        attention_bias=bool(inner.get("attention_bias", False)),
        draft_vocab_size=None if size == layer.vocab_size else size,
        own_embedding=layout == "DeepSpec" or "embed_tokens.weight" in names,
        own_head=layout == "DeepSpec" or size != layer.vocab_size or "lm_head.weight" in names,
        mask_token_id=mask,
        rope_parameters=rope,
        trained_max_length=min(layer.max_position_embeddings, USUAL_LENGTH),
        block_size=int(values.get("block_size") or {"Muse": 16, "speculators": 8}.get(layout, 0)),
        sample_from_anchor=bool(values.get("sample_from_anchor", layout == "DeepSpec" or speculators == "dspark")),
        **_windows(layout, values, inner, num_layers),
        causal=next((bool(values[name]) for name in CAUSAL if values.get(name) is not None), None),
        attention_sink_bias=bool(values.get("attention_sink_bias")),
        markov_rank=rank,
        markov_head_type=str(raw.get("markov_head_type") or "vanilla"),
        confidence_head=confidence,
        **{
            name: int(values.get(name, default))
            for name, default in OF_DFLASH2.items()
            if speculators == "dflash2" or nested.get(name) is not None
        },
    )


def _layer_ids(source: str, layout: str, values: Mapping[str, Any], num_layers: int, text: Any) -> list[int]:
    """Return the layers whose inputs are read. Only speculators counts inputs, the other layouts count outputs."""
    name = "aux_hidden_state_layer_ids" if layout == "speculators" else "target_layer_ids"
    found = values.get(name, MUSE_LAYERS if layout == "Muse" else None)
    of_target: Any = values.get("num_target_layers") or getattr(text, "num_hidden_layers", None)
    if found is None and layout == "DeepSpec":
        refuse(source, f"config.json has no {name}", "add the layers of the target that the draft reads")
    if found is None and of_target is None:
        refuse(source, f"config.json has no {name}", "pass target=, whose number of layers decides")
    if layout == "speculators":
        return [int(layer) for layer in (found or default_layer_ids(of_target))]
    if found is None and num_layers == 1:
        found = [of_target // 2]
    elif found is None:
        found = [round(1 + index * (of_target - 4) / (num_layers - 1)) for index in range(num_layers)]
    return [int(layer) + 1 for layer in found]


def _windows(layout: str, raw: Mapping[str, Any], inner: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """Return the windows of the layers and how they move; see [`DFlashConfig`].

    An entry at distance W from a slot is seen in the assistant of Muse, and no longer seen in z-lab's drafts. In drafts
    of speculators, all slots see the last W entries.
    """
    window = inner.get("sliding_window", MUSE_WINDOW if layout == "Muse" else None)
    kinds = inner.get("layer_types") or []
    if not kinds and (layout == "Muse" or raw.get("use_swa")):
        kinds = ["sliding_attention"] * num_layers
    if window is None or "sliding_attention" not in kinds:
        return {}
    if inner.get("use_sliding_window") is False and not raw.get("use_swa"):
        return {}
    window = int(window) + (layout == "Muse")
    windows = [window if kind == "sliding_attention" else None for kind in kinds]
    is_speculators = layout == "speculators"
    is_causal = not raw.get("sliding_window_non_causal", raw.get("speculators_model_type") == "dflash2")
    return {"layer_windows": windows, "block_window": is_speculators, "causal_windows": is_speculators and is_causal}


def save_speculators(draft: Any, folder: Any, target: PreTrainedModel | None = None) -> None:
    """Write a draft in the format of speculators, which vLLM and SGLang read.

    Args:
        draft ([`DFlashDraftModel`]): The draft.
        folder (`str` or `os.PathLike`): Folder to write config.json and model.safetensors to.
        target (`PreTrainedModel`, *optional*): The target, whose rows are written as the head of a draft with a reduced
            vocabulary that has none of its own.

    Raises:
        ValueError: If the format cannot say what the draft computes, or the target is needed.
    """
    required = () if draft.d2t is None else ("lm_head.weight",)
    write_speculators(draft, speculators_config(draft, target), folder, target, required)


def speculators_config(draft: Any, target: PreTrainedModel | None = None) -> dict[str, Any]:
    """Return config.json of a draft in the format of speculators; see [`save_speculators`]."""
    config, causal, windows = draft.config, draft.effective("causal"), draft.config.window_of_layers
    reasons = {
        "windows that move with the slots": any(windows) and not config.block_window,
        "causal=True in layers without a window": causal and None in windows,
        "attention_sink_bias=True": config.attention_sink_bias,
    }
    if reason := next((name for name, holds in reasons.items() if holds), None):
        raise ValueError(
            f"this draft has {reason}, which the format of speculators cannot say: save it with save_pretrained."
        )
    causal = config.causal_windows if causal is None else causal
    kind = "dflash2" if config.selector_rank or config.conv_kernel_size else "dflash"
    kind = "dspark" if config.markov_rank or config.confidence_head else kind
    name = {"dflash": "DFlash", "dspark": "DSpark", "dflash2": "DFlash2"}[kind]
    values: dict[str, Any] = {
        "architectures": [f"{name}DraftModel"],
        **fields_of(draft, kind, config.block_size - 1, target),
        "aux_hidden_state_layer_ids": read_layers(draft, target),
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor,
        "sliding_window_non_causal": not causal if any(windows) else kind == "dflash2",
        "target_hidden_size": None,
    }
    if kind == "dspark":
        values |= {name: getattr(config, name) for name in ("markov_rank", "markov_head_type")}
        values |= {"enable_confidence_head": config.confidence_head is not None}
        values |= {"confidence_head_with_markov": config.confidence_head == "markov"}
    if kind == "dflash2":
        values |= {name: getattr(config, name) for name in OF_DFLASH2}
    return values
