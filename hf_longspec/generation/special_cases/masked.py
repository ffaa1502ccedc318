"""Verification under the model's own attention, by a mask over the prefix and the nodes.

Hybrid tree attention needs a model that passes its queries and keys to an attention function, and that attends to all
keys or to a window of them. Other models are verified as transformers runs them: the nodes get the 4-D mask
`(B, 1, N, S + N)` of all slots of the cache, or such a mask for each kind of layer (Llama 4). Indexers read the mask
before they choose keys (DeepSeek V3.2), and their own keys are staged and committed with the others. The mask has one
entry for each node and slot, so a step costs more at long contexts than hybrid tree attention does.

The choice of an indexer may end in a tie, as many of its scores are exactly 0. The order in which `topk` takes equal
scores depends on the number of keys and on their places. [`IndexerChoices`] gives it the row of scores that it gets in
plain `generate`.
"""

import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from ...attention_backends.contexts import TreeContext
from ..cache import CACHE_NAME, Rows, SpeculativeCache, SpeculativeLayer, shifted
from ..draft_tree import DraftTree
from ..special_case import LayerTraits, VerificationMode
from ..target_modules import plain_forward, plain_logits, shape_of
from .hooks import bare
from .stock_forwards import PlainForwards, PromptsOfForwards
from .trial import HYBRID, TRIAL_TOLERANCE, cut_by_the_stock_cache, largest_gap, named, spread_of

SLIDING_LAYER, CHUNKED_LAYER = "sliding_attention", "chunked_attention"
# Attention implementations of transformers that take a mask for each query and key.
IMPLEMENTATIONS = ("eager", "sdpa")
# Types of layers with an indexer, whose keys are cached beside those of the layer; the second one before 5.23.
INDEXED_LAYERS = {"indexed_attention", "deepseek_sparse_attention"}

# Largest share of a mask in the bytes that a captured step reads: weights, keys and values, and the mask in each layer.
MOST_OF_MASK = 0.1
# As [`TRIAL_TOLERANCE`], in half precision.
HALF_TRIAL_TOLERANCE = 0.5
# Tokens of the two rows of a trial.
TRIAL_PROMPTS = (9, 5)
# Tokens of a trial lie between these, where no model has placeholders of images.
FIRST_TOKEN, LAST_TOKEN = 3, 10
# Parents of the nodes of a trial: two branches, the second of which lies after the first.
TRIAL_PARENTS = (-1, 0, 1, 0, 3)


class IndexedLayer(SpeculativeLayer):
    """Keys and values of a layer that has an indexer, with the keys of the indexer in slots of their own.

    Attributes:
        indexer ([`SpeculativeLayer`]): Keys `(B, 1, S, D)` of the indexer, and values of width 0.
    """

    def __init__(self, rows: Rows, capacity: int):
        super().__init__(rows, capacity)
        self.indexer = SpeculativeLayer(rows, capacity)

    @property
    def buffers(self) -> list[SpeculativeLayer]:
        """The parts of this layer that hold an entry for each token."""
        return [self, self.indexer]

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Write new keys `(B, N, D)` of the indexer, and return all written so far, the new ones included."""
        keys = indexer_key_states[:, None]
        return self.indexer.update(keys, keys[..., :0])[0][:, 0]

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens."""
        super().crop(tokens_to_remove)
        self.indexer.crop(tokens_to_remove)

    def reset(self) -> None:
        """Remove all tokens, and keep the buffers."""
        super().reset()
        self.indexer.reset()

    def adopt(self, layer: Any, past_lengths: Sequence[int], padding: Tensor | None) -> None:
        """Copy the keys of the indexer of a layer of a user's cache; `padding` `(B,)` precedes the tokens there."""
        if not layer.is_indexer_initialized:
            return
        keys = layer.indexer_keys[:, None]
        self.indexer.lazy_initialization(keys, keys[..., :0])
        longest = max(past_lengths)
        self.indexer.keys[:, :, :longest] = keys if padding is None else shifted(keys, padding, 0, longest)

    def give_back(self, layer: Any, length: int, padding: Tensor | None) -> None:
        """Point the indexer of a layer of a user's cache to the keys of the first `length` columns."""
        if not self.indexer.is_initialized:
            return
        keys = self.indexer.keys
        if not layer.is_indexer_initialized:
            layer.lazy_initialization_indexer(keys[:, 0])
        if padding is not None:
            keys = shifted(keys, -padding, 0, length)
        layer.indexer_keys = keys[:, 0, :length]


class IndexerChoices(TorchFunctionMode):
    """Let the indexers of one forward choose among equal scores as those of plain `generate` do.

    Args:
        positions (`torch.LongTensor` of shape `(batch, N)`): Positions of the tokens of the forward.
        num_slots (`int`): Number of keys of the forward, in increasing order of their positions for each token.
        plain ([`PlainForwards`], *optional*): The forwards to agree with. By default, one for each token of each row.
    """

    def __init__(self, positions: Tensor, num_slots: int, plain: PlainForwards | None):
        super().__init__()
        self.shape = (*positions.shape, num_slots)
        self.positions, self.plain = positions, plain

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace `topk` of scores `(batch, N, num_slots)`."""
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.topk and args[0].shape == self.shape:
            return self._settled(args[0], *result)
        return result

    def _settled(self, scores: Tensor, values: Tensor, indices: Tensor) -> Any:
        """Return the `k` largest scores and their slots, with ties between the last ones settled."""
        last, lowest = values[..., -1:], torch.finfo(scores.dtype).min / 2  # masked ones are lower
        tied = (last > lowest) & ((scores >= last).sum(-1, keepdim=True) > values.shape[-1])
        for row, token in tied[..., 0].nonzero().tolist():
            seen = (scores[row, token] > lowest).nonzero().flatten()
            lag = 0 if self.plain is None else self.plain.lags[row]
            column = self.positions[row, token] + lag
            size = int(column + 1 if self.plain is None else self.plain.num_keys(column))
            padded = scores.new_full((size,), -torch.inf)
            padded[lag : lag + len(seen)] = scores[row, token, seen]
            chosen = seen[padded.topk(values.shape[-1]).indices - lag]
            values[row, token], indices[row, token] = scores[row, token, chosen], chosen
        return torch.return_types.topk((values, indices))


def choices_of(cache: Any, positions: Tensor, num_slots: int) -> AbstractContextManager[Any]:
    """Return the context of a forward of tokens at `positions` `(B, N)` with `num_slots` keys.

    A captured step has none: on CUDA, `topk` takes the first of equal scores, whatever their number is.
    """
    if not any(isinstance(layer, IndexedLayer) for layer in cache.layers):
        return nullcontext()
    return IndexerChoices(positions, num_slots, cache.rows.plain)


def choosing_forward(model: PreTrainedModel, cache: Any, positions: Tensor, num_keys: int, **inputs: Any) -> Any:
    """Return the result of a forward of prompts; see [`plain_forward`]."""
    with choices_of(cache, positions, num_keys):
        return plain_forward(model, cache, positions, num_keys, **inputs)


_logits = partial(plain_logits, choosing_forward)


def masked_logits(
    context: Any, model: PreTrainedModel, tokens: Tensor, positions: Tensor, cache: Any, mask: Tensor, **more: Any
) -> Tensor:
    """Logits `(B, N, vocab)` of the nodes of a [`TreeContext`] under the model's own attention.

    The arguments are those of [`logits_under`]. A `mask` between the nodes is read from the context.
    """
    config = model.config.get_text_config(decoder=True)
    num_slots = context.lengths.longest + tokens.shape[1]
    masks = masks_of(context, config, num_slots)
    if str(config._attn_implementation) == "eager":
        lowest = torch.finfo(model.dtype).min
        masks = {kind: torch.where(seen, 0.0, lowest).to(model.dtype) for kind, seen in masks.items()}
    counts = first_count_that_matters(config) < math.inf
    with choices_of(cache, context.positions, num_slots), _counted(cache, positions) if counts else nullcontext():
        logits: Tensor = model(
            input_ids=tokens,
            position_ids=positions,
            **{CACHE_NAME: cache},
            attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
            use_cache=True,
            **more,
        ).logits
    return logits


def first_count_that_matters(config: Any) -> float:
    """Return the first position at which layers scale queries by the length of the cache (Llama 4); infinity if none.

    Other layers get their positions from `position_ids`.
    """
    return int(config.floor_scale) if shape_of(config, "attn_temperature_tuning") else math.inf


@contextmanager
def _counted(cache: Any, positions: Tensor) -> Iterator[None]:
    """Let layers that add the index of a node to the length of the cache get `positions` `(B, N)` of one row.

    Of several rows, they get the lowest position of each node.
    """
    counted = positions.amin(0) - torch.arange(positions.shape[1], device=positions.device)
    cache.get_seq_length = lambda layer_idx=0: counted
    try:
        yield
    finally:
        del cache.get_seq_length


def masks_of(context: Any, config: Any, num_slots: int) -> dict[str, Tensor]:
    """Return what the nodes of a [`TreeContext`] see of the slots of the cache, `(B, 1, N, num_slots)`.

    There is one mask for each kind of layer of the text config.
    """
    positions, count = context.positions, context.positions.shape[1]
    slots = torch.arange(num_slots, device=positions.device)
    nodes = slots - context.lengths.on(slots.device)[:, None]  # (B, num_slots): index of the node in each slot
    index = nodes.clamp(0, count - 1)
    is_node = (nodes >= 0) & (nodes < count)
    seen = context.mask.gather(2, index[:, None].expand(-1, count, -1)) & is_node[:, None] | (nodes < 0)[:, None]
    keys, queries = torch.where(is_node, positions.gather(1, index), slots)[:, None], positions[:, :, None]
    masks = {}
    for kind in dict.fromkeys(getattr(config, "layer_types", None) or ("full_attention",)):
        mask = seen
        if kind == SLIDING_LAYER:
            mask = seen & (queries - keys < config.sliding_window)
        elif kind == CHUNKED_LAYER:
            size = config.attention_chunk_size
            mask = seen & (queries // size == keys // size)
        masks[kind] = mask[:, None]
    return masks


def try_mask(model: PreTrainedModel, config: Any) -> LayerTraits:
    """Verify a tree after two short prompts, and compare its logits with those of single tokens."""
    try:
        gap, padded_gap, spread = _gaps(bare(model), config)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return LayerTraits((), [f"a forward of a few tokens failed under a mask of its own: {named(error)}"], None)
    kinds = getattr(config, "layer_types", None) or ("full_attention",) * config.num_hidden_layers
    sizes = {SLIDING_LAYER: shape_of(config, "sliding_window"), CHUNKED_LAYER: shape_of(config, "attention_chunk_size")}
    windows = tuple(sizes.get(kind) for kind in kinds)
    tolerance = TRIAL_TOLERANCE if model.dtype in (torch.float32, torch.float64) else HALF_TRIAL_TOLERANCE
    reasons = []
    if not gap <= tolerance * spread:
        reasons.append(
            "it does not follow a mask over prefix and nodes: logits of a tree and of single tokens differ by "
            f"{gap:.3g}, with a standard deviation of {spread:.3g}"
        )
    cut = cut_by_the_stock_cache(config, dict(enumerate(windows)))
    return LayerTraits(windows, reasons, cut, counts_padding=not padded_gap <= tolerance * spread)


@torch.no_grad()
def _gaps(model: PreTrainedModel, config: Any) -> tuple[float, float, float]:
    """Return the largest differences of logits from those of single tokens, and the standard deviation of the latter.

    The first difference is that of a tree, and the second one that of a prompt with padding.
    """
    device = model.device if model.device.type != "meta" else torch.device("cpu")  # weights offloaded to disk
    rows, count = len(TRIAL_PROMPTS), len(TRIAL_PARENTS)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(FIRST_TOKEN, LAST_TOKEN, (rows, max(TRIAL_PROMPTS) + count), generator=generator).to(device)
    parents = torch.tensor(TRIAL_PARENTS, device=device).expand(rows, -1)
    nodes = tokens[:, -count:]
    tree = DraftTree(nodes, parents, torch.ones_like(nodes, dtype=torch.bool), max_depth=2)
    cache = SpeculativeCache(config, rows, max(TRIAL_PROMPTS), tree_slots=count)
    verified = _after_prompts(model, cache, tokens, tree)
    differences, padded, logits = [], [], []
    for row, length in enumerate(TRIAL_PROMPTS):
        for path in ((0, 1, 2), (0, 3, 4)):
            alone, prompt = SpeculativeCache(config, 1, length + len(path)), tokens[row : row + 1, :length]
            _logits(model, alone, prompt)
            for node in path:
                logits.append(_logits(model, alone, nodes[row : row + 1, node : node + 1])[0, -1])
                differences.append(largest_gap(verified[row, node], logits[-1]))
        padded.append(largest_gap(_after_padding(model, config, prompt, nodes[row : row + 1, :1]), logits[-3]))
    return max(differences), max(padded), spread_of(torch.stack(logits))


def _after_prompts(model: PreTrainedModel, cache: SpeculativeCache, tokens: Tensor, tree: DraftTree) -> Tensor:
    """Logits of the nodes of a tree after the prompts of a trial, whose rows have different lengths."""
    _logits(model, cache, tokens[:, : max(TRIAL_PROMPTS)])
    cache.set_lengths(TRIAL_PROMPTS)
    positions = cache.lengths.on(tokens.device)[:, None] + tree.depths
    cache.stage(tree.num_nodes, tree)
    context = TreeContext(cache.lengths, positions, tree.mask)
    return masked_logits(context, model, tree.tokens, positions, cache, tree.mask)


def _after_padding(model: PreTrainedModel, config: Any, prompt: Tensor, token: Tensor) -> Tensor:
    """Logits of a token after a padded prompt, with the arguments that plain `generate` gives to the model."""
    count = 2
    cache = SpeculativeCache(config, 1, prompt.shape[1] + count + 1)
    text = nn.functional.pad(torch.cat([prompt, token], 1), (count, 0), value=FIRST_TOKEN)
    mask = torch.ones_like(text)
    mask[:, :count] = 0
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    for step in (slice(0, -1), slice(-1, None)):
        end = text.shape[1] if step.stop is None else text.shape[1] - 1
        inputs = model.prepare_inputs_for_generation(
            text[:, :end],
            next_sequence_length=text[:, step].shape[1],
            attention_mask=mask[:, :end],
            position_ids=positions[:, step],
            **{CACHE_NAME: cache},
            use_cache=True,
            is_first_iteration=end < text.shape[1],
        )
        with choices_of(cache, positions[:, step], end):
            logits: Tensor = model(**inputs).logits[0, -1]
    return logits


def why_not_masked(model: PreTrainedModel, config: Any) -> list[str]:
    """Return reasons why a model cannot be verified by masks, as far as its class and its text config tell."""
    reasons = []
    if (implementation := str(config._attn_implementation)) not in IMPLEMENTATIONS:
        reasons.append(
            f"it needs a mask over prefix and nodes, which attn_implementation={implementation!r} does not take; load "
            "it with attn_implementation='eager'"
        )
    if "position_ids" not in inspect.signature(type(model).forward).parameters:
        reasons.append(
            "it takes positions from the length of its cache or from its tokens, not from position_ids, which the "
            "nodes of a tree need"
        )
    if not getattr(config, "layer_types", None):
        fields = config.to_dict().items()
        sizes = [f"{name}={size}" for name, size in fields if "window" in name and type(size) is int and size > 0]
        if sizes:
            reasons.append(
                f"its config has {', '.join(sizes)}, and its layers may count a window by slots of the cache"
            )
    return reasons


class MaskedPrompts(PromptsOfForwards):
    """Prompts of targets that are verified by masks."""

    def why_not(self) -> Iterator[str]:
        kind, length = type(self.target.model).__name__, self.call.max_length
        limit = first_count_that_matters(self.target.config)
        if length > limit and (len(self.texts) > 1 or self.padding is not None):
            yield (
                f"max_length={length}: from {limit} tokens on (floor_scale), {kind} scales queries by positions that "
                "count the padding of a batch. Pass one prompt without padding, or a smaller max_length."
            )


class MaskedMode(VerificationMode):
    """Verify nodes under the model's own attention, by a mask."""

    name = "masked"
    compiles = False
    parts_of_bucket = 8
    logits = staticmethod(masked_logits)
    forward = staticmethod(choosing_forward)
    prompts_class = MaskedPrompts
    takes_unreached = counts_columns = True
    takes_inputs = takes_contexts = False
    # the choice of an indexer depends on the number of tokens of a forward if there are ties
    tells_single_tokens = True

    def applies(self, target: Any) -> bool:
        config, kinds = target.config, set(getattr(target.config, "layer_types", None) or ())
        has_own_masks = kinds & {*INDEXED_LAYERS, CHUNKED_LAYER} or shape_of(config, "attention_chunk_size")
        is_unreachable = not target.model._can_set_attn_implementation()
        return bool(has_own_masks or is_unreachable) and not getattr(target.model, "_is_stateful", False)

    def trial(self, model: PreTrainedModel, config: Any) -> LayerTraits:
        return try_mask(model, config)

    def attention(self, target: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def kinds(self) -> set[str]:
        return {*INDEXED_LAYERS, CHUNKED_LAYER}

    def why_not_fixed(self, name: str) -> str | None:
        return f"{name}, whose nodes are verified by a mask that grows with the text"

    def why_not_captured(
        self, model: PreTrainedModel, shape: tuple[int, int, int], buffers: Sequence[Any]
    ) -> str | None:
        """Return a reason if a mask of so many slots is a large part of what all layers read in a step."""
        rows, nodes, slots = shape
        weights = sum(x.nbytes for x in model.parameters())
        keys = sum(x[:, :, :slots].nbytes for pair in buffers for x in pair if x is not None)
        mask = rows * nodes * slots * model.dtype.itemsize * len(buffers)
        if mask <= MOST_OF_MASK * (mask + weights + keys):
            return None
        return f"its mask of {nodes} nodes and {slots} slots takes over {MOST_OF_MASK:.0%} of the bytes of the step"

    def why_not(self, target: Any) -> list[str]:
        return []

    def why_not_tried(self, target: Any) -> list[str]:
        """Return reasons why masks do not work, after those why the attention backends cannot compute the layers."""
        reasons = why_not_masked(target.model, target.config) or target.traits_by(self).reasons
        if not reasons:
            return []
        if not target.model._can_set_attn_implementation():
            return ["its attention does not go through transformers' AttentionInterface", *reasons]
        return reasons if target.declared_mode is self else [*target.traits_by(HYBRID).reasons, *reasons]

    def continues_texts(self, target: Any) -> bool:
        return False


MASKED = MaskedMode()
LAYERS_OF_INDEXERS = dict.fromkeys(INDEXED_LAYERS, IndexedLayer)
