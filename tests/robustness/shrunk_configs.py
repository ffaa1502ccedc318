"""The smallest configuration of any model type of transformers, by rules over the names of config fields.

A rule replaces the default of every field with its name, in the configuration and in those inside of it. Lists with one
entry per layer keep the layers in which every kind of layer of the default occurs. A case that no rule covers is an
exception, with its reason.
"""

import re
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from tests.tiny_targets import BOS_TOKEN_ID, EOS_TOKEN_ID, PAD_TOKEN_ID, WINDOW

VOCAB_SIZE = 128
LAYERS = 4
HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 64, 4, 2, 16
# One above the tokens of all prompts; tokens of images, sounds and tools have no meaning in these tests.
OTHER_TOKEN_ID = VOCAB_SIZE - 1

# The first pattern that matches the whole name of a field gives its value. Only numbers that are set are replaced: a
# default of None or 0 switches a feature off. A callable gets the default.
RULES: tuple[tuple[str, Any], ...] = (
    ("pad_token_id", PAD_TOKEN_ID),
    ("bos_token_id|decoder_start_token_id|cls_token_id", BOS_TOKEN_ID),
    ("eos_token_id|sep_token_id|forced_eos_token_id", EOS_TOKEN_ID),
    (".*_token_(id|index)", OTHER_TOKEN_ID),
    ("unk_index|mask_index", OTHER_TOKEN_ID),
    (".*vocab_size.*|encoder_hash_byte_group_vocab|vocab_offset", VOCAB_SIZE),
    # depth
    (r"num_hidden_layers|num_layers|n_layers?|(en|de)coder_layers|num_(en|de)coder_layers|depth|num_blocks", LAYERS),
    ("conf_num_hidden_layers|num_layers_per_stack|num_global_layers", 2),
    ("num_kv_shared_layers", 1),
    ("first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
    ("moe_layer_end_index", LAYERS - 1),
    (".*_(layer_)?(period|interval|step)|.*every_n_layers|sliding_window_pattern|layer_group_size", 2),
    (".*layer_offset", 1),
    ("n_layers_per_attn_res_block", 2),
    ("n_(in|out)put_layers", 1),
    # heads
    ("num_key_value_heads|num_kv_heads|kv_n_heads|swa_num_key_value_heads|num_query_groups", KV_HEADS),
    ("num_attention_heads.*|.*attention_heads|num_heads|n_heads?|index_n_heads", HEADS),
    ("linear_num_(key_|value_)?heads", HEADS),
    ("mamba_num_heads|mamba_n_heads|n_mamba_heads", HEADS),
    ("qk_nope_head_dim", 16),
    ("qk_rope_head_dim", 8),
    ("qk_head_dim", 24),
    ("v_head_dim", 12),
    ("rotary_dim", 8),
    ("mamba_(d_head|head_?dim)", 2 * HEAD_DIM),  # all heads together are `expand` times the model
    (".*head_dim|dim_head|attention_head_size|d_head|d_kv", HEAD_DIM),
    ("attention_hidden_size|query_pre_attn_scalar", HIDDEN),
    # widths
    ("hidden_size_per_layer_input|embedding_size|input_embedding_size|output_embedding_size", 32),
    ("hidden_size.*|d_model|n_embd|embedding_dim|emb_dim|word_embed_proj_dim|backbone_hidden_size", HIDDEN),
    (".*_hidden_size|.*(input|output|in|out)_(dim|size)|lru_width|output_channels", HIDDEN),
    ("mamba_d_ssm", 2 * HIDDEN),
    ("moe.*intermediate_size|.*shared_experts?_intermediate_size|expert_ffn_hidden_size", 48),
    ("intermediate_size.*|.*intermediate_size|.*ffn_dim|ffn_hidden_size|d_ff|dff|dim_ff|d_inner|mlp_dim", 96),
    ("feed_forward_size", 96),
    (".*_embed_dim|.*_embedding_size", 32),
    ("q_lora_rank", 24),
    ("kv_lora_rank|o_lora_rank", 16),
    (".*_rank|.*lowrank|d_rel|.*_state_size|.*state_size|mamba_d_state", 8),
    ("base_channels|num_filters|embed_dim|codebook_dim|codebook_size|nemo_conv_channels|.*_out_channel", 32),
    # experts
    ("zero_expert_num|num_expert_group|n_group|n_groups|mamba_n_?groups|o_groups", 2),
    (".*num_(local_)?experts|n_routed_experts|moe_num_experts|num_local_experts", 4),
    ("num_experts_per_tok(en)?|moe_top_?k|moe_k", lambda default: min(default, 2)),
    ("topk_group", 1),
    ("(n|num|moe_num)_shared_experts", 1),
    # lengths
    (
        ".*window_size|.*sliding_window|local_attention|local_attention_window_len|keep_window_size|attention_chunk_size",
        WINDOW,
    ),
    ("index_topk", 8),
    ("index_block_size|index_topk_blocks", 4),
    ("max_(position_embeddings|seq_len|source_positions|target_positions)|n_positions|n_ctx|context_length", 512),
    ("model_max_length|rel_extent", 512),
    ("(mamba_)?chunk_size", 16),
    ("hc_mult|hc_count", 2),
    ("image_size", 28),
    ("patch_size", 14),
    ("num_position_embeddings", 16),
    ("num_nextn_predict_layers", 0),
)

# Values that a model needs although the default of its configuration is None.
NEEDED = {
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
}

_FULL_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_SHARED = {"num_hidden_layers": LAYERS, "num_kv_shared_layers": LAYERS}
# attention reads the hidden states beside the embeddings
_ZAMBA = {"attention_hidden_size": 2 * HIDDEN, "attention_head_dim": 2 * HIDDEN // HEADS, "num_key_value_heads": HEADS}
_NO_INPUT_PER_LAYER = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}

# Model type: fields that no rule can know.
EXCEPTIONS: dict[str, dict[str, Any]] = {
    # the default has no rotary settings, and the model reads them
    "cohere_compass_text": {"rope_parameters": {"full_attention": _FULL_ROPE}},
    # the model reads settings from the wrong one of its two configurations
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    # the first layer of a kind holds the weights of the others, and there must be others
    "zamba": {"layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"], **_ZAMBA},
    "zamba2": _ZAMBA,
    # the defaults have recurrent layers only, which transformers cannot generate with
    "bamba": {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    # the default lists no layers, or attention alone
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    # a multiple of the pool
    "glm5_next": {"text_config": {"index_topk": 16}},
    # all layers read the cache of another model
    "gemma4_assistant": {"text_config": _SHARED | _NO_INPUT_PER_LAYER},
    "gemma4_unified_assistant": {"text_config": _SHARED},
    # the head size of layers with a window is that of both its parts
    "dots3_note_text": {"head_dim": 24},
    "dots3_note": {"text_config": {"head_dim": 24}},
    # layers and cycles are multiplied
    "hrm_text": {"num_layers_per_stack": 1, "num_hidden_layers": 8},
    # all heads together are `expand` times the model
    "mamba2": {"head_dim": 2 * HEAD_DIM},
    # the default has no indexer, and its layers do
    "qwen4_exp_text": {
        "indexer_n_heads": HEADS,
        "indexer_kv_heads": 1,
        "indexer_head_dim": HEAD_DIM,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    # a product and a sum that are fixed by other fields
    "reformer": {"axial_pos_shape": [16, 32], "axial_pos_embds_dim": [24, 40]},
    # one of several adapters has to be chosen
    "xmod": {"default_language": "en_XX"},
}
EXCEPTIONS["qwen4_exp"] = {"text_config": EXCEPTIONS["qwen4_exp_text"]}


def shrunk_config(model_type: str, **overrides: Any) -> PreTrainedConfig:
    """The configuration of a tiny model: each field of the default replaced by its rule, or by `overrides`."""
    exceptions = EXCEPTIONS.get(model_type, {})
    try:
        default = AutoConfig.for_model(model_type)
    except Exception:  # the default contradicts itself (gemma4_assistant); its class of error is not public
        default = AutoConfig.for_model(model_type, **exceptions)
    fields = _shrunk(default)
    return AutoConfig.for_model(model_type, **_merged(_merged(fields, exceptions), overrides))


def _merged(fields: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """`overrides` on top of `fields`, dictionaries entry by entry."""
    merged = dict(fields)
    for name, value in overrides.items():
        both = isinstance(value, dict) and isinstance(merged.get(name), dict)
        merged[name] = _merged(merged[name], value) if both else value
    return merged


def _shrunk(config: PreTrainedConfig) -> dict[str, Any]:
    """The fields of a configuration that differ from its default."""
    kept = _kept_layers(config)
    fields: dict[str, Any] = {}
    for name, default in vars(config).items():
        if name in config.sub_configs:
            if default is not None:
                fields[name] = {"model_type": default.model_type, **_shrunk(default)}
        elif name.startswith("_"):
            continue
        elif name == "rope_parameters" and isinstance(default, dict):
            fields[name] = _shrunk_rope(default)
        elif name == "is_decoder":
            fields[name] = True
        elif (value := _shrunk_value(name, default, kept, _depth(config))) != default:
            fields[name] = value
    own = config.to_dict()
    latent = own.get("kv_lora_rank") is not None and "num_key_value_heads" in own
    if latent:
        fields["num_key_value_heads"] = HEADS  # the latent is expanded to every query head
    if latent and own.get("head_dim") == own.get("qk_rope_head_dim"):
        fields["head_dim"] = fields.get("qk_rope_head_dim", own["head_dim"])  # of the rotary part
    if per_layer := own.get("per_layer_config"):
        by_number = {int(layer): own_fields for layer, own_fields in per_layer.items()}
        fields["per_layer_config"] = {
            str(place): {name: _of_layer(name, value, own.get(name)) for name, value in by_number[layer].items()}
            | ({"num_key_value_heads": HEADS} if latent else {})
            for place, layer in enumerate(kept)
            if by_number.get(layer)
        }
    return fields


def _of_layer(name: str, value: Any, default: Any) -> Any:
    """The settings of one layer; heads and latents whose size differs from that of other layers keep another size."""
    shrunk = _by_rule(name, value)
    return 2 * shrunk if name in ("head_dim", "kv_lora_rank") and value != default else shrunk


def _shrunk_value(name: str, default: Any, kept: list[int], depth: int) -> Any:
    if _per_layer(default, depth):
        entries = [default[layer] for layer in kept]
        return type(default)(_by_rule(name, entry) for entry in entries)
    if _layer_indices(name, default, depth):
        return [place for place, layer in enumerate(kept) if layer in default]
    return _by_rule(name, default)


def _by_rule(name: str, default: Any) -> Any:
    if default is None:
        return NEEDED.get(name)
    if isinstance(default, bool) or not isinstance(default, int) or (default == 0 and "token" not in name):
        return default
    for pattern, value in RULES:
        if re.fullmatch(pattern, name):
            return value(default) if callable(value) else value
    return default


def _shrunk_rope(parameters: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings with the sections of multimodal positions in the proportions of the default."""
    shrunk = dict(parameters)
    for name, value in parameters.items():
        if isinstance(value, dict):
            shrunk[name] = _shrunk_rope(value)
        elif name == "mrope_section" and value:
            half = int(HEAD_DIM * parameters.get("partial_rotary_factor", 1.0)) // 2
            rest = [half * part // sum(value) for part in value[1:]]
            shrunk[name] = [half - sum(rest), *rest]
    return shrunk


def _depth(config: PreTrainedConfig) -> int:
    return int(getattr(config, "num_hidden_layers", None) or 0)


def _per_layer(value: Any, depth: int) -> bool:
    return isinstance(value, list | tuple) and depth > 2 and len(value) == depth


def _layer_indices(name: str, value: Any, depth: int) -> bool:
    """Whether a field lists layers by their number."""
    if not isinstance(value, list | tuple) or not re.fullmatch(".*(ids|idxs|layers|indices|indexes)", name):
        return False
    return all(type(layer) is int and 0 <= layer < max(depth, 1) for layer in value) and len(set(value)) == len(value)


def _kept_layers(config: PreTrainedConfig) -> list[int]:
    """The layers of the default that the lists keep: the first of every kind, then the first ones."""
    depth = _depth(config)
    lists = [value for value in vars(config).values() if _per_layer(value, depth)]
    chosen = [value for name, value in vars(config).items() if value and _layer_indices(name, value, depth)]
    first: dict[str, int] = {}
    for layer in range(depth):
        first.setdefault(repr([[entry[layer] for entry in lists], [layer in some for some in chosen]]), layer)
    kept = sorted(first.values())[:LAYERS]
    others = (layer for layer in range(depth) if layer not in kept)
    return sorted([*kept, *(layer for layer, _ in zip(others, range(LAYERS - len(kept)), strict=False))])
