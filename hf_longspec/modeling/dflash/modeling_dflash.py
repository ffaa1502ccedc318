"""DFlashDraftModel: a few layers on states of the target's layers fill in a block of tokens in one forward."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel

from ...generation.target import TargetView
from ..settings import Setting
from ..shared.aux_hidden_states import AuxDraftModel
from ..shared.aux_layers import Attend, Rotary
from .configuration_dflash import DFlashConfig
from .generation_dflash import DFlashDrafter
from .layers_dflash import CandidateSelector, ConfidenceHead, DFlashLayer, MarkovHead, query_positions, slot_mask


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
    reads_published = True
    _no_split_modules = ["DFlashLayer"]
    settings: ClassVar[dict[str, Any]] = {
        "num_tree_nodes": Setting(
            None,
            "Number of nodes of a tree of the most probable paths, root included; None drafts a chain of all slots.",
            int,
            least=2,
        ),
        "confidence_threshold": Setting(
            None,
            "A token is not drafted if the product of the confidences up to it is below this; None drafts all.",
            float,
            most=1,
        ),
        "causal": Setting(None, "As the field of the config, which it replaces.", bool),
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
        """Refuse targets of other sizes, layers that do not exist, the target's final state, and unknown confidence."""
        super().check_settings(target)
        if (threshold := self.setting("confidence_threshold")) is not None and self.confidence_head is None:
            raise ValueError(
                f"confidence_threshold={threshold}: this draft has no confidence head. Set it to None, or use a draft "
                "of DSpark."
            )
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
        window, causal = self.draft.config.window_of_layers[index], self.draft.effective("causal")
        own = slot_mask(self.draft.config, window, query.device, causal)
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
            near = entries > query_positions(self.draft.config, own, self.anchors)[..., None] - window
            mask = mask & (near | (entries < sinks))
        return mask
