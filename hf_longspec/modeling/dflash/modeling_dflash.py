"""DFlashDraftModel: a few layers on states of the target's layers fill in a block of tokens in one forward."""

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Self

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import LlamaMLP, apply_rotary_pos_emb

from ...generation.target import TargetView
from ...generation.target_modules import rotated
from ..configuration_base import text_config
from ..settings import Setting
from ..shared.aux_hidden_states import Attend, Attention, AuxConfig, AuxDraftModel, Rotary, default_layer_ids
from .generation_dflash import DFlashDrafter

MARKOV_HEADS = ("vanilla", "gated", "rnn")


class DFlashConfig(AuxConfig):
    """Configuration of [`DFlashDraftModel`].

    Layers whose entry in `layer_windows` is a number w see the last entries only. The slot at position q sees those
    after q - w, or if `block_window` is true, all slots see what the position before the block sees.
    """

    model_type = "longspec_dflash"
    sizes: ClassVar[dict[str, tuple[int, int]]] = AuxConfig.sizes | {
        "block_size": (1, 2**10),
        "markov_rank": (0, 2**14),
        "selector_rank": (0, 2**14),
        "conv_kernel_size": (0, 2**6),
        "conv_group_size": (1, 2**17),
        "selector_top_k": (1, 2**14),
        "training_blocks": (1, 2**16),
    }

    block_size: int = 8  # number of slots of a block: the last emitted token and masks
    # Whether slot 0, that of the last emitted token, predicts the token after it. Otherwise the other slots predict the
    # token at their own position, and slot 0 nothing.
    sample_from_anchor: bool = False
    block_window: bool = False  # whether the windows of the entries stay with the block
    causal_windows: bool = False  # whether slots of layers with a window see only earlier slots
    causal: bool | None = None  # whether slots of all layers do, in place of `causal_windows`
    attention_sink_bias: bool = False  # whether heads have a learned logit that enters the softmax denominator
    markov_rank: int = 0  # rank of the head that corrects a slot's logits by the token before it (DSpark); 0 without
    markov_head_type: str = "vanilla"  # or "gated" or "rnn"
    # "hidden" or "markov" for a head that says how likely a slot's token is accepted, from the slot's state or also
    # from the token before it. It is read from checkpoints and trained; drafting does not use it.
    confidence_head: str | None = None
    conv_kernel_size: int = 0  # taps of the convolutions inside a block (DFlash2); 0 without
    conv_group_size: int = 16  # features that share a kernel
    selector_rank: int = 0  # rank of the scores of pairs of neighbouring tokens (DFlash2); 0 without
    selector_top_k: int = 16  # candidates of a slot that are scored
    training_blocks: int = 64  # number of blocks of a row in training
    qk_norm: bool = True

    @classmethod
    def from_target(cls, target: PreTrainedModel | PreTrainedConfig, **overrides: Any) -> Self:
        """Return the configuration of a draft of the target's width; its mask is the last row of the embedding."""
        text = text_config(target)
        layers = [min(layer, text.num_hidden_layers - 1) for layer in default_layer_ids(text.num_hidden_layers)]
        values = {"mask_token_id": text.vocab_size - 1, "target_layer_ids": layers}
        return super().from_target(target, **(values | overrides))

    @property
    def first_slot(self) -> int:
        """The first slot that predicts a token."""
        return 0 if self.sample_from_anchor else 1

    @property
    def num_drafted(self) -> int:
        return self.block_size - self.first_slot

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.num_drafted < 1:
            yield f"block_size={self.block_size}: expected at least {self.first_slot + 1}, as slot 0 drafts nothing"
        if self.vocab_size and self.mask_token_id is None:
            yield "mask_token_id is missing: expected the token of the slots that are filled in"
        if self.markov_head_type not in MARKOV_HEADS:
            yield f"markov_head_type={self.markov_head_type!r}: expected one of {', '.join(MARKOV_HEADS)}"
        if self.markov_rank and self.markov_head_type == "rnn" and not self.sample_from_anchor:
            yield "markov_head_type='rnn' with sample_from_anchor=False: no published draft defines its first state"
        if self.confidence_head not in (None, "hidden", "markov"):
            yield f"confidence_head={self.confidence_head!r}: expected 'hidden' or 'markov'"
        if self.confidence_head == "markov" and not self.markov_rank:
            yield "confidence_head='markov' with markov_rank=0: expected a Markov head"
        if self.conv_kernel_size and self.hidden_size % max(1, self.conv_group_size):
            yield f"conv_group_size={self.conv_group_size}: expected a divisor of hidden_size={self.hidden_size}"
        if self.selector_rank and (size := self.draft_vocab_size):
            yield f"selector_rank={self.selector_rank} with draft_vocab_size={size}: expected all of the vocabulary"


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


class DFlashDraftModel(AuxDraftModel):
    """A draft that fills in a block: the last emitted token and masks, whose slots see one another and the entries.

    An entry is a projection of the target's residual stream at several layers, which gives each layer a key and a value
    that depend on this entry alone. So a window over the last entries is exact for any number of layers.

    DSpark adds a head that corrects the logits of a slot by the token before it, and DFlash2 one that scores pairs of
    neighbouring tokens, and convolutions inside the block.

    ```python
    draft = DFlashDraftModel.from_pretrained("z-lab/Qwen3-4B-DFlash-b16", target=target)
    target.generate(**inputs, assistant_model=draft)
    ```

    Source: DFlash, https://huggingface.co/papers/2602.06036.
    """

    config_class = DFlashConfig
    drafter_class = DFlashDrafter
    _no_split_modules = ["DFlashLayer"]
    settings: ClassVar[dict[str, Any]] = {
        "num_tree_nodes": Setting(
            None,
            "Number of nodes of a tree of the most probable paths, root included. `None` drafts a chain of all slots.",
            int,
            least=2,
        ),
        "causal": Setting(
            None, "Whether the slots of a block see only earlier slots, in place of what config.json says.", bool
        ),
    }

    def __init__(self, config: DFlashConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        width = config.num_aux_hidden_states * config.target_hidden_size
        self.fc = nn.Linear(width, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DFlashLayer(config, index) for index in range(config.num_hidden_layers))
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.confidence_head else None
        self.candidate_selector = CandidateSelector(config) if config.selector_rank else None
        self.add_ends(config)

    def forward(
        self,
        aux_hidden_states: torch.Tensor,
        tokens: torch.LongTensor,
        anchors: torch.LongTensor,
        target: Any = None,
        window: int | None = None,
        sinks: int = 0,
        score: Callable[[torch.Tensor], Any] | None = None,
    ) -> Any:
        """Return the states of blocks at several places of whole texts, each after the entries before it.

        Args:
            aux_hidden_states (`torch.Tensor` of shape `(B, T, num_aux_hidden_states * target_hidden_size)`): Inputs of
                the target's layers `target_layer_ids` at the T first positions, joined.
            tokens (`torch.LongTensor` of shape `(B, L)`): Tokens of the texts.
            anchors (`torch.LongTensor` of shape `(B, A)`): Positions of the blocks' first slots, at most T.
            target (`PreTrainedModel`, *optional*): The target, for drafts without an embedding of their own.
            window (`int`, *optional*): Number of last entries that blocks attend to, in layers that were not trained
                with a window of their own. All by default.
            sinks (`int`, *optional*, defaults to 0): First entries that they attend to in addition to the window.
            score (`Callable`, *optional*): Function of the states, for training.

        Returns:
            `torch.Tensor` of shape `(B, A, block_size, hidden)`: Normalised states of the slots, from which logits are
            computed, or the result of `score`.
        """
        rotary, context = self.rotary_embedding(tokens.device), self.context(aux_hidden_states.to(self.dtype))
        context_angles = rotary(context, torch.arange(context.shape[1], device=tokens.device)[None])
        states = self.embed_block(tokens.gather(1, anchors).flatten(), target)
        angles = rotary(states, self.block_positions(anchors.flatten()))

        def entries(index: int) -> tuple[torch.Tensor, torch.Tensor]:
            return self.layers[index].entries(context, context_angles)  # type: ignore[operator]

        states = self.run(states, angles, BlockAttention(self, anchors, entries, (window, sinks)))
        states = states.unflatten(0, anchors.shape)
        return states if score is None else score(states)

    def context(self, aux_hidden_states: torch.Tensor) -> torch.Tensor:
        """Project auxiliary hidden states `(B, T, layers * hidden)` to what all layers read, `(B, T, hidden)`."""
        return self.hidden_norm(self.fc(aux_hidden_states))

    def embed_block(self, roots: torch.Tensor, target: PreTrainedModel | None = None) -> torch.Tensor:
        """Return embeddings `(N, S, hidden)` of blocks, which consist of a token `(N,)` and masks."""
        masks = roots.new_full((len(roots), self.config.block_size - 1), self.config.mask_token_id)
        return self.embed(torch.cat([roots[:, None], masks], 1), target)

    def block_positions(self, anchors: torch.Tensor) -> torch.Tensor:
        """Return the positions `(N, S)` of the slots of blocks at `anchors` `(N,)`."""
        return anchors[:, None] + torch.arange(self.config.block_size, device=anchors.device)

    def slot_mask(self, index: int, device: torch.device) -> torch.Tensor:
        """Return which slots a slot sees in a layer, `(S, S)`: all or those near it, maybe no later ones."""
        config, causal = self.config, self.effective("causal")
        window, slots = config.window_of_layers[index], torch.arange(config.block_size, device=device)
        distance = slots[:, None] - slots
        seen = distance.abs() < (config.block_size if window is None or config.block_window else window)
        if causal is None:
            causal = window is not None and config.causal_windows
        return seen & (distance >= 0) if causal else seen

    def query_positions(self, index: int, anchors: torch.Tensor) -> torch.Tensor:
        """Return the positions `(..., S)` by which a layer's window is measured, of blocks at `anchors` `(...)`.

        They are those of the slots in layers whose windows move with them, and else that of the last entry.
        """
        slots = torch.arange(self.config.block_size, device=anchors.device)
        if self.config.window_of_layers[index] is None or self.config.block_window:
            return anchors[..., None] - 1 + 0 * slots
        return anchors[..., None] + slots

    def run(self, states: torch.Tensor, angles: Rotary, attend: Attend) -> torch.Tensor:
        """Run the layers over blocks.

        Args:
            states (`torch.Tensor` of shape `(N, S, hidden)`): Embeddings of N blocks of S slots.
            angles (`tuple[torch.Tensor, torch.Tensor]`): Cosines and sines of their positions.
            attend (`Callable`): Attention of a layer, from its index, query `(N, H, S, D)`, key and value
                `(N, K, S, D)` of the slots to `(N, H, S, D)`. It adds the entries.

        Returns:
            `torch.Tensor` of shape `(N, S, hidden)`: Normalised states, from which logits are computed.
        """
        for layer in self.layers:
            states = layer(states, angles, attend)
        return self.norm(states)

    def first_memory(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the state `(..., rank)` of the Markov head before the first slot, after tokens `(...)`."""
        return self.norm.weight.new_zeros(*tokens.shape, self.config.markov_rank)

    def next_logits(
        self, logits: torch.Tensor, hidden: torch.Tensor, tokens: torch.Tensor, memory: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits of a slot after the token before it, and the state of the Markov head.

        Args:
            logits (`torch.Tensor` of shape `(B, 1 or n, draft vocabulary)`): Logits of the slot.
            hidden (`torch.Tensor` of shape `(B, 1 or n, hidden)`): Its state.
            tokens (`torch.LongTensor` of shape `(B, n)`): Tokens before it.
            memory (`torch.Tensor` of shape `(B, n, rank)`): State of the Markov head after the slot before.
        """
        if self.markov_head is not None:
            features, memory = self.markov_head(hidden.expand(-1, tokens.shape[1], -1), tokens, memory)
            correction = self.markov_head.markov_w2(features)
            logits = logits.to(correction.device) + correction
        if self.candidate_selector is not None:
            logits = self.candidate_selector(logits.to(hidden.device), hidden, tokens)
        return logits, memory

    def confidence_logits(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits `(...)` of the chance that the token of a slot is accepted.

        Args:
            hidden (`torch.Tensor` of shape `(..., hidden)`): State of the slot.
            tokens (`torch.LongTensor` of shape `(...)`): The token before it.
        """
        assert self.confidence_head is not None
        if self.config.confidence_head == "markov":
            assert self.markov_head is not None
            hidden = torch.cat([hidden, self.markov_head.markov_w1(tokens)], -1)
        return self.confidence_head.proj(hidden)[..., 0]

    @property
    def tree_shape(self) -> tuple[list[int], int]:
        """Widths of the levels of a tree, and how many of its nodes are verified, root included.

        A level has as many nodes as the best paths can have there, of which each has its beginnings among them.
        """
        slots, nodes = self.config.num_drafted, self.setting("num_tree_nodes")
        if nodes is None:
            return [1] * slots, 1 + slots
        return [nodes - depth for depth in range(1, min(slots, nodes - 1) + 1)], nodes

    def max_nodes(self, target: TargetView) -> int:
        return self.tree_shape[1]

    def check_settings(self, target: TargetView) -> None:
        """Refuse targets of other sizes, layers that do not exist, and the target's final state."""
        super().check_settings(target)
        if (last := max(self.layers_of(target.config))) >= target.num_layers:
            raise ValueError(
                f"target_layer_ids has {last}, the final state of a target of {target.num_layers} layers: projects "
                "disagree whether a draft reads it before or after the final norm. Use a draft of inner layers."
            )


class BlockAttention:
    """Attention of blocks at several anchors of whole texts, each to the entries before its anchor and to itself.

    Args:
        draft ([`DFlashDraftModel`]): The draft.
        anchors (`torch.LongTensor` of shape `(B, A)`): Positions of the first slots.
        entries (`Callable`): Function of the index of a layer to keys and values `(B, K, T, D)` of the entries.
        span (`tuple[int | None, int]`): Window and sinks of the layers that were trained without a window.
    """

    def __init__(
        self,
        draft: Any,
        anchors: torch.Tensor,
        entries: Callable[[int], tuple[torch.Tensor, torch.Tensor]],
        span: tuple[int | None, int],
    ):
        self.draft, self.anchors, self.entries, self.span = draft, anchors, entries, span

    def __call__(self, index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return the attention output `(B * A, H, S, D)` in a layer."""
        (rows, blocks), groups = self.anchors.shape, query.shape[1] // key.shape[1]
        key, value, entry_key, entry_value = (
            part.repeat_interleave(groups, 1) for part in (key, value, *self.entries(index))
        )
        entries, apart = self._entries(index, entry_key.shape[2]), query.unflatten(0, (rows, blocks))
        scores = torch.einsum("bahsd,bhtd->bahst", apart, entry_key).flatten(0, 1)
        scores = scores.masked_fill(~entries.flatten(0, 1)[:, None], -torch.inf)
        own = self.draft.slot_mask(index, query.device)
        own_scores = (query @ key.transpose(2, 3)).masked_fill(~own, -torch.inf)
        scores = torch.cat([scores, own_scores], -1).float().mul(query.shape[-1] ** -0.5)
        if (sinks := self.draft.layers[index].self_attn.attention_sink_bias) is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(len(scores), -1, scores.shape[2], 1)], -1)
        weights, length = scores.softmax(-1).to(query.dtype), entry_key.shape[2]
        of_entries, of_slots = weights[..., :length], weights[..., length : length + key.shape[2]]
        of_entries = of_entries.unflatten(0, (rows, blocks))
        return torch.einsum("bahst,bhtd->bahsd", of_entries, entry_value).flatten(0, 1) + of_slots @ value

    def _entries(self, index: int, length: int) -> torch.Tensor:
        """Return which entries the slots see, `(B, A, S, T)`."""
        own = self.draft.config.window_of_layers[index]
        window, sinks = self.span if own is None else (own, 0)
        entries = torch.arange(length, device=self.anchors.device)
        mask = (entries < self.anchors[..., None])[:, :, None]
        if window is not None:
            near = entries > self.draft.query_positions(index, self.anchors)[..., None] - window
            mask = mask & (near | (entries < sinks))
        return mask
