"""HiddenPass: what the target's final norm is given, on whole rows."""

import torch
from transformers import PreTrainedModel

from ..generation.cache import SpeculativeCache
from ..generation.final_norm import FinalNormInput


class HiddenPass:
    """Runs the frozen target over whole rows at the positions 0, 1, 2, ..., without its head.

    Args:
        target (`PreTrainedModel`): The target.
        chunk_size (`int`, *optional*): Tokens per forward; by default all at once. Between chunks the cache of every
            layer exists; without chunks there is none.
    """

    def __init__(self, target: PreTrainedModel, chunk_size: int | None = None):
        self.target = target
        self.config = target.config.get_text_config(decoder=True)
        self.chunk_size = chunk_size

    @torch.no_grad()
    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        """`(B, L, hidden)` for `input_ids` `(B, L)`, padded on the right if at all."""
        length, decoder = input_ids.shape[1], self.target.get_decoder()
        with FinalNormInput(self.target) as caught:
            if self.chunk_size is None or self.chunk_size >= length:
                decoder(input_ids=input_ids, use_cache=False)
                return caught.hidden
            cache = SpeculativeCache(self.config, len(input_ids), length, tree_slots=1)
            places = torch.arange(length, device=input_ids.device)
            hidden = []
            for chunk in places.split(self.chunk_size):
                positions = chunk.expand(len(input_ids), -1)
                decoder(input_ids=input_ids[:, chunk], position_ids=positions, past_key_values=cache, use_cache=True)
                hidden.append(caught.hidden)
        return torch.cat(hidden, 1)
