"""The traits of a model's attention layers, found by forwards of two tokens.

Only its mask completely describes which keys a layer attends to: a config may contain a `sliding_window` that the model
does not use, and a model may apply a window without passing it to its attention function. The model therefore runs at
the beginning of a text and after a long prefix that its cache only claims to hold, and every layer's mask is compared
with the causal one. Queries are compared between both runs. They are equal if the model uses the positions that it is
given. No attention is computed, and the prefix takes no memory.
"""

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from ..attention_backends.interface import REFUSED
from .rotary import rotary_state_kept

QUERIES = 2
# Length of the longest text if the config has no limit. The claimed prefix is as long as the longest text.
NO_LIMIT = 1 << 17
MOST_NAMED = 4


@dataclass
class LayerTraits:
    """Traits of a model's attention layers.

    Args:
        windows (`tuple[int | None, ...]`): Sliding window of every layer; `None` for a layer that attends to all keys.
        reasons (`list[str]`): Reasons why a tree cannot be verified with these layers; empty if it can.
        forgotten_window (`int`, *optional*):
            A window that transformers' cache applies and the layers do not. After this many tokens, the text of plain
            `generate` depends on where its prompt ended.
        ignored (`dict[str, bool]`): Whether zeros change nothing, for every input that was tried.
    """

    windows: tuple[int | None, ...]
    reasons: list[str]
    forgotten_window: int | None
    ignored: dict[str, bool] = field(default_factory=dict)


_known: WeakKeyDictionary[PreTrainedModel, tuple[dict, LayerTraits]] = WeakKeyDictionary()


def known_traits(model: PreTrainedModel, config: Any) -> LayerTraits | None:
    """Return the traits that an earlier trial found; `None` if there was none, or the text config has changed since."""
    settings, traits = _known.get(model, (None, None))
    return traits if settings is not None and settings == config.to_dict() else None


def layer_traits(model: PreTrainedModel, config: Any) -> LayerTraits:
    """Return the traits of the attention layers of `model`, found once and again if its text `config` has changed.

    The model runs under an attention implementation of this package.
    """
    if (known := known_traits(model, config)) is not None:
        return known
    traits = _try(model, config)
    if traits.windows:  # a trial that failed is repeated the next time
        _known[model] = deepcopy(config.to_dict()), traits
    return traits


def ignores_zeros(model: PreTrainedModel, config: Any, name: str) -> bool:
    """Return whether zeros as input `name` have the same effect as no input, as is common for token types."""
    ignored = layer_traits(model, config).ignored
    if name not in ignored:
        zeros = {name: torch.zeros(1, QUERIES, dtype=torch.long, device=model.device)}
        without, given = _run(model, config), _run(model, config, more=zeros)
        ignored[name] = not given.reasons() and not given.differs_from(without)
    return ignored[name]


def ignores(model: PreTrainedModel, config: Any, name: str, value: Any) -> bool:
    """Whether the tensor `value` changes nothing of text after a prefix: say, sizes of an image without its pixels."""
    if not isinstance(value, torch.Tensor):  # settings, whose effect may be outside of the logits
        return False
    try:
        without, given = _run(model, config, QUERIES), _run(model, config, QUERIES, more={name: value})
    except Exception:  # some models refuse it without the pixels, which is no proof of either
        return False
    same = given.reasons() == without.reasons() and torch.equal(given.logits, without.logits)
    return same and given.layers.keys() == without.layers.keys() and not given.differs_from(without)


def _try(model: PreTrainedModel, config: Any) -> LayerTraits:
    longest = max([getattr(config, "max_position_embeddings", None) or NO_LIMIT, *_lengths(config)])
    try:
        first, again, later = (_run(model, config, offset) for offset in (0, 0, longest - QUERIES))
        differs = later.differs_from(first) and not again.differs_from(first)  # some kernels never repeat
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        message = (str(error) or "no message").splitlines()[0]
        failed = f"a forward of two tokens failed under its attention: {type(error).__name__}: {message}"
        return LayerTraits((), [failed], None)
    windows = {layer: found.window for layer, found in later.layers.items()}
    reasons = []
    if not windows:
        reasons.append(
            "it never called the attention backend, so it would ignore the draft tree; its attention must go through "
            "transformers' AttentionInterface"
        )
    elif extra := later.cached - set(range(config.num_hidden_layers)):
        declared = f"the {config.num_hidden_layers} of config.num_hidden_layers"
        reasons.append(f"it caches {declared} and {_named(extra)}, and there is one cache for each declared layer")
    elif missing := later.cached - set(windows):
        reasons.append(f"{_named(missing)} never called the attention backend and would ignore the draft tree")
    for reason in dict.fromkeys(reason for trial in (first, later) for reason in trial.reasons()):
        reasons.append(reason)
    if differs:
        reasons.append(
            "it takes positions from the length of its cache or from its tokens, not from position_ids, and the nodes "
            "of a tree and the rows of a batch have positions of their own"
        )
    of_layers = tuple(windows.get(layer) for layer in range(max(windows, default=-1) + 1))
    return LayerTraits(of_layers, reasons, _cut_by_the_stock_cache(config, windows))


def _lengths(config: Any) -> Iterable[int]:
    """Yield the numbers of a config that may be windows, plus 2, so that each of them hides a key."""
    for name, value in config.to_dict().items():
        if isinstance(value, int) and ("window" in name or "chunk" in name):
            yield value + QUERIES


def _cut_by_the_stock_cache(config: Any, windows: dict[int, int | None]) -> int | None:
    """Return the window by which transformers' cache drops keys that the layers attend to; `None` if it drops none."""
    layers = enumerate(DynamicCache(config=config).layers)  # may include dummy layers
    lengths = {layer: getattr(cached, "sliding_window", None) for layer, cached in layers if layer in windows}
    sliding = {layer: length for layer, length in lengths.items() if length is not None}
    return min((cut for layer, cut in sliding.items() if cut < (windows[layer] or torch.inf)), default=None)


@torch.no_grad()
def _run(model: PreTrainedModel, config: Any, offset: int = 0, more: dict[str, Any] | None = None) -> "AttentionProbe":
    """Run one forward like a verification after a claimed prefix, or like `generate` at the beginning of a text.

    Both get the positions of the first tokens, and the inputs `more`.
    """
    trial, cache = AttentionProbe(offset), DummyCache(config.num_hidden_layers, offset)
    device = model.device if model.device.type != "meta" else torch.device("cpu")  # weights offloaded to disk
    positions = torch.arange(QUERIES, device=device)[None]
    inputs = {"position_ids": positions, "past_key_values": cache, "use_cache": True}
    inputs |= more or {}
    tokens = positions + 1
    if offset:
        inputs["input_ids"] = tokens
    else:
        inputs = model.prepare_inputs_for_generation(tokens, is_first_iteration=True, **inputs)
    # A compiled forward would be compiled again for two tokens.
    with rotary_state_kept(model), torch.compiler.set_stance("force_eager"):
        trial.logits = model(**inputs, trial=trial).logits
    trial.cached = cache.updated
    return trial


@dataclass
class LayerMask:
    """Inputs of one layer.

    Args:
        window (`int`, *optional*): Sliding window of the layer.
        query (`torch.Tensor` of shape `(1, H, 2, D)`): Queries of the layer.
        reasons (`tuple[str, ...]`): Reasons why a tree cannot be verified with it, as predicates of the layer.
    """

    window: int | None
    query: torch.Tensor
    reasons: tuple[str, ...]


class AttentionProbe:
    """Record the inputs of the attention layers of one forward, in place of a backend.

    Args:
        offset (`int`): Number of tokens that the cache claims to hold.
    """

    logits: torch.Tensor

    def __init__(self, offset: int):
        self.offset = offset
        self.layers: dict[int, LayerMask] = {}
        self.cached: set[int] = set()
        self._read: dict[int, tuple[torch.Tensor, int | None, tuple[str, ...]]] = {}

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        sliding_window: int | None,
        causal: bool,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """Record the inputs of the layer, and return zeros `(B, N, H, Dv)` as its output."""
        window, reasons = (sliding_window, ()) if mask is None else self._of_mask(mask)
        if not causal:  # also if there is no mask: transformers omits one that equals is_causal
            reasons += ("attend to later tokens",)
        reasons += tuple(f"need {name}: {why}" for name, why in REFUSED.items() if options.get(name) is not None)
        layer: Any = module.layer_idx
        self.layers[layer] = LayerMask(window, query, reasons)
        return value.new_zeros(*query.transpose(1, 2).shape[:3], value.shape[3])

    def reasons(self) -> list[str]:
        """Return the reasons why a tree cannot be verified, each with its layers."""
        layers: dict[str, list[int]] = {}
        for layer, found in self.layers.items():
            for reason in found.reasons:
                layers.setdefault(reason, []).append(layer)
        return [f"{_named(which)} {reason}" for reason, which in layers.items()]

    def differs_from(self, other: "AttentionProbe") -> bool:
        """Return whether queries differ although tokens, positions and attention outputs are the same."""
        return any(
            layer not in other.layers or not torch.equal(found.query, other.layers[layer].query)
            for layer, found in self.layers.items()
        )

    def _of_mask(self, mask: torch.Tensor) -> tuple[int | None, tuple[str, ...]]:
        if id(mask) not in self._read:  # stored with the mask, so that no other object gets its id
            self._read[id(mask)] = mask, *self._read_mask(mask)
        return self._read[id(mask)][1:]

    def _read_mask(self, mask: torch.Tensor) -> tuple[int | None, tuple[str, ...]]:
        end = self.offset + QUERIES
        mask = mask[..., :end]
        seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
        if mask.dtype != torch.bool and bool((mask[seen] != 0).any()):
            return None, ("add values of their own to the scores",)
        count = int(seen[0, 0, -1].sum())
        distance = torch.arange(self.offset, end, device=mask.device)[:, None] - torch.arange(end, device=mask.device)
        if not bool((seen == ((distance >= 0) & (distance < count))).all()):
            return None, ("have a mask that is neither causal nor a sliding window",)
        return (count if count < end else None), ()


class DummyLayer(DynamicLayer):
    """Layer of a [`DummyCache`]."""

    def __init__(self, offset: int):
        super().__init__()
        self.offset = offset
        self.is_initialized = offset > 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of the right shapes."""
        count = self.offset + key_states.shape[2]
        keys, values = (states[:, :, :1].expand(-1, -1, count, -1) for states in (key_states, value_states))
        return keys, values

    def get_seq_length(self) -> int:
        """Return the claimed number of tokens."""
        return self.offset


class DummyCache(Cache):
    """Cache that claims to hold `offset` tokens in every layer and holds none.

    Args:
        num_layers (`int`): Number of layers of the model.
        offset (`int`): Claimed number of tokens.

    Attributes:
        updated (`set[int]`): Indices of the layers that wrote to it.
    """

    def __init__(self, num_layers: int, offset: int):
        super().__init__(layers=[DummyLayer(offset)] * num_layers)
        self.updated: set[int] = set()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of the right shapes."""
        self.updated.add(layer_idx)
        return self.layers[0].update(key_states, value_states)

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        """Return the offset as a tensor, so that mask functions create the mask instead of omitting it."""
        return torch.tensor(self.layers[0].offset)


def _named(layers: Iterable[int]) -> str:
    names = [str(layer) for layer in sorted(layers)]
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"its layers {', '.join(names[:MOST_NAMED])}{more}"
