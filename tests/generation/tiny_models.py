"""Random models beside `tests/tiny_targets.py`: peaked attention and spread logits, in the shapes of real classes."""

from collections.abc import Callable

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

# Tiny targets whose attention differs: plain, windows in all layers, softcaps, windows in some layers, sinks, layers
# without rotation, a latent cache. tests/generation/test_target.py compares the logits of all tiny targets.
ATTENTION = ("llama", "mistral", "gemma2", "gemma3", "gpt_oss", "cohere2", "deepseek_v3")
SIZES = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
_VISION |= {"image_size": 28, "patch_size": 14}
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
_QWEN_VISION = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48}
_LAYERS = ["sliding_attention", "sliding_attention", "full_attention"]
IMAGE_TOKEN = 127

# Settings beside `text_config` and `vision_config`, which are SIZES and _VISION with what stands here.
_ROWS: dict[str, dict] = {
    "gemma3": {
        "text_config": {"sliding_window": 16, "layer_types": _LAYERS},
        "mm_tokens_per_image": 4,
        "image_token_id": IMAGE_TOKEN,
    },
    "gemma4": {
        "text_config": {
            "sliding_window": 16,
            "layer_types": _LAYERS,
            "global_head_dim": 16,
            "vocab_size_per_layer_input": 128,
            "hidden_size_per_layer_input": 8,
            "num_kv_shared_layers": 0,
        },
        "vision_config": {"head_dim": 16, "num_key_value_heads": 2, "pooling_kernel_size": 2},
        "audio_config": None,
        "image_token_id": IMAGE_TOKEN,
    },
    "llava": {
        "text_config": {"model_type": "llama"},
        "vision_config": {"model_type": "clip_vision_model"},
        "image_token_id": IMAGE_TOKEN,
        "image_seq_length": 4,
    },
    "mistral3": {
        "text_config": {"model_type": "mistral", "sliding_window": 16},
        "vision_config": {"head_dim": 16},
        "image_token_id": IMAGE_TOKEN,
    },
    "idefics3": {"text_config": {"model_type": "llama"}, "image_token_id": IMAGE_TOKEN},
    "qwen2_vl": {
        "text_config": {"rope_parameters": _MROPE},
        "vision_config": {**_QWEN_VISION, "hidden_size": 64},
        "image_token_id": IMAGE_TOKEN,
    },
    "qwen2_5_vl": {
        "text_config": {"rope_parameters": _MROPE},
        "vision_config": {**_QWEN_VISION, "out_hidden_size": 64, "fullatt_block_indexes": [0]},
        "image_token_id": IMAGE_TOKEN,
    },
    "qwen3_vl": {
        "text_config": {"rope_parameters": _MROPE},
        "vision_config": {**_QWEN_VISION, "out_hidden_size": 64, "deepstack_visual_indexes": [0]},
        "image_token_id": IMAGE_TOKEN,
    },
    "qwen3_5": {
        "text_config": {
            "rope_parameters": _MROPE,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
        "vision_config": {**_QWEN_VISION, "out_hidden_size": 64},
        "image_token_id": IMAGE_TOKEN,
    },
    "paligemma": {"text_config": {"model_type": "gemma"}, "projection_dim": 64},
    "kosmos-2.5": {"text_config": {"embed_dim": 64, "ffn_dim": 96, "layers": 3, "attention_heads": 4}},
    "idefics": {**SIZES, "vision_config": {"embed_dim": 32}},
}


def peaked(make: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """The model in eval mode, with matrices that keep the scale of their input, so that attention is far from even."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make().eval()
        with torch.no_grad():
            for weight in model.parameters():
                if weight.dim() >= 2:
                    weight.copy_(torch.randn_like(weight) * 1.5 / weight.shape[-1] ** 0.5)
    return model


def vision_language_model(name: str) -> PreTrainedModel:
    """The class that `AutoModelForImageTextToText` gives for `name`."""
    row = dict(_ROWS[name])
    text, vision = SIZES | row.pop("text_config", {}), _VISION | row.pop("vision_config", {})
    if name == "idefics":
        config = AutoConfig.for_model(name, vision_config=vision, **row)
    else:
        config = AutoConfig.for_model(name, text_config=text, vision_config=vision, **row)
    return peaked(lambda: AutoModelForImageTextToText.from_config(config))
