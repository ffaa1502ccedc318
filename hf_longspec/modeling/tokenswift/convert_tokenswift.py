"""Conversion of the checkpoints that the authors of TokenSwift published.

A checkpoint holds heads and target together. The target's weights are not read.
"""

from transformers import PreTrainedConfig

from ..loading import Checkpoint
from ..register_draft import Converter
from .modeling_tokenswift import TokenSwiftConfig, TokenSwiftDraftModel

# Published checkpoint -> target that its heads were trained for.
TOKENSWIFT_TARGETS = {
    "TokenSwift/TokenSwift-Yarn-Llama-2-7b-128k": "NousResearch/Yarn-Llama-2-7b-128k",
    "TokenSwift/TokenSwift-Llama-3.1-8B": "meta-llama/Llama-3.1-8B",
    "TokenSwift/TokenSwift-Qwen2.5-1.5B": "Qwen/Qwen2.5-1.5B",
    "TokenSwift/TokenSwift-Qwen2.5-7B": "Qwen/Qwen2.5-7B",
    "TokenSwift/TokenSwift-Qwen2.5-14B": "Qwen/Qwen2.5-14B",
    "TokenSwift/TokenSwift-DeepSeek-R1-Distill-Qwen-32B": "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B",
    "TokenSwift/TokenSwift-QwQ-32B": "Qwen/QwQ-32B",
}
# Prefix of the names of all heads. The head's number and the names of this package follow.
HEADS = "model.medusa_layers."


def tokenswift_draft(checkpoint: Checkpoint, target: PreTrainedConfig) -> TokenSwiftDraftModel:
    """Return the heads of a checkpoint for a target with this config, in the dtype of the checkpoint."""
    names = {name: name.removeprefix(HEADS) for name in checkpoint.names if name.startswith(HEADS)}
    numbers = [int(number) for name in names.values() if (number := name.partition(".")[0]).isdecimal()]
    draft = TokenSwiftDraftModel(TokenSwiftConfig.from_target(target, num_heads=max(numbers, default=0) + 1))
    heads = draft.heads.layers
    weights = checkpoint.tensors(names, heads.state_dict(), "TokenSwift heads")
    heads.load_state_dict(weights)
    return draft.to(weights["0.linear.weight"].dtype)


TOKENSWIFT = Converter(TOKENSWIFT_TARGETS, HEADS, tokenswift_draft)
