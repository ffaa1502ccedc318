"""Random models beside `tests/tiny_targets.py`: peaked attention and spread logits, in the shapes of real classes."""

from collections.abc import Callable

import torch
from transformers import AutoModelForImageTextToText, PreTrainedModel

from tests.robustness.shrunk_configs import shrunk_config

# Tiny targets whose attention differs: plain, windows in all layers, softcaps, windows in some layers, sinks, layers
# without rotation, a latent cache. tests/generation/test_target.py compares the logits of all tiny targets.
ATTENTION = ("llama", "mistral", "gemma2", "gemma3", "gpt_oss", "cohere2", "deepseek_v3")
IMAGE_TOKEN = 127
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
_PATCHES = {"image_size": 28, "patch_size": 14}
_GEMMA4_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
_GEMMA4_VISION |= {"head_dim": 16, "num_key_value_heads": 2, "pooling_kernel_size": 2} | _PATCHES

# Settings of classes for images that no rule of shrunk_configs.py makes: few tokens of an image, mainly.
_IMAGES: dict[str, dict] = {
    "gemma3": {"mm_tokens_per_image": 4},
    "gemma4": {"vision_config": _GEMMA4_VISION, "audio_config": None},
    "llava": {"vision_config": _PATCHES, "image_seq_length": 4},
    "mistral3": {"vision_config": _PATCHES},
    "qwen2_vl": {"text_config": _MROPE},
    "qwen2_5_vl": {
        "text_config": _MROPE,
        "vision_config": {"window_size": 112, "fullatt_block_indexes": [1], "out_hidden_size": 64},
    },
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
    config = shrunk_config(name, **_IMAGES.get(name, {}))
    return peaked(lambda: AutoModelForImageTextToText.from_config(config))
