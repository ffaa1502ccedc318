"""Settings that the default configurations do not have, on types that take them: one setting at a time."""

from typing import Any

from tests.tiny_targets import WINDOW

# Inside of the texts: prompts of 9 to 40 tokens, 14 more. After the limit of dynamic NTK nothing is drafted.
LIMIT, LIMIT_OF_DYNAMIC = 44, 51

_HALF = 8  # frequencies of a head
_ROPE = {"rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": LIMIT}
_SLIDING, _FULL = "sliding_attention", "full_attention"
_WINDOWS = {"use_sliding_window": True, "sliding_window": WINDOW}
_LONG = {"short_factor": [1.0] * _HALF, "long_factor": [1.0 + i for i in range(_HALF)]}


def _rope(kind: str, **others: Any) -> dict[str, Any]:
    parameters = _ROPE | {"rope_type": kind} | others
    return {
        "rope_parameters": parameters,
        "max_position_embeddings": LIMIT_OF_DYNAMIC if kind == "dynamic" else 2 * LIMIT,
    }


# Label: model type and the fields that differ from the shrunk default.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "no window": ("mistral", {"sliding_window": None}),
    "window, mixtral": ("mixtral", {"sliding_window": WINDOW}),
    "window, phi3": ("phi3", {"sliding_window": WINDOW}),
    "window, starcoder2": ("starcoder2", {"sliding_window": WINDOW}),
    "windows, qwen2": ("qwen2", _WINDOWS | {"layer_types": [_FULL, _SLIDING] * 2}),
    "windows, qwen3": ("qwen3", _WINDOWS | {"layer_types": [_SLIDING, _FULL] * 2}),
    "windows, smollm3": ("smollm3", _WINDOWS | {"layer_types": [_SLIDING, _FULL] * 2}),
    "window in the config alone, qwen2_moe": ("qwen2_moe", {"sliding_window": WINDOW}),
    "untied": ("gemma3_text", {"tie_word_embeddings": False}),
    "wide heads": ("llama", {"head_dim": 24}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "experts in some layers": ("qwen3_moe", {"decoder_sparse_step": 2}),
    "shared keys": (
        "gemma4_text",
        {
            "num_kv_shared_layers": 2,
            "layer_types": [_SLIDING, _FULL] * 2,
            "per_layer_config": {"1": {"head_dim": 32}, "3": {"head_dim": 32}},
        },
    ),
    "rope linear": ("llama", _rope("linear")),
    "rope dynamic": ("llama", _rope("dynamic")),
    "rope yarn": ("llama", _rope("yarn")),
    "rope llama3": ("llama", _rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0)),
    "rope longrope": ("llama", _rope("longrope", **_LONG)),
    "rope longrope, phi3": ("phi3", _rope("longrope", **_LONG) | {"original_max_position_embeddings": LIMIT}),
}
