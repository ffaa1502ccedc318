"""LongSpecDraftModel: one block with a windowed self-attention and a cross-attention to the target's cache."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

from ...generation.target import TargetView
from ...generation.target_modules import TargetParts, attention_of, decoder_of, last_full_layer, shape_of
from ..configuration_base import text_config
from ..settings import WIDTHS, Setting
from ..shared.aux_hidden_states import Rotary
from ..shared.vocabulary import VocabularyConfig, VocabularyDraftModel
from .generation_longspec import LongSpecDrafter
from .initialization_longspec import copy_layers, has_biases


class LongSpecConfig(VocabularyConfig):
    """Configuration of [`LongSpecDraftModel`]: shape of its one block, and the target layer that it reads."""

    model_type = "longspec"
    sizes: ClassVar[dict[str, tuple[int, int]]] = VocabularyConfig.sizes | {
        "window": (0, 2**20),
        "kv_layer": (0, 2**12),
        "noise_range": (0, 2**12),
    }

    hidden_size: int = 0  # width of the target's embeddings
    intermediate_size: int = 0  # width of the SwiGLU
    num_attention_heads: int = 1  # number of query heads of both attentions
    num_key_value_heads: int = 1  # number of key/value heads, equal to the target's
    head_dim: int = 0  # size of a head, equal to the target's
    hidden_act: str = "silu"  # activation of the SwiGLU
    rms_norm_eps: float = 1e-6  # epsilon of the three norms
    initializer_range: float = 0.02  # standard deviation of the initial weights
    qkv_bias: bool = False  # whether the query, key and value projections have a bias, as in the authors' checkpoints
    init_from_target: bool = False  # whether the first weights of the block are copied from layers of the target
    window: int = 512  # number of positions that a self-attention query attends to, its own included
    kv_layer: int = 0  # index of the target's layer whose keys and values are read
    # whether the draft attends to the target's cache. Otherwise it attends to its window only.
    cross_attention: bool = True
    # smallest and largest gap between a query and its newest visible target key in training. Drafting at depth d has
    # gap d + 1, so the second number is the depth of the tree.
    noise_range: list[int] | tuple[int, ...] = (1, 5)
    trained_max_length: int | None = None  # largest position in training

    @classmethod
    def from_target(cls, target: PreTrainedModel | PreTrainedConfig, **overrides: Any) -> Self:
        text = text_config(target)
        kv_layer = overrides.get("kv_layer", last_full_layer(text))
        # shapes of the layer that is read, if layers differ
        layer = text.per_layer_config[kv_layer] if kv_layer in range(text.num_hidden_layers) else text
        values = {
            "hidden_size": text.hidden_size,
            "intermediate_size": _intermediate_size(layer, kv_layer),
            "num_attention_heads": layer.num_attention_heads,
            "num_key_value_heads": getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads,
            "head_dim": getattr(layer, "head_dim", None) or text.hidden_size // layer.num_attention_heads,
            "hidden_act": getattr(text, "hidden_act", None) or getattr(text, "hidden_activation", None) or "silu",
            "rms_norm_eps": getattr(text, "rms_norm_eps", None) or cls.rms_norm_eps,
            "kv_layer": kv_layer,
        }
        return super().from_target(target, **(values | overrides))

    @classmethod
    def describe(cls, target: PreTrainedModel | PreTrainedConfig) -> dict[str, Any]:
        text = text_config(target)
        rotary = getattr(text, "rope_parameters", None)
        head_dim = shape_of(text, "head_dim") or text.hidden_size // text.num_attention_heads
        return super().describe(target) | {"head_dim": head_dim, "rope_parameters": rotary}


def _intermediate_size(layer: Any, index: int) -> int:
    """Return the width of a target's feed-forward layer, or the usual one of a gated layer if it has experts only."""
    size = getattr(layer, "intermediate_size", None) or 8 * layer.hidden_size // 3  # arXiv:2002.05202, section 3.2
    return int(size[index] if isinstance(size, list | tuple) else size)


class LongSpecDraftModel(VocabularyDraftModel):
    """A one-block draft whose own state does not grow with the context.

    Its self-attention covers a ring of the last `window` tokens, and its cross-attention the whole prefix in the
    target's cache. Embedding, head and rotary embedding are the target's and not part of the draft.

    ```python
    draft = LongSpecDraftModel.from_target(target)            # untrained: see hf_longspec.training
    target.generate(**inputs, assistant_model=draft)
    ```

    Source: https://huggingface.co/papers/2502.17421.
    """

    config_class = LongSpecConfig
    drafter_class = LongSpecDrafter
    sized_by_vocabulary = False
    _no_split_modules = ["LongSpecBlock"]
    settings: ClassVar[dict[str, Any]] = {
        "tree_widths": WIDTHS,
        "cross_attention_window": Setting(
            None,
            "Number of last entries of the target's cache that are read, besides the first four. `None` reads all.",
            int,
        ),
    }

    def __init__(self, config: LongSpecConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        self.block = LongSpecBlock(config)
        self.add_vocabulary(config)
        self.post_init()

    @classmethod
    def check_structure(cls, target: PreTrainedModel) -> None:
        decoder_of(target)

    @classmethod
    def from_target(cls, target: PreTrainedModel, **overrides: Any) -> Self:
        """Return an untrained draft, see [`DraftModel.from_target`].

        With `init_from_target=True`, the block begins with weights of the target, see [`copy_layers`], and not with
        random ones. Then it learns faster. Its projections have a bias if the target's have one.
        """
        copies = bool(overrides.get("init_from_target"))
        if copies and has_biases(target):
            overrides = {"qkv_bias": True} | overrides
        draft = super().from_target(target, **overrides)
        if copies:
            copy_layers(draft.block, target, draft.config.kv_layer)
        return draft

    def place(self, target: PreTrainedModel) -> tuple[torch.device, torch.dtype]:
        """Return device and dtype of the target's layer that is read."""
        return TargetParts(target, self.config.kv_layer).place

    def forward(
        self,
        input_ids: torch.LongTensor,
        position_ids: torch.LongTensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        gaps: list[int],
        parts: TargetParts,
    ) -> torch.Tensor:
        """Return the input `(B, L, hidden)` of the target's head on whole texts, for training.

        Keys and values `(B, K, L, D)` are those of the target's KV layer for these tokens, and gaps the distances, at
        least 1, of each row's queries to their newest visible key. The first `gaps[b]` places of a row attend to no
        key of the target and must not contribute to the loss.
        """
        hidden = parts.embed(input_ids).to(self.block.input_layernorm.weight.dtype)
        rotary = parts.rotary(position_ids, hidden)

        def attend_self(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return windowed_attention(query, key, value, self.config.window)

        def attend_target(query: torch.Tensor) -> torch.Tensor:
            return shifted_attention(query, keys.to(query.dtype), values.to(query.dtype), gaps)

        return self.block(hidden, rotary, parts, attend_self, attend_target)

    def check_settings(self, target: TargetView) -> None:
        """Refuse MLA targets, a KV layer that does not exist, and trees that are deeper than the window."""
        if target.has_latent_cache:
            raise ValueError(
                "this target caches one latent for all heads (MLA), to which a LongSpec draft cannot attend. Use "
                "SpecAttnDraftModel."
            )
        decoder = decoder_of(target.model)
        if not 0 <= self.config.kv_layer < target.num_layers:
            raise ValueError(f"kv_layer={self.config.kv_layer}: the target has layers 0 to {target.num_layers - 1}.")
        attention_of(decoder, self.config.kv_layer)
        widths, room = self.setting("tree_widths"), self.config.window - 2
        if room < len(widths):
            raise ValueError(f"tree_widths has {len(widths)} levels, but window={room + 2} allows at most {room}.")
        heads = self.config.num_key_value_heads
        if target.ranks is not None and heads % target.ranks.size:
            raise ValueError(
                f"the target's {heads} key/value heads cannot be divided evenly among {target.ranks.size} ranks, as a "
                "LongSpec draft requires. Use fewer ranks, or SpecAttnDraftModel."
            )
        layer = target.config.per_layer_config[self.config.kv_layer]
        if (size := getattr(layer, "v_head_dim", None)) not in (None, self.config.head_dim):
            raise ValueError(
                f"the target has value heads of size {size} and key heads of size {self.config.head_dim}, but all "
                "heads of a LongSpec draft have the same size. Use SpecAttnDraftModel."
            )


class LongSpecBlock(GradientCheckpointingLayer):
    """The block: self-attention, cross-attention and SwiGLU, each after its norm. There is no final norm.

    Attention is computed by functions that are passed in, so that training on whole texts and drafting of a tree share
    one definition.
    """

    def __init__(self, config: LongSpecConfig):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = SelfAttention(config)
        if config.cross_attention:
            self.post_self_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
            self.cross_attn: CrossAttention | None = CrossAttention(config)
        else:
            self.cross_attn = None
        self.post_cross_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = Qwen2MLP(config)

    def forward(
        self,
        hidden: torch.Tensor,
        rotary: Rotary,
        parts: TargetParts,
        attend_self: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
        attend_target: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Return the hidden states `(B, N, hidden)` of N tokens.

        Attention takes queries `(B, H, N, D)`, that of the draft also keys and values `(B, K, N, D)`.
        """
        normed = self.input_layernorm(hidden)
        key, value = self.self_attn.key_value(normed)
        query, key = parts.rotate(self.self_attn.query(normed), key, *rotary)
        hidden = hidden + self.self_attn.output(attend_self(query, key, value))
        if self.cross_attn is not None:
            query = self.cross_attn.query(self.post_self_attention_layernorm(hidden))
            hidden = hidden + self.cross_attn.output(attend_target(parts.rotate_query(query, *rotary)))
        return hidden + self.mlp(self.post_cross_attention_layernorm(hidden))

    def keys(self, hidden: torch.Tensor, rotary: Rotary, parts: TargetParts) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values `(B, K, N, D)` of embeddings, which depend on token and position only."""
        key, value = self.self_attn.key_value(self.input_layernorm(hidden))
        return parts.rotate(key[:, :0], key, *rotary)[1], value


class CrossAttention(nn.Module):
    """Query and output projection of an attention to the keys and values of the target."""

    def __init__(self, config: LongSpecConfig):
        super().__init__()
        self.head_dim = config.head_dim
        width = config.num_attention_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=config.qkv_bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)

    def query(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return queries `(B, H, N, D)`, not rotated."""
        return self._split(self.q_proj(hidden))

    def output(self, attended: torch.Tensor) -> torch.Tensor:
        """Project attention output `(B, H, N, D)` to `(B, N, hidden)`."""
        return self.o_proj(attended.transpose(1, 2).flatten(2))

    def _split(self, projected: torch.Tensor) -> torch.Tensor:
        return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class SelfAttention(CrossAttention):
    """Projections of an attention with its own keys and values."""

    def __init__(self, config: LongSpecConfig):
        super().__init__(config)
        width = config.num_key_value_heads * config.head_dim
        self.k_proj = nn.Linear(config.hidden_size, width, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, width, bias=config.qkv_bias)

    def key_value(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys, not rotated, and values, `(B, K, N, D)`."""
        return self._split(self.k_proj(hidden)), self._split(self.v_proj(hidden))


def windowed_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int) -> torch.Tensor:
    """Compute causal attention in which each position sees the last `window` positions, its own included.

    The text is cut into blocks of `window` positions. A block sees itself and the previous block, so memory and time
    grow with the length, not with its square.
    """
    length = query.shape[2]
    if length <= window:
        return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    blocks = -(-length // window)
    padding = blocks * window - length
    query, key, value = (pad(states, (0, 0, 0, padding)) for states in (query, key, value))
    key_blocks, value_blocks = (_blocks(states, window) for states in (key, value))
    # each block after its predecessor; that of a text's first block is wrong and hidden
    keys, values = (torch.cat([states.roll(1, 0), states], dim=2) for states in (key_blocks, value_blocks))
    position = torch.arange(window, device=query.device)[:, None] + window
    key_position = torch.arange(2 * window, device=query.device)
    mask = ((key_position <= position) & (key_position > position - window)).repeat(
        blocks, 1, 1
    )  # [blocks, window, 2 * window]
    mask[0, :, :window] = False
    mask = mask[:, None].repeat(query.shape[0], 1, 1, 1)
    out = scaled_dot_product_attention(_blocks(query, window), keys, values, attn_mask=mask, enable_gqa=True)
    out = out.unflatten(0, (-1, blocks)).transpose(1, 2).flatten(2, 3)
    return out[:, :, :length]


def shifted_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, gaps: Sequence[int]) -> torch.Tensor:
    """Compute attention in which the query at position t of row b sees the keys at positions up to `t - gaps[b]`.

    This is Flash Noisy Training (LongSpec, https://huggingface.co/papers/2502.17421, section 3.2). Without the
    first queries, which get zeros, and the last keys it is ordinary causal attention, which any flash kernel computes.
    """
    length, rows = query.shape[2], []
    for row, gap in enumerate(gaps):
        gap = min(gap, length)
        one = slice(row, row + 1)
        shifted = scaled_dot_product_attention(
            query[one, :, gap:],
            key[one, :, : length - gap],
            value[one, :, : length - gap],
            is_causal=True,
            enable_gqa=True,
        )
        rows.append(pad(shifted, (0, 0, gap, 0)))
    return torch.cat(rows)


def _blocks(states: torch.Tensor, size: int) -> torch.Tensor:
    """Reshape `(B, H, L, D)` to `(B * L / size, H, size, D)`."""
    return states.unflatten(2, (-1, size)).transpose(1, 2).flatten(0, 1)
