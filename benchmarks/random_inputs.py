"""Random targets, caches, trees and attention cases, and the same step as transformers computes it.

Nothing is prefilled and nothing is downloaded. The cost of a step does not depend on the values, as long as they are
random: zeros draw less power and run faster.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Cache, DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_longspec.attention_backends.contexts import TreeContext
from hf_longspec.attention_backends.lengths import SeqLens
from hf_longspec.attention_backends.registry import AttentionBackend, AttentionState, merge_attention_states
from hf_longspec.cli.measuring import endless
from hf_longspec.generation.cache import CACHE_NAME, SpeculativeCache
from hf_longspec.generation.draft_tree import DraftTree
from hf_longspec.generation.target import TargetView
from tests.attention_backends.reference import prefix_attention, tree_attention

# Keys of the nodes are this much longer than those of the prefix. Their share of the attention is then large, and a
# wrong tree mask shows in the output, which a few keys among thousands would not.
NODE_KEY_GAIN = 6.0
# Relative difference between the logits of the two forwards. In bfloat16 each is off by about 1e-2 by itself.
LOGIT_BUDGET = {torch.float32: 1e-4, torch.float16: 5e-2, torch.bfloat16: 5e-2}

Layer = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """Sizes of the random model; the defaults are those of four layers of an 8B Llama with a small vocabulary."""

    layers: int = 4
    hidden: int = 4096
    intermediate: int = 14336
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    vocab: int = 256

    def config(self, max_length: int) -> LlamaConfig:
        sizes = {"vocab_size": self.vocab, "hidden_size": self.hidden, "intermediate_size": self.intermediate}
        sizes |= {"num_hidden_layers": self.layers, "num_attention_heads": self.heads, "head_dim": self.head_dim}
        sizes |= {"num_key_value_heads": self.kv_heads, "max_position_embeddings": max_length}
        return LlamaConfig(**sizes, attn_implementation="sdpa")


def random_target(shape: Shape, max_length: int, device: torch.device, dtype: torch.dtype) -> LlamaForCausalLM:
    """A random model without an end-of-text token, drawn on the device by transformers' own initialization."""
    with torch.device(device):
        model = LlamaForCausalLM._from_config(shape.config(max_length), dtype=dtype)
    return endless(model.eval().requires_grad_(False))


def cast(model: LlamaForCausalLM, dtype: torch.dtype) -> None:
    """Give all parameters a dtype, one after another. The rotary frequencies stay float32, as in a loaded model."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def cache_bytes(shape: Shape, batch: int, length: int, dtype: torch.dtype) -> int:
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * batch * length * dtype.itemsize


def full_cache(model: LlamaForCausalLM, batch: int, context: int, room: int, slots: int) -> SpeculativeCache:
    """Random keys and values of `context` tokens a row, with `room` for more and `slots` for nodes."""
    cache = SpeculativeCache(model.config, batch, context + room, tree_slots=slots)
    heads, size = model.config.num_key_value_heads, model.config.head_dim
    like = torch.empty(batch, heads, 1, size, device=model.device, dtype=model.dtype)
    for layer in cache.layers:
        layer.lazy_initialization(like, like)
        layer.keys.normal_()
        layer.values.normal_()
    cache.set_lengths([context] * batch)
    return cache


def random_tree(nodes: int, vocab: int, batch: int = 1, device: torch.device | str = "cpu", seed: int = 0) -> DraftTree:
    """A tree in which every node hangs below a random earlier one, the same in every row. Its mask is made already."""
    draw = random.Random(seed)
    tokens = torch.tensor([[draw.randrange(vocab) for _ in range(nodes)]]).expand(batch, -1)
    parents = torch.tensor([[-1] + [draw.randrange(node) for node in range(1, nodes)]]).expand(batch, -1)
    valid = torch.ones(batch, nodes, dtype=torch.bool)
    tree = DraftTree(tokens.to(device), parents.to(device), valid.to(device))
    assert tree.mask.shape[-1] == tree.depths.shape[-1]
    return tree


@dataclass
class DeviceAttention:
    """Attention of N nodes after prefixes of possibly different lengths, on one device."""

    lengths: tuple[int, ...]  # prefix of each row
    layers: Sequence[Layer]  # keys and values, `(B, K, at least longest + N, D)`; the nodes' slots are overwritten
    tree: DraftTree  # the nodes
    heads: int  # query heads
    query: torch.Tensor = field(init=False)
    scaling: float = field(init=False)

    def __post_init__(self) -> None:
        keys, _ = self.layers[0]
        batch, size, nodes = keys.shape[0], keys.shape[3], self.tree.num_nodes
        self.scaling = size**-0.5
        self.query = torch.randn(batch, self.heads, nodes, size, device=keys.device, dtype=keys.dtype)
        for keys, values in self.layers:
            for row, length in enumerate(self.lengths):
                place = slice(length, length + nodes)
                # long keys: a wrong tree mask then shows in the output, see NODE_KEY_GAIN
                keys[row, :, place].normal_().mul_(NODE_KEY_GAIN)
                values[row, :, place].normal_()

    @property
    def end(self) -> int:
        """Slots that the attention function is handed."""
        return max(self.lengths) + self.tree.num_nodes

    def written(self, layer: Layer) -> Layer:
        """Keys and values of prefix and nodes, of rows of one length."""
        return layer[0][:, :, : self.end], layer[1][:, :, : self.end]

    def context(self, capture: Any = None) -> TreeContext:
        lengths = SeqLens(self.lengths)
        positions = lengths.on(self.query.device)[:, None] + self.tree.depths
        return TreeContext(lengths, positions, self.tree.mask, capture)

    def attend(self, backend: AttentionBackend, layer: Layer, context: TreeContext, index: int = 0) -> torch.Tensor:
        """A backend's output, `(B, H, N, D)`."""
        inputs = self.query, *self.written(layer)
        return context.attend(backend, index, *inputs, scaling=self.scaling)

    def state(self, backend: AttentionBackend, layer: Layer) -> AttentionState:
        visible = _LogSumExp()
        out = self.attend(backend, layer, self.context(visible))
        return out, visible.lse

    def exact(self, layer: Layer) -> AttentionState:
        """The reference in float64, row by row, so that memory holds the scores of one row only."""
        nodes, rows = self.tree.num_nodes, []
        for row, length in enumerate(self.lengths):
            one = slice(row, row + 1)
            keys, values = (part[one, :, : length + nodes].double() for part in layer)
            query = self.query[one].double()
            prefix = keys[:, :, :length], values[:, :, :length]
            staged = keys[:, :, length:], values[:, :, length:]
            parts = [tree_attention(query, *staged, self.tree.mask[one], scaling=self.scaling)]
            if length:
                parts.append(prefix_attention(query, *prefix, SeqLens([length]), scaling=self.scaling))
            rows.append(merge_attention_states(parts))
        return torch.cat([out for out, _ in rows]), torch.cat([lse for _, lse in rows])


class _LogSumExp:
    """The capture of a context that keeps nothing but the log-sum-exp."""

    lse: torch.Tensor

    def collect(self, layer_idx: int, query: torch.Tensor, key: torch.Tensor, lse: torch.Tensor, **where: Any) -> None:
        self.lse = lse


def random_attention(
    shape: Shape,
    lengths: tuple[int, ...],
    nodes: int,
    layers: int,
    device: torch.device,
    dtype: torch.dtype,
) -> DeviceAttention:
    """A case with cache slots of NaN after the nodes, which no backend may read."""
    room, spare = max(lengths) + nodes, 16
    size = (len(lengths), shape.kv_heads, room + spare, shape.head_dim)
    buffers = [tuple(torch.randn(size, device=device, dtype=dtype) for _ in range(2)) for _ in range(layers)]
    for parts in buffers:
        for part in parts:
            for row, length in enumerate(lengths):
                part[row, :, length + nodes :] = torch.nan
    tree = random_tree(nodes, shape.vocab, len(lengths), device)
    return DeviceAttention(lengths, [(keys, values) for keys, values in buffers], tree, shape.heads)


def relative_error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative L2 distance; NaN stays NaN, and fails every budget."""
    return ((actual.double() - exact).norm() / exact.norm()).item()


@contextmanager
def poisoned_outputs() -> Iterator[None]:
    """Memory without values holds NaN in this context (`torch.utils.deterministic.fill_uninitialized_memory`)."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def block_mask(tree: DraftTree, prefix: int) -> torch.Tensor | None:
    """The 4-D mask `(B, 1, N, prefix + N)` of a tree; none for a lone root, which sees everything."""
    if tree.num_nodes == 1:
        return None
    visible = torch.ones(*tree.tokens.shape, prefix, dtype=torch.bool, device=tree.tokens.device)
    return torch.cat([visible, tree.mask], dim=2)[:, None]


def hf_attention(case: DeviceAttention) -> Callable[[Layer], torch.Tensor]:
    """Transformers' `sdpa` on rows of one length, `(B, H, N, D)`: keys repeated for every query head, under a mask."""
    group = case.heads // case.layers[0][0].shape[1]
    module: Any = SimpleNamespace(num_key_value_groups=group, is_causal=False, training=False)
    mask = block_mask(case.tree, case.lengths[0])

    def attend(layer: Layer) -> torch.Tensor:
        keys, values = (part[:, :, : case.end] for part in layer)
        return sdpa_attention_forward(module, case.query, keys, values, mask, scaling=case.scaling)[0].transpose(1, 2)

    return attend


def dynamic_cache(cache: SpeculativeCache, length: int, copy: Cache | None = None) -> Cache:
    """A copy of the first `length` tokens of a cache of ours, in an empty cache of transformers: a `DynamicCache`."""
    copy = DynamicCache() if copy is None else copy
    for index, layer in enumerate(cache.layers):
        copy.update(layer.keys[:, :, :length].clone(), layer.values[:, :, :length].clone(), index)
    return copy


class BothCaches:
    """A random model after a prompt, in a cache of this package and in one of transformers.

    Args:
        room (`int`): Tokens that the first cache can hold.
        options: Further arguments of [`SpeculativeCache`].
    """

    def __init__(self, config: Any, prompt: int, room: int, **options: Any):
        self.model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
        self.target, self.cache = TargetView(self.model), SpeculativeCache(config, 1, room, **options)
        self.stock: Any = DynamicCache(config=config)
        self.prompt = torch.randint(config.vocab_size, (1, prompt))
        self.token = self.prompt[:, :1]
        for cache in (self.cache, self.stock):
            self.model(input_ids=self.prompt, **{CACHE_NAME: cache}, use_cache=True)

    def forward(self) -> float:
        """Seconds of processor time of transformers' own step, without what `generate` does between steps."""
        started = time.process_time()
        position = torch.tensor([[self.stock.get_seq_length()]])
        self.model(input_ids=self.token, position_ids=position, **{CACHE_NAME: self.stock}, use_cache=True)
        return time.process_time() - started


class HfForward:
    """A forward under `sdpa` on a `DynamicCache` with the prefix of `cache`, of one length; it forgets the tree."""

    def __init__(self, model: PreTrainedModel, cache: SpeculativeCache):
        self.model = model
        self.prefix = cache.lengths.host[0]
        self.past = dynamic_cache(cache, self.prefix)
        self._stored = [(layer.keys, layer.values) for layer in self.past.layers]

    @torch.no_grad()
    def __call__(self, tree: DraftTree, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of the nodes, `(B, N, vocab)`, under the mask of [`block_mask`]."""
        logits: torch.Tensor = self.model(
            input_ids=tree.tokens,
            position_ids=self.prefix + tree.depths,
            **{CACHE_NAME: self.past},
            attention_mask=block_mask(tree, self.prefix) if mask is None else mask,
        ).logits
        for layer, (keys, values) in zip(self.past.layers, self._stored, strict=True):
            layer.keys, layer.values = keys, values  # the step appended to a copy of them
        return logits
