"""Conversion of the checkpoints that the authors of TokenSwift published.

A checkpoint holds heads and target together. The target's weights are not read.
"""

import torch
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
    """Return the heads of a checkpoint, in the dtype of the checkpoint.

    Args:
        checkpoint ([`Checkpoint`]): Weights of heads and target.
        target (`PreTrainedConfig`): Configuration of the target.

    Raises:
        ValueError: If tensors are missing or unknown, or their shapes are not the target's.
    """
    weights = checkpoint.read(HEADS)
    numbers = {name.removeprefix(HEADS).partition(".")[0] for name in weights}
    highest = max((int(number) for number in numbers if number.isdecimal()), default=0)
    draft = TokenSwiftDraftModel(TokenSwiftConfig.from_target(target, num_heads=highest + 1))
    checkpoint.check(weights, _as_published(draft), "TokenSwift heads")
    draft.heads.layers.load_state_dict({name.removeprefix(HEADS): value for name, value in weights.items()})
    return draft.to(next(iter(weights.values())).dtype)


def _as_published(draft: TokenSwiftDraftModel) -> dict[str, torch.Tensor]:
    """Return the tensors of a draft by the authors' names."""
    return {HEADS + name: value for name, value in draft.heads.layers.state_dict().items()}


TOKENSWIFT = Converter(TOKENSWIFT_TARGETS, HEADS, tokenswift_draft)
