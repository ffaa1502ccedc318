"""Configuration of an EAGLE-3 draft."""

from typing import Any, Self

from transformers import PreTrainedConfig, PreTrainedModel

from ..configuration_base import DraftConfig, text_config

# Rotary embeddings whose frequencies do not change with the length of the text: a ring holds rotated keys.
ROPE_TYPES = ("default", "linear", "yarn", "llama3")


class Eagle3Config(DraftConfig):
    """Configuration of [`Eagle3DraftModel`].

    Args:
        hidden_size (`int`): Width of the draft.
        target_hidden_size (`int`): Width of the target's residual stream.
        num_aux_hidden_states (`int`): Number of the target's layers whose inputs ("auxiliary hidden states") are read.
        target_layer_ids (`list[int]`): The layers whose inputs are read; the number of layers stands for the final
            norm. The input of layer j is transformers' `hidden_states[j]`.
        intermediate_size (`int`): Width of the SwiGLU.
        num_hidden_layers (`int`): Number of layers. The first reads an embedding beside each hidden state.
        num_attention_heads (`int`): Number of query heads.
        num_key_value_heads (`int`): Number of key/value heads.
        head_dim (`int`): Size of a head.
        hidden_act (`str`): Activation of the SwiGLU.
        rms_norm_eps (`float`): Epsilon of all norms.
        initializer_range (`float`): Standard deviation of the initial weights.
        attention_bias (`bool`): Whether the projections of the attention have a bias.
        mlp_bias (`bool`): Whether the projections of the SwiGLU have a bias.
        fc_bias (`bool`): Whether the projection of the auxiliary hidden states has a bias.
        qk_norm (`bool`): Whether queries and keys are normalised before they are rotated.
        draft_vocab_size (`int`, *optional*): Number of tokens that can be drafted; all of the vocabulary by default.
        own_embedding (`bool`): Whether the draft has an embedding of its own. Otherwise it uses the target's.
        own_head (`bool`): Whether the draft has a language-model head of its own. Otherwise it uses the target's.
        norm_before_residual (`bool`): Whether the residual of the first layer is the normalised state.
        norm_before_fc (`bool`): Whether the auxiliary hidden states are normalised together.
        fc_norm (`bool`): Whether each of them is normalised alone.
        norm_output (`bool`): Whether the next step reads the normalised state instead of the residual stream.
        rope_parameters (`dict[str, Any]`, *optional*): Rotary embedding of the draft, independent of the target's.
        max_position_embeddings (`int`): As in the checkpoint; no limit of positions.
        layer_windows (`list[int | None]`, *optional*): Windows that the layers were trained with.
        trained_max_length (`int`): Number of positions that a query saw in training, the default of `window`.
        training_steps (`int`): Number of chained steps in training.
    """

    model_type = "longspec_eagle3"
    attribute_map = {"num_taps": "num_aux_hidden_states"}  # the name in files of earlier versions

    hidden_size: int = 0
    target_hidden_size: int = 0
    num_aux_hidden_states: int = 3
    target_layer_ids: list[int] | tuple[int, ...] = ()
    intermediate_size: int = 0
    num_hidden_layers: int = 1
    num_attention_heads: int = 1
    num_key_value_heads: int = 1
    head_dim: int = 0
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    attention_bias: bool = False
    mlp_bias: bool = False
    fc_bias: bool = False
    qk_norm: bool = False
    draft_vocab_size: int | None = None
    own_embedding: bool = False
    own_head: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    rope_parameters: dict[str, Any] | None = None
    max_position_embeddings: int = 2048
    layer_windows: list[Any] | tuple[Any, ...] | None = None
    trained_max_length: int = 2048
    training_steps: int = 3

    @classmethod
    def from_target(cls, target: PreTrainedModel | PreTrainedConfig, **overrides: Any) -> Self:
        """Return the configuration of a one-layer draft of the target's width, with its number and size of heads."""
        text = text_config(target)
        last = text.per_layer_config[text.num_hidden_layers - 1]  # layers may differ (gemma4)
        heads = last.num_attention_heads
        values = {
            "hidden_size": text.hidden_size,
            "target_hidden_size": text.hidden_size,
            "target_layer_ids": default_layer_ids(text.num_hidden_layers),
            "intermediate_size": 8 * text.hidden_size // 3,  # of a gated layer, arXiv:2002.05202, section 3.2
            "num_attention_heads": heads,
            "num_key_value_heads": getattr(last, "num_key_value_heads", None) or heads,
            "head_dim": getattr(last, "head_dim", None) or text.hidden_size // heads,
            "rms_norm_eps": getattr(text, "rms_norm_eps", None) or cls.rms_norm_eps,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        }
        return super().from_target(target, **(values | overrides))

    @property
    def window_of_layers(self) -> list[int | None]:
        """Window that each layer was trained with; `None` for those that saw everything."""
        return list(self.layer_windows or [None] * self.num_hidden_layers)

    def check_types(self) -> None:
        """Refuse fields of a wrong type or out of range, and fields that do not fit together."""
        super().check_types()
        kind, windows = (self.rope_parameters or {}).get("rope_type", "default"), self.window_of_layers
        reason = ""
        if self.norm_before_fc and self.fc_norm:
            reason = "norm_before_fc=True and fc_norm=True: auxiliary hidden states are normalised only once."
        elif kind not in ROPE_TYPES:
            reason = f"rope_type={kind!r}: expected one of {', '.join(ROPE_TYPES)}, whose frequencies do not change."
        elif self.num_attention_heads % self.num_key_value_heads:
            reason = f"num_attention_heads={self.num_attention_heads}: expected a multiple of num_key_value_heads."
        elif len(windows) != self.num_hidden_layers:
            reason = f"layer_windows={windows!r}: expected an entry for each of the {self.num_hidden_layers} layers."
        elif (self.draft_vocab_size or 0) > self.vocab_size:
            reason = f"draft_vocab_size={self.draft_vocab_size}: expected at most vocab_size={self.vocab_size}."
        if reason:
            raise ValueError(f"{reason} Correct the draft's config.json, or use another draft.")


def default_layer_ids(num_layers: int) -> list[int]:
    """Return the layers of the target that EAGLE-3 reads if nothing else is said: an early, the middle, a late one.

    >>> default_layer_ids(32), default_layer_ids(3)
    ([2, 16, 29], [2, 1, 0])
    """
    return [min(2, num_layers), num_layers // 2, max(0, num_layers - 3)]
