"""Rotary frequencies that depend on the forward, and what the loop does where they change.

Most rotary embeddings rotate a token by its position alone. Two kinds also look at the largest position of a forward
(`dynamic_rope_update` in transformers):

- longrope has two sets of frequencies, and forwards beyond `original_max_position_embeddings` use the second one;
- dynamic NTK computes new frequencies for every new largest position beyond `max_position_embeddings`.

Plain `generate` runs one token of every row per forward, so all rows change at the same forward. A *column* numbers
these forwards: it is the position of a token, plus the number of tokens that the longest prompt has more than the
prompt of its row. The loop keeps to the columns of plain `generate`:

- no tree reaches the column where the frequencies change; plain steps lead up to it;
- rows that have reached it wait for the others;
- then all rows go on together. The cache is kept, or computed anew where the target's `prepare_inputs_for_generation`
  drops it. Beyond the change, longrope speculates again, and dynamic NTK takes plain steps.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from .cache import SpeculativeCache

KEEPS, RECOMPUTES, FORGETS = "keeps", "recomputes", "forgets"


@dataclass(frozen=True)
class FrequencyChange:
    """Where the frequencies of a target change.

    Args:
        column (`int` or `float`): The first column under other frequencies; infinity if they never change.
        is_repeated (`bool`): Whether they change again in every column after it.
    """

    column: float
    is_repeated: bool

    @classmethod
    def of(cls, config: Any) -> "FrequencyChange":
        """That of a target's text config.

        Raises:
            ValueError: If layers change at different columns.
        """
        found = {change for parameters in _parameter_sets(config) if (change := _change_of(parameters, config))}
        if len(found) > 1:
            columns = sorted((change.column, change.is_repeated) for change in found)
            raise ValueError(
                f"the target's rope_parameters change their frequencies at different positions, {columns}, and the "
                "loop follows one change. Call generate() without assistant_model."
            )
        return found.pop() if found else cls(math.inf, False)


def _parameter_sets(config: Any) -> list[dict[str, Any]]:
    """The rope parameters of a config: one set, or one for each layer type that has any."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return nested or [parameters]


def _change_of(parameters: dict[str, Any], config: Any) -> FrequencyChange | None:
    kind = str(parameters.get("rope_type", parameters.get("type", "default")))
    if "dynamic" in kind:
        # One column early: at exactly this length a forward takes what the last one left, and the one before resets it.
        return FrequencyChange(config.max_position_embeddings - 1, True)
    if kind == "longrope" or "long_mscale" in parameters:  # phimoe switches its scale under every rope type
        return FrequencyChange(parameters["original_max_position_embeddings"], False)
    return None


def cache_at(model: PreTrainedModel, column: int) -> str:
    """What plain `generate` does with the cache in the forward of `column`, found by asking the model.

    Returns:
        `"keeps"`, `"recomputes"` (all tokens run again), or `"forgets"`: the cache is dropped and the last token alone
        runs, as phi3 does in transformers 5.17.
    """
    cache = SpeculativeCache(model.config, batch_size=1, max_length=column)
    cache.set_lengths([column])
    tokens = torch.zeros(1, column + 1, dtype=torch.long)
    inputs = model.prepare_inputs_for_generation(
        tokens,
        past_key_values=cache,
        attention_mask=torch.ones_like(tokens),
        use_cache=True,
        next_sequence_length=1,
    )
    if inputs.get("past_key_values") is cache:
        return KEEPS
    return RECOMPUTES if inputs["input_ids"].shape[1] == column + 1 else FORGETS


@contextmanager
def rotary_state_kept(model: PreTrainedModel) -> Iterator[None]:
    """Restore the frequencies that forwards leave on rotary embeddings: a trial must not change a later text."""
    modules = [module for module in model.modules() if hasattr(module, "max_seq_len_cached")]
    kept = [(module, dict(module._buffers), dict(vars(module))) for module in modules]
    try:
        yield
    finally:
        for module, buffers, attributes in kept:
            vars(module).update(attributes)
            module._buffers.update(buffers)


class RotaryLimit:
    """The columns of one call: up to where it speculates, which rows wait, and what is left to do at the limit.

    Args:
        model (`PreTrainedModel`): The target.
        config (`PreTrainedConfig`): Its text config.
        prompt_lengths (`Sequence[int]`): Tokens of every row's prompt, without padding.

    Attributes:
        is_passed (`bool`): Whether the frequencies have changed.
    """

    def __init__(self, model: PreTrainedModel, config: Any, prompt_lengths: Sequence[int]):
        self.model = model
        self.change = FrequencyChange.of(config)
        self.column = self.change.column
        self.longest = max(prompt_lengths)
        self.lags = [self.longest - length for length in prompt_lengths]
        self.is_passed = self.longest > self.column
        self.recomputes = False

    @property
    def never_speculates(self) -> bool:
        """Whether every further column has its own frequencies, so that no tree fits into a forward."""
        return self.is_passed and self.change.is_repeated

    def refuse(self, prompt_width: int, max_length: int, stored: int, chunk_size: int | None) -> None:
        """Refuse what would not give the text of plain `generate`.

        Args:
            prompt_width (`int`): Tokens of a prompt with its padding.
            max_length (`int`): Most tokens of a row, padding included.
            stored (`int`): Tokens that a cache already holds.
            chunk_size (`int`, *optional*): Of the prefill.

        Raises:
            ValueError: With the value, the rule and the remedy.
        """
        if max_length <= self.column:
            return
        column = int(self.column)
        where = f"the target's rotary frequencies change at position {column} (rope_parameters)"
        if self.is_passed and chunk_size is not None and chunk_size < self.longest - stored:
            raise ValueError(
                f"prefill_chunk_size={chunk_size} with a prompt of {self.longest} tokens: {where}, and plain generate "
                "chooses them anew for every chunk of the padded prompts. Drop prefill_chunk_size."
            )
        does = KEEPS if self.change.is_repeated else cache_at(self.model, column)
        if does == FORGETS and prompt_width <= column and max_length > column + 1:
            raise ValueError(
                f"max_length={max_length} with prompts of {prompt_width} tokens: {where}, and there plain generate of "
                f"this version of transformers drops the cache of {type(self.model).__name__} and runs the last token "
                f"alone, so that its text does not continue the prompt. Keep max_length at {column + 1} or below, or "
                "upgrade transformers."
            )
        if does != KEEPS and self.is_passed and 0 < stored <= column:
            raise ValueError(
                f"past_key_values holds {stored} tokens and the prompt has {self.longest}: {where}, and "
                f"{type(self.model).__name__} does not keep its cache there. Start a new cache."
            )
        # The model compares the padded length: if every row is padded, it drops the cache before anything changes.
        self.recomputes = does == RECOMPUTES and prompt_width == self.longest

    def may_speculate(self, lengths: Sequence[int], done: Sequence[bool], depth: int) -> bool:
        """Whether a tree may be drafted and verified: none of its positions is under other frequencies.

        Args:
            lengths (`Sequence[int]`): Committed tokens of each row: the position of its root.
            done (`Sequence[bool]`): Rows that have ended. They are part of every forward, also of the draft's.
            depth (`int`): Of the deepest node.
        """
        if self.is_passed:
            return not self.never_speculates
        rows = zip(lengths, self.lags, done, strict=True)
        return all(length + (0 if is_done else lag) + depth < self.column for length, lag, is_done in rows)

    def waiting(self, lengths: Sequence[int]) -> list[bool]:
        """Rows that have reached the limit before the others; they emit nothing until all have."""
        return [
            not self.is_passed and length + lag >= self.column for length, lag in zip(lengths, self.lags, strict=True)
        ]

    def is_due(self, lengths: Sequence[int], done: Sequence[bool]) -> bool:
        """Whether all rows that go on wait at the limit."""
        return all(waits or is_done for waits, is_done in zip(self.waiting(lengths), done, strict=True))

    def highest(self, max_length: int) -> int:
        """The number of positions that a forward may use: `max_length`, or less before the limit is passed."""
        return max_length if self.is_passed else int(min(max_length, self.column))

    def lowest(self, lengths: Sequence[int], done: Sequence[bool]) -> list[int] | None:
        """The lowest position of every row in the next forward: plain `generate` takes ended rows along.

        The positions of rows that go on are not below it.

        Returns:
            `list[int]`, or None for targets whose frequencies never change.
        """
        if math.isinf(self.column):
            return None
        columns = [length + lag for length, lag in zip(lengths, self.lags, strict=True)]
        slowest = min(column for column, is_done in zip(columns, done, strict=True) if not is_done)
        return [slowest - lag for lag in self.lags]
