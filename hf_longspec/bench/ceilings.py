"""What the machine can do at best, measured: the floor that a step cannot go below."""

import time
from collections.abc import Callable

import torch
from transformers import PreTrainedModel

READ_BYTES = 2**29  # far above any last-level cache
SECONDS = 1.0


def read_gb_per_second() -> float:
    """Rate at which memory is read, in 10^9 bytes per second: the best pass over a large buffer within a second."""
    buffer = torch.ones(READ_BYTES // 4)
    return READ_BYTES / _best_seconds(buffer.sum) / 1e9


def _best_seconds(function: Callable[[], object]) -> float:
    function()
    best, until = float("inf"), time.perf_counter() + SECONDS
    while time.perf_counter() < until:
        started = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - started)
    return best


def step_bytes(model: PreTrainedModel, context: int, batch: int) -> int:
    """Bytes that one decoding step has to read: every weight once, the cached keys and values of all rows.

    Args:
        model (`PreTrainedModel`): Target whose layers all keep keys and values of the whole context.
        context (`int`): Cached tokens per row.
        batch (`int`): Rows.
    """
    config = model.config.get_text_config(decoder=True)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * context * batch
    weights = sum(parameter.numel() for parameter in model.parameters())
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if embedding is not head:  # of a table that is only looked up, a step reads one row
        weights -= embedding.numel()
    return (numbers + weights) * head.element_size()
