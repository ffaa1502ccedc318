"""DFlash drafts on whole texts: blocks at several places at once."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..families.texts import ends_of
from .layers_dflash import query_positions, slot_mask


def forward_on_texts(
    draft: Any,
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
    rotary, context = draft.rotary_embedding(tokens.device), draft.context(aux_hidden_states.to(draft.dtype))
    context_angles = rotary(context, torch.arange(context.shape[1], device=tokens.device)[None])
    states = draft.embed_block(tokens.gather(1, anchors).flatten(), target)
    angles = rotary(states, draft.block_positions(anchors.flatten()))

    def entries(index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return draft.layers[index].entries(context, context_angles)

    states = draft.run(states, angles, BlockAttention(draft, anchors, entries, (window, sinks)))
    states = states.unflatten(0, anchors.shape)
    return states if score is None else score(states)


@torch.no_grad()
def draft_logits(
    draft: Any,
    aux_hidden_states: torch.Tensor,
    tokens: torch.LongTensor,
    lengths: Sequence[int],
    embed_tokens: Any = None,
    lm_head: Any = None,
) -> list[torch.Tensor]:
    """Return the logits of the blocks that are drafted after the first entries of whole texts.

    Args:
        aux_hidden_states (`torch.Tensor` of shape `(B, T, num_aux_hidden_states * target_hidden_size)`): Inputs of
            the target's layers `target_layer_ids` at each position, joined.
        tokens (`torch.LongTensor` of shape `(B, T)`): Tokens of the texts.
        lengths (`Sequence[int]`): For each block, how many entries it follows. Its first slot holds the token at
            this position.
        embed_tokens (`torch.Tensor` of shape `(vocab, hidden)` or module, *optional*): The target's embedding, for
            drafts without one of their own.
        lm_head (`torch.Tensor` of shape `(vocab, hidden)` or module, *optional*): The target's head, likewise.

    Returns:
        `list[torch.Tensor]`: For each length, logits `(B, block_size, draft vocabulary)` of all slots: with a
        Markov head those along the chain of the most likely tokens, with a selector those that it chooses from.
    """
    target, window = ends_of(embed_tokens, lm_head), draft.prompt_tokens
    anchors = torch.as_tensor(lengths, device=tokens.device).expand(len(tokens), -1)
    states = draft(aux_hidden_states, tokens, anchors, target, window, draft.setting("sinks"))
    logits, before = draft.logits(states, target), tokens.gather(1, anchors)
    if draft.markov_head is not None:
        memory = draft.first_memory(before)
        for slot in range(draft.config.first_slot, draft.config.block_size):
            row, memory = draft.next_logits(logits[:, :, slot], states[:, :, slot], before, memory)
            logits[:, :, slot] = row
            before = draft.token_ids[row.argmax(-1)]
    return list(logits.unbind(1))


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
