"""MTP layers on whole texts: chained steps for training, and the logits of greedy chains."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from ..families.texts import up_to


def forward_on_texts(
    draft: Any,
    hidden_states: torch.Tensor,
    tokens: torch.Tensor,
    steps: int = 1,
    target: PreTrainedModel | None = None,
    window: int | None = None,
    sinks: int = 0,
    score: Callable[[int, torch.Tensor], Any] | None = None,
) -> list[Any]:
    """Return the logits of chained steps over whole texts, in which every drafted token is that of the text.

    Args:
        hidden_states (`torch.Tensor` of shape `(B, T, hidden)`): Output of the target's final norm at T tokens.
        tokens (`torch.LongTensor` of shape `(B, L)`): The tokens after the first of these, at least T.
        steps (`int`, *optional*, defaults to 1): Number of chained steps, at most that of several layers.
        target (`PreTrainedModel`, *optional*): The target; by default the one that the draft was checked with.
        window (`int`, *optional*): Number of entries of the text that each place attends to. All by default.
        sinks (`int`, *optional*, defaults to 0): First entries that all places attend to in addition to the window.
        score (`Callable`, *optional*): Function of the step and of its outputs `(B, n, hidden)`, for training.

    Returns:
        `list[torch.Tensor]`: For each step s, logits `(B, n, vocab)`, or the result of `score`, of the
        n = min(T, L - s) first entries. Row p follows the entries 0 to p and the tokens p + 1 to p + s.
    """
    parts, results = draft.parts_of(target), []
    states, entries = hidden_states.to(draft.dtype), TextEntries(window, sinks)
    for step in range(steps):
        layer, store = draft.layers[0], partial(entries, step)
        if len(draft.layers) > 1:  # each with its own entries
            layer, store = draft.layers[step], partial(TextEntries(window, sinks), 0)
        after = tokens[:, step : step + states.shape[1]]
        states = states[:, : after.shape[1]]
        positions = (step + torch.arange(after.shape[1], device=after.device)).expand_as(after)
        states = layer(states, parts.embed(after).to(states), positions, parts.rotary(positions, states), store)
        results.append(parts.head(states) if score is None else score(step, states))
    return results


@torch.no_grad()
def chain_logits(
    draft: Any, hidden_states: torch.Tensor, tokens: torch.Tensor, steps: int, target: PreTrainedModel | None = None
) -> list[torch.Tensor]:
    """Return the logits of the entries of a text, and those of a greedy chain after it.

    Args:
        hidden_states (`torch.Tensor` of shape `(B, T, hidden)`): Output of the target's final norm at T tokens.
        tokens (`torch.LongTensor` of shape `(B, T)`): These tokens. State p is joined with token p + 1.
        steps (`int`): Number of chained steps, less than the number of layers if there are several.
        target (`PreTrainedModel`, *optional*): The target; by default the one that the draft was checked with.

    Returns:
        `list[torch.Tensor]`: Logits `(B, T - 1, vocab)` of the entries of the text, then of each chained step
        `(B, 1, vocab)`. Its token is the most likely one of the step before.
    """
    if 1 < len(draft.layers) <= steps:
        raise ValueError(
            f"steps={steps}: this draft has {len(draft.layers)} layers, each of which drafts one token. Pass at "
            f"most {len(draft.layers) - 1}."
        )
    states, tokens = hidden_states[:, :-1], tokens[:, 1:]
    logits: list[torch.Tensor] = draft(states, tokens, target=target)
    for step in range(1, steps + 1):
        tokens = torch.cat([tokens, logits[-1][:, -1:].argmax(-1)], 1)
        logits.append(draft(states, tokens, step + 1, target)[-1][:, -1:])
    return logits


class TextEntries:
    """Keys and values of chained steps over whole texts, in one layer.

    Place p of every step attends to the entries of the text up to p, the last `window` of them and the first `sinks`,
    and to its own entries of later steps. Later steps may have fewer places.
    """

    def __init__(self, window: int | None = None, sinks: int = 0) -> None:
        self._parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._window, self._sinks = window, sinks

    def __call__(
        self, step: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Store a step, and return keys and values of all up to it, with its mask."""
        steps = up_to(step, self._parts, (keys, values))
        count, length = keys.shape[2], steps[0][0].shape[2]
        entries = torch.arange(length, device=keys.device)
        places = entries[:count, None]
        own = [entries[: part.shape[2]] == places for part, _ in steps[1:]]
        seen = entries <= places
        if self._window is not None:
            seen = seen & ((entries > places - self._window) | (entries < self._sinks))
        whole = torch.cat([seen, *own], 1).expand(len(keys), -1, -1)
        return *(torch.cat(parts, 2) for parts in zip(*steps, strict=True)), whole  # type: ignore[return-value]
