"""The parts of a DFlash draft: layers, convolutions inside a block, heads that know the token before, block attention.

DFlash, https://huggingface.co/papers/2602.06036. The target's entries give every layer further keys and values. They
pass no layer: the same projected states go to all of them.
"""

from collections.abc import Callable

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import LlamaMLP, apply_rotary_pos_emb

from ...generation.target_modules import rotated
from ..shared.aux_layers import Attend, Attention, Rotary
from .configuration_dflash import DFlashConfig


class DFlashLayer(GradientCheckpointingLayer):
    """One layer: attention and SwiGLU, each between two convolutions in DFlash2."""

    def __init__(self, config: DFlashConfig, index: int):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.index = index
        self.input_layernorm = nn.RMSNorm(size, eps=eps)
        self.self_attn = Attention(config, size)
        sinks = nn.Parameter(torch.zeros(config.num_attention_heads)) if config.attention_sink_bias else None
        self.self_attn.register_parameter("attention_sink_bias", sinks)
        self.post_attention_layernorm = nn.RMSNorm(size, eps=eps)
        self.mlp = LlamaMLP(config)
        self.attention_conv = BlockConvolution(config) if config.conv_kernel_size else None
        self.mlp_conv = BlockConvolution(config) if config.conv_kernel_size else None

    def entries(self, context: torch.Tensor, angles: Rotary) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values `(B, K, T, D)` of the target's projected states `(B, T, hidden)`."""
        key, value = self.self_attn.project_entries(context)
        return rotated(apply_rotary_pos_emb, key, key[:, :0], *angles)[0], value

    def forward(self, states: torch.Tensor, angles: Rotary, attend: Attend) -> torch.Tensor:
        """Return the residual stream of the slots after this layer; see [`DFlashDraftModel.run`]."""

        def attended(normed: torch.Tensor) -> torch.Tensor:
            query, key, value = self.self_attn.project(normed)
            query, key = apply_rotary_pos_emb(query, key, *angles)
            return self.self_attn.output(attend(self.index, query, key, value))

        for norm, part, convolution in (
            (self.input_layernorm, attended, self.attention_conv),
            (self.post_attention_layernorm, self.mlp, self.mlp_conv),
        ):
            normed = norm(states)
            states = states + (part(normed) if convolution is None else convolution(normed, part))
        return states


class BlockConvolution(nn.Module):
    """Convolutions before and after a part of a layer, over a slot and those before it in its block (DFlash2).

    Both kernels are computed from the input of the first. Features in groups share what is added to `base_kernel`.
    """

    def __init__(self, config: DFlashConfig):
        super().__init__()
        size, taps = config.hidden_size, config.conv_kernel_size
        self.group_size = config.conv_group_size
        kernel = torch.zeros(2, taps, size)
        kernel[:, 0] = 1  # a new draft's convolutions change nothing but for the projections
        self.base_kernel = nn.Parameter(kernel)
        self.kernel_projection = nn.Linear(size, 2 * taps * (size // self.group_size), bias=False)

    def forward(self, normed: torch.Tensor, part: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return `part` of `normed` `(N, S, hidden)` between the two convolutions."""
        taps = self.base_kernel.shape[1]
        kernels = self.kernel_projection(normed).unflatten(-1, (2, taps, -1)).repeat_interleave(self.group_size, -1)
        before, after = (kernels + self.base_kernel).unbind(2)
        return _convolved(part(_convolved(normed, before)), after)


def _convolved(states: torch.Tensor, kernels: torch.Tensor) -> torch.Tensor:
    """Return the sum of states `(N, S, hidden)` at slot j - t, times `kernels` `(N, S, taps, hidden)`."""
    slots = states.shape[1]
    shifted = (nn.functional.pad(states, (0, 0, tap, 0))[:, :slots] for tap in range(kernels.shape[2]))
    return torch.stack([kernel * part for kernel, part in zip(kernels.unbind(2), shifted, strict=True)]).sum(0)


class MarkovHead(nn.Module):
    """Features of the token before a slot, which correct the slot's logits (DSpark)."""

    def __init__(self, config: DFlashConfig):
        super().__init__()
        rank, size = config.markov_rank, config.hidden_size
        self.kind = config.markov_head_type
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)  # of the target's ids
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size or config.vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(size + rank, rank)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + size, 3 * rank)

    def forward(
        self, hidden: torch.Tensor, tokens: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return features and the next state `(..., rank)`.

        Args:
            hidden (`torch.Tensor` of shape `(..., hidden)`): State of a slot.
            tokens (`torch.LongTensor` of shape `(...)`): The token before it.
            state (`torch.Tensor` of shape `(..., rank)`): State after the slot before it, for `"rnn"`; zeros at first.
        """
        before = self.markov_w1(tokens)
        if self.kind == "gated":
            return torch.sigmoid(self.gate_proj(torch.cat([hidden, before], -1))) * before, state
        if self.kind == "rnn":
            gate, update, out = self.joint_proj(torch.cat([state, before, hidden], -1)).chunk(3, -1)
            gate = torch.sigmoid(gate)
            return torch.tanh(out), gate * state + (1 - gate) * torch.tanh(update)
        return before, state


class ConfidenceHead(nn.Module):
    """Weights of a head that says how likely a slot's token is accepted (DSpark)."""

    def __init__(self, config: DFlashConfig):
        super().__init__()
        rank = config.markov_rank if config.confidence_head == "markov" else 0
        self.proj = nn.Linear(config.hidden_size + rank, 1)


class CandidateSelector(nn.Module):
    """Scores of the best tokens of a slot by the token before it (DFlash2)."""

    def __init__(self, config: DFlashConfig):
        super().__init__()
        self.top_k = config.selector_top_k
        self.predecessor_codebook = nn.Parameter(torch.zeros(config.vocab_size, config.selector_rank))
        self.successor_codebook = nn.Parameter(torch.zeros(config.vocab_size, config.selector_rank))
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)

    def forward(self, logits: torch.Tensor, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return scores `(B, n, vocab)` of the candidates, and -inf elsewhere.

        Args:
            logits (`torch.Tensor` of shape `(B, 1, vocab)`): Logits of the slot.
            hidden (`torch.Tensor` of shape `(B, 1, hidden)`): State of the slot.
            tokens (`torch.LongTensor` of shape `(B, n)`): Tokens before it.
        """
        best, candidates = logits.topk(min(self.top_k, logits.shape[-1]), dim=-1)
        features = self.predecessor_codebook[tokens] * self.hidden_projection(hidden)
        scores = best + features @ self.successor_codebook[candidates[:, 0]].transpose(1, 2)
        everywhere = logits.new_full((*tokens.shape, logits.shape[-1]), -torch.inf)
        return everywhere.scatter(2, candidates.expand(-1, tokens.shape[1], -1), scores.to(logits.dtype))


def slot_mask(
    config: DFlashConfig, window: int | None, device: torch.device, causal: bool | None = None
) -> torch.Tensor:
    """Return which slots a slot sees in a layer with this window `(S, S)`: all or those near it, maybe no later ones.

    `causal` is the field of the configuration, or the setting in its place.
    """
    slots = torch.arange(config.block_size, device=device)
    distance = slots[:, None] - slots
    seen = distance.abs() < (config.block_size if window is None or config.block_window else window)
    if causal is None:
        causal = window is not None and config.causal_windows
    return seen & (distance >= 0) if causal else seen


def query_positions(config: DFlashConfig, window: int | None, anchors: torch.Tensor) -> torch.Tensor:
    """Return the positions `(..., S)` by which the windows of the entries are measured, of blocks at `anchors` `(...)`.

    They are those of the slots in layers whose windows move with them, and else that of the last entry.
    """
    slots = torch.arange(config.block_size, device=anchors.device)
    if window is None or config.block_window:
        return anchors[..., None] - 1 + 0 * slots
    return anchors[..., None] + slots
