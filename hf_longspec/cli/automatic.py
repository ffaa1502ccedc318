"""Values of a recipe that are chosen by the sizes of the target, where the recipe says `auto`."""

from typing import Any

import torch

from ..cli import CommandError, options
from .env import memory_gib
from .recipe import Recipe

# Learning rate of a LongSpec draft by the width of its target. It rests on three points: 2e-3 at 256 (the bundled
# target) and 5e-4 at 576 (SmolLM2-135M, where 2e-3 diverged) were tried here on a few hundred steps; 5e-4 at 4,096 is
# the papers'. The square between them is a guess, and no width was searched for its best rate.
BASE_RATE, BASE_WIDTH, LEAST_RATE = 2e-3, 256, 5e-4
# A draft proposes all tokens of a small vocabulary, and the most frequent ones of others: the rest has a small share of
# a text, and the loss takes time in proportion to their number.
SMALL_VOCABULARY, MIDDLE_VOCABULARY, FEW_TOKENS, MORE_TOKENS = 32_768, 65_536, 8_192, 16_384
# Rows are halved from the first length down to the last one until a step fits into a quarter of the memory. It is not
# the free one: a run that is resumed must get the same rows.
LONGEST_ROW, SHORTEST_ROW = 1024, 128


def choose(recipe: Recipe, config: Any) -> str | None:
    """Put values in the place of `auto` in a recipe, for a target with this text config, and say which in a line.

    The learning rate of a new LongSpec draft may also be missing. Returns `None` if nothing was to be chosen.

    Raises:
        CommandError: If a value cannot be chosen for this kind of draft.
    """
    training, chosen = recipe.training, dict[str, Any]()
    draft: dict[str, Any] = {"kind": None} if isinstance(recipe.draft, str) else recipe.draft or {}
    is_new_longspec = draft.get("kind", "longspec") == "longspec"
    if training.get("learning_rate", options.AUTO if is_new_longspec else None) == options.AUTO:
        if not is_new_longspec:
            raise CommandError("training.learning_rate: auto is for a new LongSpec draft. Set a number, such as 1e-4.")
        chosen["learning_rate"] = training["learning_rate"] = rate_of(config.hidden_size)
    if recipe.pack == options.AUTO:
        rows = int(training.get("per_device_train_batch_size", 8))
        chosen["pack"] = recipe.pack = row_length(config, rows, memory(training.get("use_cpu", False)))
    if draft.get("draft_vocab_size") == options.AUTO:
        chosen["draft_vocab_size"] = draft["draft_vocab_size"] = vocabulary_of(config.vocab_size)
    if not chosen:
        return None
    values = ", ".join(f"{name} {value}" for name, value in chosen.items())
    return f"Chosen for a target of width {config.hidden_size} with {config.vocab_size:,} tokens: {values}."


def rate_of(width: int) -> float:
    """Return the learning rate of a LongSpec draft, to two digits.

    >>> rate_of(256), rate_of(384), rate_of(576), rate_of(4096)
    (0.002, 0.00089, 0.0005, 0.0005)
    """
    return float(f"{min(BASE_RATE, max(LEAST_RATE, BASE_RATE * (BASE_WIDTH / width) ** 2)):.2g}")


def vocabulary_of(size: int) -> int | None:
    """Return the number of tokens that a draft proposes; `None` for all of the target's.

    >>> vocabulary_of(258), vocabulary_of(49152), vocabulary_of(151936)
    (None, 8192, 16384)
    """
    if size <= SMALL_VOCABULARY:
        return None
    return FEW_TOKENS if size <= MIDDLE_VOCABULARY else MORE_TOKENS


def row_length(config: Any, rows: int, available: float) -> int:
    """Return the tokens of a row, of which a step trains `rows` in a quarter of `available` bytes.

    A token takes about 40 numbers of the width and 8 of the feed-forward layer in 4 bytes.
    """
    intermediate = getattr(config, "intermediate_size", None)
    wide = intermediate if isinstance(intermediate, int) else 4 * config.hidden_size
    of_token = 4 * (40 * config.hidden_size + 8 * wide)
    length = min(LONGEST_ROW, getattr(config, "max_position_embeddings", None) or LONGEST_ROW)
    while length > SHORTEST_ROW and rows * length * of_token > available / 4:
        length //= 2
    return length


def memory(use_cpu: bool) -> float:
    """Return the bytes of the GPU, or of the machine."""
    if torch.cuda.is_available() and not use_cpu:
        return float(torch.cuda.mem_get_info()[1])
    gib = memory_gib()
    return float("inf") if gib is None else gib * 2**30
