"""The layers of an EAGLE-3 draft, and the attention of chained steps over whole texts."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import LlamaMLP, apply_rotary_pos_emb

from .configuration_eagle3 import Eagle3Config

Rotary = tuple[torch.Tensor, torch.Tensor]
T = TypeVar("T")
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Eagle3Layer(GradientCheckpointingLayer):
    """One layer: attention and SwiGLU. The first one attends with normalised embedding and state beside each other."""

    def __init__(self, config: Eagle3Config, index: int):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.index = index
        self.norm_before_residual = config.norm_before_residual
        if index == 0:
            self.hidden_norm = nn.RMSNorm(size, eps=eps)
        self.input_layernorm = nn.RMSNorm(size, eps=eps)
        self.self_attn = Eagle3Attention(config, 2 * size if index == 0 else size)
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


class Eagle3Attention(nn.Module):
    """Projections of an attention."""

    def __init__(self, config: Eagle3Config, width: int):
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
        projected: torch.Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return projected


def up_to(step: int, kept: list[T], new: T) -> list[T]:
    """Return what was kept of the steps before, and this step's, which is kept the first time."""
    if len(kept) == step:
        kept.append(new)
    return [*kept[:step], new]


class ChainedAttention:
    """Attention of chained steps over whole texts.

    Place p of step s attends to the entries of the text up to p, and to its own entries of the steps 1 to s. This is
    the training-time test of EAGLE-3, https://huggingface.co/papers/2503.01840, section 3.2.

    A step of a layer may run again for its gradient (activation checkpointing), and then attends to the same.

    Args:
        spans (`Sequence[tuple[int | None, int, bool]]`): Window and sinks of each layer, and whether the window moves
            with the steps. Places attend to the last `window` entries up to p, or in step s up to p + s, and to the
            first `sinks` entries. Entry p never leaves a window.
    """

    def __init__(self, spans: Sequence[tuple[int | None, int, bool]]):
        self.spans = spans
        self._keys: list[list[torch.Tensor]] = [[] for _ in spans]
        self._values: list[list[torch.Tensor]] = [[] for _ in spans]

    def __call__(
        self, step: int, index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Return the attention output `(B, H, n, D)` of a step in a layer."""
        count, groups = query.shape[2], query.shape[1] // key.shape[1]
        keys, values = (
            up_to(step, kept[index], part.repeat_interleave(groups, 1))
            for kept, part in ((self._keys, key), (self._values, value))
        )
        mask = self._mask(step, index, count, keys[0].shape[2], query.device)
        scores = (query @ keys[0].transpose(2, 3)).masked_fill(~mask, torch.finfo(query.dtype).min)
        chain_scores = [(query * chained[:, :, :count]).sum(-1, keepdim=True) for chained in keys[1:]]
        scores = torch.cat([scores, *chain_scores], -1).float() * query.shape[-1] ** -0.5
        weights, length = scores.softmax(-1).to(query.dtype), keys[0].shape[2]
        out = weights[..., :length] @ values[0]
        for chained, weight in zip(values[1:], weights[..., length:].unbind(-1), strict=True):
            out = out + weight[..., None] * chained[:, :, :count]
        return out

    def _mask(self, step: int, index: int, count: int, length: int, device: torch.device) -> torch.Tensor:
        places, entries = torch.arange(count, device=device)[:, None], torch.arange(length, device=device)
        mask = entries <= places
        window, sinks, moves = self.spans[index]
        if window is not None:
            ends = places + step if moves else places
            mask = mask & ((entries > ends - window) | (entries < sinks) | (entries == places))
        return mask
