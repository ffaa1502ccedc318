"""The attention of the layers of drafts that read auxiliary hidden states."""

from collections.abc import Callable

import torch
from torch import nn

from .aux_hidden_states import AuxConfig

Rotary = tuple[torch.Tensor, torch.Tensor]
# From the index of a layer, its query, key and value to the attention output.
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Attention(nn.Module):
    """Projections of an attention."""

    def __init__(self, config: AuxConfig, width: int):
        super().__init__()
        self.head_dim, bias = config.head_dim, config.attention_bias
        heads, kv_heads = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = nn.Linear(width, heads, bias=bias)
        self.k_proj = nn.Linear(width, kv_heads, bias=bias)
        self.v_proj = nn.Linear(width, kv_heads, bias=bias)
        self.o_proj = nn.Linear(heads, config.hidden_size, bias=bias)
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)
            self.k_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.qk_norm = config.qk_norm

    def project(self, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries `(B, H, T, D)`, keys and values `(B, K, T, D)`, not rotated."""
        query = self.q_proj(normed).unflatten(-1, (-1, self.head_dim))
        query = self.q_norm(query) if self.qk_norm else query
        return query.transpose(1, 2), *self.project_entries(normed)

    def project_entries(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values `(B, K, T, D)`, not rotated."""
        key, value = (part(states).unflatten(-1, (-1, self.head_dim)) for part in (self.k_proj, self.v_proj))
        key = self.k_norm(key) if self.qk_norm else key
        return key.transpose(1, 2), value.transpose(1, 2)

    def output(self, attended: torch.Tensor) -> torch.Tensor:
        """Project attention output `(B, H, T, D)` to `(B, T, hidden)`."""
        return self.o_proj(attended.transpose(1, 2).flatten(2))
