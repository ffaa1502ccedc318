"""Configuration of an EAGLE-3 draft."""

from collections.abc import Iterator

from ..shared.aux_hidden_states import AuxConfig


class Eagle3Config(AuxConfig):
    """Configuration of [`Eagle3DraftModel`]. The first layer reads an embedding with each hidden state.

    A P-EAGLE draft is one with a `mask_token_id`.
    """

    model_type = "longspec_eagle3"

    fc_bias: bool = False  # whether the projection of the auxiliary hidden states has a bias
    norm_before_residual: bool = False  # whether the residual of the first layer is the normalised state
    norm_before_fc: bool = False  # whether the auxiliary hidden states are normalised together
    fc_norm: bool = False  # whether each of them is normalised alone
    norm_output: bool = False  # whether the next step reads the normalised state instead of the residual stream
    training_steps: int = 3  # number of chained steps in training; of a P-EAGLE draft, of levels

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.norm_before_fc and self.fc_norm:
            yield "norm_before_fc=True and fc_norm=True: auxiliary hidden states are normalised only once"
