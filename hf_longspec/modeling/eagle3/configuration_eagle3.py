"""Configuration of an EAGLE-3 draft."""

from ..families.aux_hidden_states import AuxConfig


class Eagle3Config(AuxConfig):
    """Configuration of [`Eagle3DraftModel`]. The first layer reads an embedding beside each hidden state.

    A P-EAGLE draft is one with a `mask_token_id`.

    Args:
        fc_bias (`bool`): Whether the projection of the auxiliary hidden states has a bias.
        norm_before_residual (`bool`): Whether the residual of the first layer is the normalised state.
        norm_before_fc (`bool`): Whether the auxiliary hidden states are normalised together.
        fc_norm (`bool`): Whether each of them is normalised alone.
        norm_output (`bool`): Whether the next step reads the normalised state instead of the residual stream.
        training_steps (`int`): Number of chained steps in training; of a P-EAGLE draft, of levels.
        kwargs (`Any`): Fields of [`AuxConfig`].
    """

    model_type = "longspec_eagle3"
    attribute_map = {"num_taps": "num_aux_hidden_states"}  # the name in files of earlier versions

    fc_bias: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    training_steps: int = 3

    def check_types(self) -> None:
        """Refuse fields of a wrong type or out of range, and fields that do not fit together."""
        super().check_types()
        if self.norm_before_fc and self.fc_norm:
            raise ValueError(
                "norm_before_fc=True and fc_norm=True: auxiliary hidden states are normalised only once. Correct the "
                "draft's config.json, or use another draft."
            )
