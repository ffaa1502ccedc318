"""Conversion of the checkpoints that the authors of LongSpec published.

A checkpoint holds one block of 20 tensors. The six published ones are ordinary Hugging Face repositories; the authors'
trainer writes the same tensors to `draft_model_weights.pth`. Shapes follow from the target's configuration.
"""

from collections.abc import Iterable
from typing import Any

from transformers import PreTrainedConfig

from ..loading import Checkpoint
from ..register_draft import Converter
from .modeling_longspec import LongSpecConfig, LongSpecDraftModel

# Draft -> target it was trained for.
LONGSPEC_TARGETS = {
    "sail/longspec-vicuna-7b-v1.5-16k": "lmsys/vicuna-7b-v1.5-16k",
    "sail/longspec-vicuna-13b-v1.5-16k": "lmsys/vicuna-13b-v1.5-16k",
    "sail/longspec-longchat-7b-v1.5-32k": "lmsys/longchat-7b-v1.5-32k",
    "sail/longspec-longchat-13b-16k": "lmsys/longchat-13b-16k",
    "sail/longspec-Llama-3-8B-Instruct-262k": "gradientai/Llama-3-8B-Instruct-262k",
    "sail/longspec-QwQ-32B-Preview": "Qwen/QwQ-32B-Preview",
}
# Prefixes that wrappers of the model may have added to a name.
PREFIXES = ("module.", "model.", "glide.", "draft_model.")
# Projections that are in the files and are never used, as the block attends to the target's own keys and values.
UNUSED = ("cross_attn.k_proj.", "cross_attn.v_proj.", "self_attn.rotary_emb.", "cross_attn.rotary_emb.")
# The authors' settings. A query attended to itself and 512 tokens before it; in training, its newest target key was 1
# to 4 positions before it. Drafting used 68 nodes in five levels, [4, 16, 16, 16, 16]; with 63 the tree has 64 nodes,
# root included, which fill whole tiles of the attention kernels.
AS_TRAINED: dict[str, Any] = {"qkv_bias": True, "window": 513, "noise_range": [1, 4]}
TREE_WIDTHS = [4, 16, 16, 16, 11]


def longspec_draft(checkpoint: Checkpoint, target: PreTrainedConfig) -> LongSpecDraftModel:
    """Return the draft of a checkpoint for a target with this config, in the dtype of the checkpoint."""
    config = LongSpecConfig.from_target(target, kv_layer=target.num_hidden_layers - 1, **AS_TRAINED)
    draft = LongSpecDraftModel(config)
    weights = checkpoint.tensors(renamed(checkpoint.names), draft.block.state_dict(), "LongSpec draft")
    draft.block.load_state_dict(weights)
    draft.generation_config.tree_widths = list(TREE_WIDTHS)
    return draft.to(weights["mlp.up_proj.weight"].dtype)


def renamed(names: Iterable[str]) -> dict[str, str]:
    """Return the name without wrappers' prefixes of each tensor that is used.

    >>> renamed(["module.glide.mlp.up_proj.weight", "cross_attn.k_proj.bias"])
    {'module.glide.mlp.up_proj.weight': 'mlp.up_proj.weight'}
    """
    new_names = {}
    for name in names:
        new_name = name
        while prefix := next((prefix for prefix in PREFIXES if new_name.startswith(prefix)), None):
            new_name = new_name.removeprefix(prefix)
        if not new_name.startswith(UNUSED):
            new_names[name] = new_name
    return new_names


LONGSPEC = Converter(LONGSPEC_TARGETS, "cross_attn.", longspec_draft)
