"""Comparison of the first verification of each kind of target with a plain forward, to find unexpected differences.

The check runs after the prefix of the longest row. It verifies a tree with two branches: the last tokens of the prompt,
and before them the same tokens in reverse. The logits of the former must equal those of a plain forward over the same
tokens under the model's own attention. They do not if the tree is verified without `position_ids`, the tree mask, a
softcap, sinks, or a window that is shorter than the prefix.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from transformers.utils import logging

from .cache import SpeculativeCache
from .draft_tree import DraftTree
from .target import TargetView

logger = logging.get_logger(__name__)

# Number of tokens that are compared. The tree has one node less than twice this number.
NUM_TOKENS = 4

# Largest difference of two logits, relative to their standard deviation. Measured on the tiny targets of testing.py:
# at most 4e-6 in float32; at least 0.6 without the window, the softcap, the sinks, the positions or the mask.
TOLERANCE = 0.02
# In half precision, rounding changes logits (0.07 in bfloat16) and the choice of experts in near-ties (0.8, gpt_oss).
HALF_TOLERANCE = 0.5

_checked: set[tuple[Any, ...]] = set()


def check_target(
    target: TargetView,
    cache: SpeculativeCache,
    texts: Sequence[torch.Tensor],
    limit: int,
    logits: torch.Tensor | None = None,
) -> None:
    """Compare verification and plain forward after the longest row of `cache`, once per process and kind of target.

    A kind is given by class, config, dtype of the weights and attention implementation, and by whether there is room
    for a tree of more than a root. The check writes only to free slots of the cache. Call it outside of
    [`TargetView.attention`].

    Args:
        target ([`TargetView`]): The target.
        cache ([`SpeculativeCache`]): The target's cache, with the prefix of every row.
        texts (`Sequence[torch.Tensor]`): Tokens `(T,)` of every row. The check runs the last few of one row.
        limit (`int`): Upper bound of the positions of the check.
        logits (`torch.Tensor` of shape `(batch, vocab)`, *optional*):
            Logits of the last token of every text, from one forward over the text with images and the like. With them,
            the check also verifies the end of a text that is not in the cache, which must run without these inputs.

    Raises:
        ValueError: If the logits disagree in float32. In other precisions a warning is logged.
    """
    row = max(range(cache.batch_size), key=cache.lengths.host.__getitem__)
    start = cache.lengths.host[row]
    # A draft that only verifies roots pays for no more.
    slots = min(cache.tree_slots, cache.max_length + cache.tree_slots - start)
    count = max(1, min(NUM_TOKENS, len(texts[row]), limit - start, (slots + 1) // 2))
    implementation, settings = str(target.config._attn_implementation), target.config.to_json_string(use_diff=False)
    dtype = target.model.dtype, torch.is_autocast_enabled(texts[row].device.type)
    kind = type(target.model), *dtype, implementation, settings, logits is not None, count > 1
    if kind in _checked:
        return
    chain = texts[row][None, -count:]
    tree, nodes = _two_branches(chain)
    positions = torch.arange(start, start + count, device=chain.device)[None]
    view = _row_of(cache, row, target, room=tree.num_nodes)
    plain = target.model(input_ids=chain, position_ids=positions, past_key_values=view, use_cache=True).logits
    view.set_lengths([start])
    with target.attention():
        verified = target.verify(tree, view).logits[:, nodes]
    _compare(target, verified.float(), plain.to(verified.device).float())
    if logits is not None:
        end = texts[row][None, start:]
        view = _row_of(cache, row, target, room=end.shape[1])
        with target.attention():
            verified = target.verify(DraftTree.chain(end), view).logits[:, -1]
        _compare(target, verified.float(), logits[row, None].to(verified.device).float())
    _checked.add(kind)


def _two_branches(chain: torch.Tensor) -> tuple[DraftTree, list[int]]:
    """Return a tree of `chain` `(1, n)` and a wrong branch, whose nodes come first, and the indices of the chain."""
    drafted = chain.shape[1] - 1
    tokens = torch.cat([chain[:, :1], chain[:, 1:].flip(1), chain[:, 1:]], dim=1)
    branch = list(range(1, drafted))
    parents = [-1, *[0, *branch][:drafted], *[0, *(node + drafted for node in branch)][:drafted]]
    tree = DraftTree(
        tokens,
        torch.tensor([parents], device=chain.device),
        torch.ones_like(tokens, dtype=torch.bool),
        max_depth=drafted,
    )
    return tree, [0, *range(drafted + 1, 2 * drafted + 1)]


def _row_of(cache: SpeculativeCache, row: int, target: TargetView, room: int) -> SpeculativeCache:
    """Return one row of a cache as a separate cache over the same buffers, which writes after the committed tokens."""
    length = cache.lengths.host[row]
    view = SpeculativeCache(target.config, 1, length + room, tree_slots=room)
    for own, layer in zip(view.layers, cache.layers, strict=True):
        if layer.is_initialized:
            own.keys, own.values = layer.keys[row : row + 1], layer.values[row : row + 1]
            own.device, own.is_initialized = layer.keys.device, True
    view.set_lengths([length])
    return view


def _compare(target: TargetView, verified: torch.Tensor, plain: torch.Tensor) -> None:
    is_same = (verified == plain) | (verified.isnan() & plain.isnan())  # also where a model masks tokens with -inf
    gap = (verified - plain).masked_fill(is_same, 0).abs().max().item()
    if gap == 0:
        return
    spread = plain[plain.isfinite()].std().item()
    is_exact = not torch.is_autocast_enabled(verified.device.type) and _computes_exactly(target.model)
    tolerance = (TOLERANCE if is_exact else HALF_TOLERANCE) * spread
    if gap <= tolerance:
        return
    name = type(target.model).__name__
    found = (
        f"the logits of a verified tree and of a plain forward over the same tokens differ by up to {gap:.3g}, where "
        f"{tolerance:.3g} is tolerated ({tolerance / spread if spread else math.nan:.3g} of their standard deviation)"
    )
    if is_exact:
        raise ValueError(
            f"{name} cannot be verified: {found}. It may ignore position_ids, the tree mask or its own attention "
            "window. Call generate() without assistant_model, and report the model. "
            "draft.generation_config.check_target = False skips this check, and the text may then be wrong."
        )
    logger.warning(
        "%s: %s. In this precision that may be rounding or another choice of experts; compare in float32, or check the "
        "text with hf_longspec.audit.",
        name,
        found,
    )


def _computes_exactly(model: torch.nn.Module) -> bool:
    """Return whether the model computes in float32: no half precision, no quantised weights or activations, no TF32."""
    if getattr(model, "is_quantized", False) or torch.get_float32_matmul_precision() != "highest":
        return False
    if any(hasattr(module, "_packed_params") for module in model.modules()):  # torch's dynamic int8
        return False
    return all(weight.dtype in (torch.float32, torch.float64) for weight in model.parameters())
