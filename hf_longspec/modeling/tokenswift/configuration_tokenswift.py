"""Configuration of TokenSwift heads."""

from typing import Any, Self

from transformers import PreTrainedConfig, PreTrainedModel

from ..configuration_base import DraftConfig, text_config


class TokenSwiftConfig(DraftConfig):
    """Configuration of [`TokenSwiftDraftModel`]: number and kind of its heads.

    Args:
        hidden_size (`int`): Width of the target's residual stream.
        num_heads (`int`): Number of heads. Head i predicts the token i places after the one that the target predicts.
        chained (`bool`): Whether the input of a head is the output of the head before it. Otherwise it is the target's
            own state, as the input of Medusa's heads is.
        sequential (`bool`): Whether a head also reads the token before the one that it predicts, as in Hydra and
            unlike in the paper. Such heads are chained.
        rms_norm_eps (`float`): Epsilon of the two norms of a head.
        initializer_range (`float`): Standard deviation of the initial weights of the linear layers.
    """

    model_type = "tokenswift"

    hidden_size: int = 0
    num_heads: int = 3
    chained: bool = True
    sequential: bool = False
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02

    @property
    def kind_of_heads(self) -> str:
        """Kind of the heads, for the model card."""
        return "sequential" if self.sequential else "chained" if self.chained else "independent"

    @classmethod
    def from_target(cls, target: PreTrainedModel | PreTrainedConfig, **overrides: Any) -> Self:
        """Return the configuration of heads for `target`, with the target's width."""
        text = text_config(target)
        values = {
            "hidden_size": text.hidden_size,
            "rms_norm_eps": getattr(text, "rms_norm_eps", None) or cls.rms_norm_eps,
        }
        return super().from_target(target, **(values | overrides))
