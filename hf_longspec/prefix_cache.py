"""Keys, values and states of earlier texts, so that a prompt is read from the end of their longest common beginning on.

Texts are stored whole, each in tensors of its own. A cache that is lent shares them until it is written to. A recurrent
state cannot be shortened: texts of targets with states are continued where a copy of the states lies.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from .generation.cache import CACHE_NAME, SpeculativeCache
from .generation.target import TargetView

# Names of entries that have a slot for each token end with these; all others are states.
OF_TOKENS = (".keys", ".values")


def continues_as_one_text(model: Any) -> bool:
    """Return whether a text after a cache is that of one call; if not, every prompt is read whole.

    Rotary frequencies that change with the length, indexers, Mamba-1, and a clamp that Mamba-2 layers apply in forwards
    of several tokens alone tell a second turn from a first one.
    """
    target = TargetView(model)
    return target.mode.continues_texts(target) and target.rotary_limit == math.inf


def common_length(one: torch.Tensor, other: torch.Tensor) -> int:
    """Return how many first tokens two texts have in common.

    >>> common_length(torch.tensor([5, 6, 7, 8]), torch.tensor([5, 6, 9]))
    2
    """
    size = min(len(one), len(other))
    return int((one[:size] == other[:size]).long().cumprod(0).sum())


@dataclass(eq=False)  # by identity
class StoredText:
    """Tokens `(T,)` of a text with their keys and values, and the states after some numbers of its tokens."""

    tokens: torch.Tensor
    entries: dict[str, torch.Tensor]
    states: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        parts = [self.entries, *self.states.values()]
        return self.tokens.nbytes + sum(entry.nbytes for part in parts for entry in part.values())


class PrefixCache:
    """Store the caches of texts, and lend the longest beginning of a prompt that one of them has.

    `prefixes.generate(input_ids, ...)` is `model.generate(input_ids, ...)` that reads only what no earlier text has.
    For calls of your own, `take` lends a cache, and `put` stores what a call has left in it. Weights and adapters must
    stay as they are; call `clear` after a change.

    Args:
        model (`PreTrainedModel`): The target.
        max_bytes (`int`): Bound on the memory of all texts. Those that were not used for the longest time are dropped.
        device (`torch.device`, *optional*): Where texts are stored; by default where the model computes them.
    """

    def __init__(self, model: PreTrainedModel, max_bytes: int, device: Any = None):
        self.model, self.max_bytes, self.device = model, max_bytes, device
        self._is_usable = continues_as_one_text(model)
        self._texts: list[StoredText] = []  # the last one was used last
        self._devices: dict[str, torch.device] = {}

    def __len__(self) -> int:
        return len(self._texts)

    @property
    def nbytes(self) -> int:
        """Bytes of all texts."""
        return sum(text.nbytes for text in self._texts)

    def clear(self) -> None:
        """Forget all texts."""
        self._texts = []

    def generate(self, input_ids: torch.Tensor, **options: Any) -> Any:
        """Return the result of `model.generate(input_ids, **options)`, and store its text.

        With `prefill_chunk_size`, recurrent states are stored at the end of every chunk, so that other prompts may
        continue there.

        Args:
            input_ids (`torch.LongTensor` of shape `(1, P)`): One prompt without padding.

        Raises:
            ValueError: If there are several prompts, or inputs beside the tokens.
        """
        mask = options.get("attention_mask")
        others = [name for name, value in options.items() if isinstance(value, torch.Tensor) and value is not mask]
        if others or (mask is not None and not mask.all()):
            names = ", ".join(others) or "padding in attention_mask"
            raise ValueError(f"{names}: a PrefixCache knows texts by their tokens alone. Call model.generate().")
        cache = self.take(input_ids)
        config = options.get("generation_config") or self.model.generation_config
        chunk_size = options.get("prefill_chunk_size") or config.prefill_chunk_size
        states = self.read(input_ids, cache, chunk_size)
        if chunk_size and input_ids.shape[1] - cache.counts[0] <= chunk_size:
            # one chunk, which plain generation before transformers 5.24 would read from the first token on
            options["prefill_chunk_size"] = None
        output = self.model.generate(input_ids, **{CACHE_NAME: cache}, **options)
        self.put(output if isinstance(output, torch.Tensor) else output.sequences, cache, states)
        return output

    def find(self, input_ids: torch.Tensor) -> int:
        """Return the number of tokens that [`PrefixCache.take`] would lend for a prompt `(1, P)`."""
        return self._find(_row(input_ids))[1]

    def take(self, input_ids: torch.Tensor, cache: SpeculativeCache | None = None) -> SpeculativeCache:
        """Return a cache that holds as much of a prompt `(1, P)` as is stored, but for its last token.

        Args:
            cache ([`SpeculativeCache`], *optional*): A cache of one row, which is filled and keeps its buffers. By
                default a new one, which shares what is stored until a call writes to it.
        """
        text, count = self._find(_row(input_ids))
        entries: dict[str, torch.Tensor] = {}
        if text is not None:
            self._texts.remove(text)
            self._texts.append(text)
            entries = {name: entry[:, :, :count] for name, entry in text.entries.items()}
            # a forward of one token may write to states in place
            entries |= {name: state.clone() for name, state in text.states.get(count, {}).items()}
            entries = {name: entry.to(self._devices[name]) for name, entry in entries.items()}
        if cache is None:
            return SpeculativeCache.holding(self.model.config, entries, [count])
        _fill(cache, entries, count)
        return cache

    def read(self, input_ids: torch.Tensor, cache: SpeculativeCache, chunk_size: int | None) -> Any:
        """Read a prompt `(1, P)` up to its last whole chunk if the target has states, and return these, for `put`."""
        states: dict[int, dict[str, torch.Tensor]] = {}
        if not (cache.parts and chunk_size and self._is_usable):
            return states
        start, target = cache.counts[0], TargetView(self.model)
        for end in self.ends(start, input_ids.shape[1], chunk_size):
            with torch.no_grad(), target.lock():
                target.prefill(input_ids[:, start:end].to(self.model.device), cache, None)
            cache.set_lengths([end])
            start, states[end] = end, copied_states(cache)
        return states

    def ends(self, start: int, stop: int, chunk_size: int) -> list[int]:
        """Return the ends of chunks, before the last one, of a text that is read from `start` to `stop`.

        States can be stored there: no chunk is one token, which may follow other rules than several.
        """
        size = max(chunk_size, 2)
        first = start - start % size + size
        return list(range(first + size * (first - start < 2), stop - 1, size)) if self._is_usable else []

    def put(self, sequences: torch.Tensor, cache: SpeculativeCache, states: Any = None) -> None:
        """Store the tokens of `sequences` `(1, T)` that a cache holds, in copies.

        Args:
            states (*optional*): Result of [`PrefixCache.read`].

        Raises:
            ValueError: If the cache is no [`SpeculativeCache`] of one row with a beginning of this text.
        """
        tokens = _row(sequences)
        if not isinstance(cache, SpeculativeCache) or cache.batch_size != 1 or cache.counts[0] > len(tokens):
            raise ValueError(
                f"a {type(cache).__name__} is no cache of these {len(tokens)} tokens that can be stored. Pass the one "
                "that PrefixCache.take has returned, or a SpeculativeCache of one row, and its text."
            )
        tokens, held = tokens[: (length := cache.counts[0])], cache.entries()
        # padding is not in the cache, and images are known by their places alone
        if not self._is_usable or not length or {"padding", "offsets"} & held.keys():
            return
        if sum(entry.nbytes for entry in held.values()) > self.max_bytes:
            return
        self._devices = {name: entry.device for name, entry in held.items()}
        states = dict(states or {})
        if cache.parts:
            states[length] = copied_states(cache)
        states = {count: self._copied(one) for count, one in states.items()}
        text = next((text for text in self._texts if common_length(text.tokens, tokens) == length), None)
        if text is None:
            entries = {name: entry for name, entry in held.items() if name.endswith(OF_TOKENS)}
            text = StoredText(tokens.clone(), self._copied(entries))
            for other in [one for one in self._texts if common_length(one.tokens, tokens) == len(one.tokens)]:
                text.states |= other.states
                self._texts.remove(other)
        else:
            self._texts.remove(text)
        text.states |= states
        self._texts.append(text)
        while self._texts and self.nbytes > self.max_bytes:
            del self._texts[0]

    def _find(self, tokens: torch.Tensor) -> tuple[StoredText | None, int]:
        """Return the text that has the longest beginning of a prompt, and its number of tokens."""
        found: tuple[StoredText | None, int] = None, 0
        for text in self._texts:
            count = common_length(text.tokens, tokens[:-1])
            if text.states:
                count = max((place for place in text.states if place <= count), default=0)
            if count > found[1]:
                found = text, count
        return found

    def _copied(self, entries: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: entry.to(self.device or entry.device, copy=True) for name, entry in entries.items()}


def _fill(cache: SpeculativeCache, entries: dict[str, torch.Tensor], count: int) -> None:
    """Write `entries` of `count` tokens to the buffers of a cache of one row."""
    cache.reset()
    for index, layer in enumerate(cache.key_layers):
        if (keys := entries.get(f"{index}.keys")) is not None:
            values = entries[f"{index}.values"]
            layer.reserve(count)
            if not layer.is_initialized:
                layer.lazy_initialization(keys, values)
            layer.keys[:, :, :count], layer.values[:, :, :count] = keys, values
    for part in cache.parts:
        part.hold(entries)
    cache.set_lengths([count])


def copied_states(cache: SpeculativeCache) -> dict[str, torch.Tensor]:
    """Return copies of the recurrent states of a cache, which [`PrefixCache.put`] stores for its present length."""
    return {name: entry.clone() for name, entry in cache.entries().items() if not name.endswith(OF_TOKENS)}


def _row(tokens: torch.Tensor) -> torch.Tensor:
    """Return the one row of `(1, T)` tokens, on the CPU."""
    if tokens.dim() != 2 or len(tokens) != 1:
        raise ValueError(
            f"input_ids has shape {tuple(tokens.shape)}: a PrefixCache takes one prompt, (1, P), per call."
        )
    return tokens[0].cpu()
