"""Reading and writing of EAGLE-3 drafts in the formats of other projects.

There are two: the authors' (`midlayer.*`, a flat config.json) and that of speculators and ModelOpt (`layers.0.*`),
which other engines serve. Both hold the same tensors. Config files are read as JSON; the code that a folder may contain
is never run.
"""

import copy
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from ..configuration_base import text_config
from ..convert import Converter
from ..loading import Checkpoint
from .configuration_eagle3 import ROPE_TYPES, Eagle3Config
from .modeling_eagle3 import Eagle3DraftModel

logger: logging.Logger = transformers_logging.get_logger(__name__)

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
# Norms of the taps in older files -> name here.
OLD_NORMS = {"aux_norm_low.": "fc_norm.0.", "aux_norm_mid.": "fc_norm.1.", "aux_norm_high.": "fc_norm.2."}
# Tensors that are in some files and are the target's, or follow from config.json.
UNUSED = ("verifier_norm.", "verifier_lm_head.")
# Architectures whose layer is the one of this package. The difference, norms of queries and keys, shows in the tensors.
LAYER_TYPES = ("llama", "qwen3", "qwen2", "mistral")
# Fields that the configuration of a layer and that of a draft have in common.
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
LAYER_FIELDS = (*SIZES, "max_position_embeddings", "hidden_act", "rms_norm_eps")
# Values of ModelOpt's eagle_config that are EAGLE-3's.
AS_EAGLE3 = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "parallel_draft_step": 1,
}
# Default `max_position_embeddings` of drafts is their target's in some files: no draft is trained on so long texts.
USUAL_LENGTH = 2048


def from_other_format(
    source: Any, target: PreTrainedModel | PreTrainedConfig | None, dtype: Any = None, **hub: Any
) -> Eagle3DraftModel | None:
    """Return a checkpoint of another project as a draft; `None` if it is in the format of this package.

    Args:
        source (`str` or `os.PathLike`): Folder or Hub id.
        target (`PreTrainedModel` or `PreTrainedConfig`, *optional*): The target.
        dtype (`torch.dtype` or `str`, *optional*): Type of the weights; that of the checkpoint by default.
        hub (`Any`): Arguments of transformers for the Hub.

    Raises:
        OSError: If there is no config.json.
        ValueError: If it is no EAGLE-3 draft, or its files do not fit together or to the target.
    """
    raw, _ = PreTrainedConfig.get_config_dict(source, **hub)
    if raw.get("model_type") == Eagle3Config.model_type:
        return None
    return _draft(Checkpoint(str(source), **hub), raw, target, dtype)


def eagle3_draft(checkpoint: Checkpoint, target: PreTrainedConfig) -> Eagle3DraftModel:
    """Return the draft of a checkpoint, in the dtype of the checkpoint; for `hf-longspec convert`.

    Args:
        checkpoint ([`Checkpoint`]): Weights of the draft.
        target (`PreTrainedConfig`): Configuration of the target.

    Raises:
        ValueError: As of [`from_other_format`].
    """
    path = Path(checkpoint.source)
    raw, _ = PreTrainedConfig.get_config_dict(str(path.parent if path.is_file() else checkpoint.source))
    return _draft(checkpoint, raw, target, None)


EAGLE3 = Converter(EAGLE3_TARGETS, "hidden_norm.", eagle3_draft)


def is_eagle3(raw: Mapping[str, Any]) -> bool:
    """Return whether a config.json is that of an EAGLE-3 draft of another project."""
    named = {str(name) for name in raw.get("architectures") or ()}
    return (
        raw.get("speculators_model_type") == "eagle3"
        or "eagle_config" in raw
        or any("eagle3" in name.lower() for name in named)
        or ("draft_vocab_size" in raw and raw.get("model_type") in LAYER_TYPES)
    )


def renamed(names: list[str]) -> dict[str, str]:
    """Return the name of this package for each tensor of a checkpoint that is used.

    >>> renamed(["model.fc_norm.0.weight", "midlayer.hidden_norm.weight", "verifier_norm.weight"])
    {'model.fc_norm.0.weight': 'fc_norm.0.weight', 'midlayer.hidden_norm.weight': 'layers.0.hidden_norm.weight'}
    """
    found = {}
    for name in names:
        own = name.removeprefix("model.")
        for old, new in {"midlayer.": "layers.0.", **OLD_NORMS}.items():
            own = new + own.removeprefix(old) if own.startswith(old) else own
        if not own.startswith(UNUSED) and not own.endswith("rotary_emb.inv_freq"):
            found[name] = own
    return found


def _draft(
    checkpoint: Checkpoint, raw: dict[str, Any], target: PreTrainedModel | PreTrainedConfig | None, dtype: Any
) -> Eagle3DraftModel:
    names = renamed(checkpoint.names)
    _refuse_others(checkpoint.source, raw, list(names.values()))
    read = checkpoint.read()
    weights = {own: read[name] for name, own in names.items()}
    _refuse_first_versions(checkpoint.source, weights)
    config = _config_of(checkpoint.source, raw, weights, target)
    kept = weights.pop("t2d", None)
    if "d2t" in weights:
        weights["d2t"] = weights["d2t"].long()
        _check_vocabulary(checkpoint.source, weights["d2t"], kept, config)
        if config.draft_vocab_size is None:
            del weights["d2t"]
    with torch.device("meta"):
        draft = Eagle3DraftModel(config)
    expected = draft.state_dict()
    checkpoint.check(weights, expected, "complete EAGLE-3 draft")
    dtype = weights["fc.weight"].dtype if dtype in (None, "auto") else dtype
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    for name in expected.keys() - weights.keys():  # biases
        weights[name] = torch.zeros(expected[name].shape)
    typed = {name: value.to(dtype) if value.is_floating_point() else value for name, value in weights.items()}
    draft.load_state_dict(typed, assign=True)
    draft.config.dtype = dtype
    _compare_names(checkpoint.source, raw, config.target_name_or_path)
    return draft.eval()


def _config_of(
    source: str,
    raw: Mapping[str, Any],
    weights: Mapping[str, torch.Tensor],
    target: PreTrainedModel | PreTrainedConfig | None,
) -> Eagle3Config:
    inner = dict(raw.get("transformer_layer_config") or raw)
    kind = inner.pop("model_type", None) or "llama"
    if kind not in LAYER_TYPES:
        raise ValueError(
            f"{source}: the layer of the draft is of model_type={kind!r}, and one of {', '.join(LAYER_TYPES)} is "
            "expected. Use another draft."
        )
    sizes = {name: inner[name] for name in ("vocab_size", "hidden_size") if inner.get(name) is not None}
    if len(sizes) < 2:
        raise ValueError(f"{source}: config.json has no vocab_size or no hidden_size. Take all files from one draft.")
    layer = AutoConfig.for_model("qwen3" if kind == "qwen3" else "llama", **_plain(inner))
    layer_names = {name.split(".")[1] for name in weights if name.startswith("layers.")}
    text = None if target is None else text_config(target)
    width = _tapped_width(source, raw, weights, layer, text)
    vocabulary = _draft_vocabulary(source, raw, weights, layer.vocab_size)
    rope = _rope(source, raw, dict(layer.rope_parameters))
    long = rope["rope_type"] == "yarn"
    facts = {} if target is None else Eagle3Config.facts_of(target)
    fields = facts | {name: getattr(layer, name) for name in LAYER_FIELDS} | _flags(source, raw, weights)
    return Eagle3Config(
        target_hidden_size=width,
        num_taps=weights["fc.weight"].shape[1] // width,
        target_layer_ids=_layer_ids(raw, text),
        num_hidden_layers=len(layer_names),
        attention_bias="layers.0.self_attn.q_proj.bias" in weights,
        mlp_bias="layers.0.mlp.gate_proj.bias" in weights,
        fc_bias="fc.bias" in weights,
        qk_norm="layers.0.self_attn.q_norm.weight" in weights,
        draft_vocab_size=vocabulary,
        own_embedding="embed_tokens.weight" in weights,
        own_head="lm_head.weight" in weights,
        rope_parameters=rope,
        layer_windows=_windows(inner, len(layer_names)),
        trained_max_length=layer.max_position_embeddings if long else min(layer.max_position_embeddings, USUAL_LENGTH),
        **fields,
    )


def _plain(inner: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a layer's configuration that are needed, numbers as numbers."""
    fields = (*LAYER_FIELDS, "rope_theta", "rope_scaling", "rope_parameters")
    found = {name: copy.copy(inner[name]) for name in fields if inner.get(name) is not None}
    for name in (*SIZES, "max_position_embeddings"):
        if isinstance(found.get(name), str):
            found[name] = int(found[name])
    found.setdefault("max_position_embeddings", USUAL_LENGTH)
    return found


def _flags(source: str, raw: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> dict[str, bool]:
    """Return the flags of the architecture, checked against the tensors."""
    nested = raw.get("eagle_config") or {}
    for name, value in AS_EAGLE3.items():
        if nested.get(name) not in (None, value):
            raise ValueError(
                f"{source}: eagle_config has {name}={nested[name]!r}, and EAGLE-3 has {value!r}. Use another draft."
            )

    def flag(*names: str) -> bool:
        return any(bool(part.get(name)) for name in names for part in (nested, raw))

    if "speculators_model_type" in raw and "norm_before_residual" not in {*nested, *raw}:
        logger.warning(
            "%s: config.json has no norm_before_residual, which is taken as False. If few drafts are accepted, set it "
            "to True in config.json and load the draft again.",
            source,
        )
    flags = {
        "norm_before_residual": flag("norm_before_residual"),
        "norm_before_fc": flag("norm_before_fc"),
        "fc_norm": flag("fc_norm", "use_aux_norm"),
        "norm_output": flag("norm_output"),
    }
    for name, tensor in (("norm_before_fc", "input_norm."), ("fc_norm", "fc_norm.")):
        found = any(own.startswith(tensor) for own in weights)
        if found != flags[name]:
            raise ValueError(
                f"{source}: config.json has {name}={flags[name]}, and there are {'' if found else 'no '}tensors "
                f"{tensor}*: without these norms the draft would be another one. Take all files from one draft."
            )
    return flags


def _tapped_width(
    source: str, raw: Mapping[str, Any], weights: Mapping[str, torch.Tensor], layer: Any, text: Any
) -> int:
    """Return the width of the target's residual stream."""
    nested = raw.get("eagle_config") or {}
    own = text.hidden_size if text is not None else layer.hidden_size
    width = raw.get("target_hidden_size") or nested.get("target_hidden_size") or own
    taps = weights["fc.weight"].shape[1]
    if taps % width or (text is not None and width != text.hidden_size):
        raise ValueError(
            f"{source}: fc.weight reads {taps} numbers, and the target's states have {own if text else width}: it was "
            "made for another target. Pass the target that the draft was trained for."
        )
    return int(width)


def _draft_vocabulary(
    source: str, raw: Mapping[str, Any], weights: Mapping[str, torch.Tensor], whole: int
) -> int | None:
    """Return the size of a reduced vocabulary, or `None`."""
    size = raw.get("draft_vocab_size") or raw.get("truncated_vocab_size") or whole
    for name, tensor in (("lm_head.weight", weights.get("lm_head.weight")), ("d2t", weights.get("d2t"))):
        if tensor is not None and len(tensor) != int(size):
            raise ValueError(
                f"{source}: config.json has draft_vocab_size={size}, and {name} has {len(tensor)} rows. Take all files "
                "from one draft."
            )
    if int(size) != whole and "d2t" not in weights:
        raise ValueError(
            f"{source} lacks the tensor d2t: {size} of {whole} tokens are drafted, and it says which. Take all files "
            "from one draft."
        )
    return None if int(size) == whole else int(size)


def _check_vocabulary(source: str, d2t: torch.Tensor, kept: torch.Tensor | None, config: Eagle3Config) -> None:
    """Refuse a map of the reduced vocabulary whose ids are out of range or not distinct."""
    ids = torch.arange(len(d2t)) + d2t
    outside = ((ids < 0) | (ids >= config.vocab_size)).nonzero()
    if len(outside):
        place = int(outside[0])
        raise ValueError(
            f"{source}: d2t[{place}]={int(d2t[place])} leads to token {int(ids[place])} of {config.vocab_size}. d2t "
            "holds offsets: the target's id of draft token i is i + d2t[i]. Take all files from one draft."
        )
    if len(ids.unique()) != len(ids):
        raise ValueError(
            f"{source}: d2t gives {len(ids)} draft tokens only {len(ids.unique())} different ids: expected one for "
            "each. Take all files from one draft."
        )
    if kept is not None and not torch.equal(kept.nonzero().flatten(), ids.sort().values):
        raise ValueError(f"{source}: t2d marks other tokens than d2t leads to. Take all files from one draft.")


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
    if kind not in ROPE_TYPES:
        raise ValueError(
            f"{source}: rope_type={kind!r}, expected one of {', '.join(ROPE_TYPES)}, whose frequencies do not change "
            "with the length of the text. Use another draft."
        )
    if kind == "yarn" and "transformer_layer_config" not in raw and rope["rope_theta"] != 10000.0:
        logger.warning(
            "%s: rope_theta=%s with yarn, which the code of such drafts does not read: 10000 is used. Set "
            "draft.generation_config.rope_theta for another one.",
            source,
            rope["rope_theta"],
        )
        rope["rope_theta"] = 10000.0
    return rope


def _refuse_others(source: str, raw: Mapping[str, Any], names: list[str]) -> None:
    """Refuse by name what is similar to an EAGLE-3 draft."""
    kind = raw.get("speculators_model_type", "eagle3")
    if kind != "eagle3" or "mask_hidden" in names:
        found = kind if kind != "eagle3" else "peagle"
        raise ValueError(
            f"{source} is a draft of the kind {found!r}, and only 'eagle3' is supported. Use another draft."
        )
    if any("kv_a_proj_with_mqa" in name or "kv_b_proj" in name for name in names):
        raise ValueError(
            f"{source} is an EAGLE-3 draft with latent attention (MLA: kv_a_proj_with_mqa), which is not supported. "
            "Use a draft with ordinary attention."
        )
    if "fc.weight" not in names:
        raise ValueError(
            f"{source} is no EAGLE-3 draft: there is no tensor fc.weight. Pass a checkpoint with midlayer.* or "
            "layers.0.* tensors, as EAGLE-3 drafts have."
        )


def _refuse_first_versions(source: str, weights: Mapping[str, torch.Tensor]) -> None:
    """Refuse a draft of EAGLE-1 or EAGLE-2, whose layer reads one vector instead of two."""
    query = weights.get("layers.0.self_attn.q_proj.weight")
    hidden = weights["fc.weight"].shape[0]
    if query is not None and query.shape[-1] == hidden:
        raise ValueError(
            f"{source} is a draft of EAGLE-1 or EAGLE-2 (q_proj reads {hidden} numbers, EAGLE-3's {2 * hidden}), which "
            "is another model. Use an EAGLE-3 draft of the same target."
        )


def _compare_names(source: str, raw: Mapping[str, Any], given: str | None) -> None:
    """Warn if config.json names another target than the one that was passed."""
    named = ((raw.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path")
    if named and given and Path(named).name.lower() != Path(given).name.lower():
        logger.warning(
            "%s was made for %s, and the target is %s: fewer drafts may be accepted if they differ.",
            source,
            named,
            given,
        )


def save_speculators(draft: Eagle3DraftModel, folder: Any, target: PreTrainedModel | None = None) -> None:
    """Write a draft in the format of speculators, which vLLM and SGLang read.

    Args:
        draft ([`Eagle3DraftModel`]): The draft.
        folder (`str` or `os.PathLike`): Folder to write config.json and model.safetensors to.
        target (`PreTrainedModel`, *optional*): The target, whose embedding and head are written for a draft that has
            none of its own.

    Raises:
        ValueError: If embedding or head are missing, or the layers of the target are not known.
    """
    config, tensors = speculators_config(draft, target), speculators_tensors(draft, target)
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def speculators_tensors(draft: Eagle3DraftModel, target: PreTrainedModel | None = None) -> dict[str, torch.Tensor]:
    """Return the tensors of a draft by their names in the format of speculators; see [`save_speculators`]."""
    tensors = {name: value.detach().cpu().contiguous() for name, value in draft.state_dict().items()}
    for name, part in (("embed_tokens.weight", "get_input_embeddings"), ("lm_head.weight", "get_output_embeddings")):
        if name not in tensors:
            if target is None:
                raise ValueError(f"the draft has no {name} of its own, and the format needs it: pass target=.")
            rows = getattr(target, part)().weight.detach().cpu()
            rows = rows if name == "embed_tokens.weight" else rows[draft.token_ids.cpu()]
            tensors[name] = rows.to(draft.dtype).contiguous()
    if draft.d2t is not None:
        marks = torch.zeros(draft.config.vocab_size, dtype=torch.bool)
        marks[draft.token_ids.cpu()] = True
        tensors["t2d"] = marks
    return tensors


def speculators_config(draft: Eagle3DraftModel, target: PreTrainedModel | None = None) -> dict[str, Any]:
    """Return config.json of a draft in the format of speculators; see [`save_speculators`]."""
    config = draft.config
    layers = draft.effective("target_layer_ids") or ()
    if not layers and target is None:
        raise ValueError("the draft does not say which layers of the target it reads: pass target=.")
    theta = draft.effective("rope_theta")
    rope = dict(config.rope_parameters or {}) | ({} if theta is None else {"rope_theta": float(theta)})
    windows = config.window_of_layers
    kind = "qwen3" if config.qk_norm else "llama"
    window = next((own for own in windows if own is not None), None)
    extra: dict[str, Any] = {}
    if kind == "qwen3" or window is not None:
        kinds = ["full_attention" if own is None else "sliding_attention" for own in windows]
        extra = {"layer_types": kinds, "sliding_window": window, "use_sliding_window": window is not None}
    names = (*LAYER_FIELDS, "num_hidden_layers", "initializer_range", "attention_bias")
    layer = {name: getattr(config, name) for name in names} | extra
    layer |= {"model_type": kind, "rope_parameters": rope, "tie_word_embeddings": False}
    layer |= {"mlp_bias": config.mlp_bias} if kind == "llama" else {}
    width = config.target_hidden_size
    chain = len(draft.setting("tree_widths"))
    method = {"proposal_type": "greedy", "speculative_tokens": chain, "accept_tolerance": 0.0, "verifier_accept_k": 1}
    architectures = [] if target is None else [type(target).__name__]
    verifier = {"name_or_path": config.target_name_or_path, "architectures": architectures}
    return {
        "architectures": ["Eagle3DraftModel"],
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "dtype": str(draft.dtype).removeprefix("torch."),
        "eagle_aux_hidden_state_layer_ids": list(layers) or list(draft.layers_of(text_config(target))),
        "embed_requires_grad": False,
        "fc_norm": config.fc_norm,
        "norm_before_fc": config.norm_before_fc,
        "norm_before_residual": config.norm_before_residual,
        "norm_output": bool(draft.effective("norm_output")),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": verifier,
        },
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "target_hidden_size": None if width == config.hidden_size else width,
        "tie_word_embeddings": False,
        "transformer_layer_config": layer,
    }
