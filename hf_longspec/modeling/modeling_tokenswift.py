"""TokenSwiftDraftModel: heads that read the tokens behind the next one off the target's last residual stream."""

from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel

from ..generation.final_norm import final_norm_of
from ..generation.target import TargetView
from ..generation.target_ends import device_of
from .base import DraftModel
from .configuration_tokenswift import TokenSwiftConfig


class TokenSwiftDraftModel(DraftModel):
    """A few small heads on the input of the target's final norm, each for one more token ahead.

    The language-model head is the target's and not part of the draft. The heads know the text up to the last token and
    nothing of each other's choices.

    ```python
    draft = TokenSwiftDraftModel.from_target(target, num_heads=3)   # untrained: see hf_longspec.training
    target.generate(**inputs, assistant_model=draft)
    ```

    Source: https://huggingface.co/papers/2502.18890, section 3.1.
    """

    config_class = TokenSwiftConfig
    _no_split_modules = ["TokenSwiftHead"]
    settings: ClassVar[dict[str, Any]] = {}

    def __init__(self, config: TokenSwiftConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        self.heads = TokenSwiftHeads(config)
        self.post_init()

    @classmethod
    def from_target(cls, target: PreTrainedModel, **overrides: Any) -> "TokenSwiftDraftModel":
        """Untrained heads for `target` in eval mode, with its dtype, on the device of its final norm."""
        norm = final_norm_of(target)  # refuses targets without one by name
        draft = super().from_target(target, **overrides)
        assert isinstance(draft, cls)
        weight = target.get_input_embeddings().weight
        return draft.to(device_of(norm, weight.device), weight.dtype).eval()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states of all heads, normalised, for the target's language-model head.

        Args:
            hidden (`torch.Tensor` of shape `(B, L, hidden)`): What the target's final norm is given.

        Returns:
            `torch.Tensor` of shape `(num_heads, B, L, hidden)`. Where the target's own logits at place t predict token
            t + 1, those of `[i]` predict token t + 2 + i.
        """
        states: torch.Tensor = self.heads(hidden.to(self.dtype))
        return states

    def check_settings(self, target: TargetView) -> None:
        """Refuse targets without a final norm, and a number of heads that is none."""
        final_norm_of(target.model)
        if self.config.num_heads < 1:
            raise ValueError(f"num_heads={self.config.num_heads}: expected at least 1, the tokens ahead to predict.")


class TokenSwiftHeads(nn.Module):
    """All heads, run on the same hidden states.

    With `x_0` the input of the target's final norm, `x_i = x_{i-1} + A_i RMSNorm(x_{i-1})` in a chain, or
    `x_i = x_0 + A_i RMSNorm(x_0)` for independent heads; the language-model head gets `RMSNorm(x_i)`.

    Source: https://huggingface.co/papers/2502.18890, equation 1, and the authors' checkpoints, which have the norms;
    independent heads: Medusa, https://huggingface.co/papers/2401.10774.
    """

    def __init__(self, config: TokenSwiftConfig):
        super().__init__()
        self.chained = config.chained
        self.layers = nn.ModuleList(TokenSwiftHead(config) for _ in range(config.num_heads))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """`(..., hidden)` to `(num_heads, ..., hidden)`."""
        states, current = [], hidden
        for head in self.layers:
            assert isinstance(head, TokenSwiftHead)
            current = head(current if self.chained else hidden)
            states.append(head.post_layernorm(current))
        return torch.stack(states)


class TokenSwiftHead(nn.Module):
    """One head: a norm and a linear layer that move the residual stream, and the norm before the logits."""

    def __init__(self, config: TokenSwiftConfig):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.linear = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.post_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The residual stream `(..., hidden)` behind this head, not normalised."""
        moved: torch.Tensor = hidden + self.linear(self.input_layernorm(hidden))
        return moved
