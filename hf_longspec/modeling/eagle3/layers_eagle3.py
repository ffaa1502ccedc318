"""The layers of an EAGLE-3 draft."""

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import LlamaMLP, apply_rotary_pos_emb

from ..shared.aux_layers import Attend, Attention, Rotary
from .configuration_eagle3 import Eagle3Config


class Eagle3Layer(GradientCheckpointingLayer):
    """One layer: attention and SwiGLU. The first one attends with the normalised embedding and state concatenated."""

    def __init__(self, config: Eagle3Config, index: int):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.index = index
        self.norm_before_residual = config.norm_before_residual
        if index == 0:
            self.hidden_norm = nn.RMSNorm(size, eps=eps)
        self.input_layernorm = nn.RMSNorm(size, eps=eps)
        self.self_attn = Attention(config, 2 * size if index == 0 else size)
        self.post_attention_layernorm = nn.RMSNorm(size, eps=eps)
        self.mlp = LlamaMLP(config)

    def forward(
        self,
        states: torch.Tensor,
        embedded: torch.Tensor | None,
        angles: Rotary,
        attend: Attend,
        query_places: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the residual stream after this layer; see [`Eagle3DraftModel.run`]."""
        residual = states
        if embedded is None:
            normed = self.input_layernorm(states)
        else:
            normed = self.hidden_norm(states)
            residual = normed if self.norm_before_residual else states
            normed = torch.cat([self.input_layernorm(embedded), normed], -1)
        query, key, value = self.self_attn.project(normed)
        query, key = apply_rotary_pos_emb(query, key, *angles)
        if query_places is not None:
            residual = residual.gather(1, query_places[..., None].expand(-1, -1, residual.shape[-1]))
            columns = query_places[:, None, :, None].expand(-1, query.shape[1], -1, query.shape[-1])
            query = query.gather(2, columns)
        states = residual + self.self_attn.output(attend(self.index, query, key, value))
        return states + self.mlp(self.post_attention_layernorm(states))
