# Published with a draft by hf_longspec, Apache-2.0.
"""Softmax over keys that arrive block by block, inside a Triton kernel.

A program keeps for each of its rows the highest score so far, the sum of the weights relative to it, and the weighted
sum of the values. Scores are in base 2 (multiplied by log2 e beforehand), because exp2 is one instruction.
"""

from __future__ import annotations

import math

from .attention_backends_triton_runtime import constant, jit, tl

LOG2_E = constant(math.log2(math.e))
LN_2 = constant(math.log(2.0))


def score_factors(scaling: float, softcap: float | None) -> tuple[float, float]:
    """`(scale, cap)` such that `scores_of` yields scores in base 2."""
    return (scaling * math.log2(math.e), 0.0) if softcap is None else (scaling / softcap, softcap * math.log2(math.e))


@jit()
def scores_of(query, key, scale, cap, HAS_SOFTCAP: tl.constexpr):
    """Raw products `q . k` and scores in base 2, both [rows, keys], of `query` [rows, D] and `key` [keys, D]."""
    products = tl.dot(query, tl.trans(key), input_precision="ieee")  # tf32, the default, has 10 bits
    scores = products * scale
    if HAS_SOFTCAP:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1), which needs no device library; exp overflows to inf, and gives 1
        scores = cap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2_E)) + 1.0))
    return products, scores


@jit()
def add_block(acc, highest, total, scores, value):
    """Take in a block: scores [rows, keys] (-inf: not seen) and values [keys, Dv]; returns acc, highest, total."""
    new = tl.maximum(highest, tl.max(scores, 1))
    # a row that has seen nothing yet: -inf - -inf would be NaN
    shift = tl.where(new == float("-inf"), 0.0, new)
    weights = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(highest - shift)
    total = total * decay + tl.sum(weights, 1)
    acc = tl.dot(weights.to(value.dtype), value, acc * decay[:, None], input_precision="ieee")
    return acc, new, total


@jit()
def finish(acc, highest, total):
    """Output [rows, Dv] and its log-sum-exp in base 2 [rows]; 0 and -inf for a row that saw nothing."""
    some = total > 0.0
    divisor = tl.where(some, total, 1.0)
    lse = tl.where(some, highest + tl.log2(divisor), float("-inf"))
    return acc / divisor[:, None], lse
