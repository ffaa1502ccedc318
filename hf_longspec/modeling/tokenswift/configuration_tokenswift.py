"""Configuration of TokenSwift heads."""

from transformers import PreTrainedConfig, PreTrainedModel

from ..configuration_base import DraftConfig, text_config


class TokenSwiftConfig(DraftConfig):
    """How many heads there are and how they are connected, and which target they read.

    Args:
        hidden_size (`int`): Width of the target's residual stream.
        num_heads (`int`): Heads; the i-th predicts the token i places behind the one that the target predicts.
        chained (`bool`): Whether a head continues the one before it. Otherwise each begins at the target's own state,
            as Medusa's heads do.
        sequential (`bool`): Whether a head also sees the token before the one that it predicts, as Hydra's heads do;
            the paper's do not. Such heads are chained.
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

    @classmethod
    def from_target(cls, target: PreTrainedModel | PreTrainedConfig, **overrides: object) -> "TokenSwiftConfig":
        """The configuration of heads for `target`; the width is the target's."""
        text = text_config(target)
        values = {
            "hidden_size": text.hidden_size,
            "rms_norm_eps": getattr(text, "rms_norm_eps", None) or cls.rms_norm_eps,
        }
        config = super().from_target(target, **(values | overrides))
        assert isinstance(config, cls)
        return config
