"""One verification behind a long prefix: our backend against the masked block of transformers' `sdpa`."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..attention_backends.contexts import TreeContext
from ..attention_backends.interface import attention_forward
from ..attention_backends.merge import merge_attention_states
from ..attention_backends.reference import prefix_attention, tree_attention
from ..generation.cache import SpeculativeCache
from ..generation.draft_tree import DraftTree
from ..generation.target import TargetView
from .timing import seconds_of
from .verification_inputs import Layer

# Keys of the nodes are this much longer than those of the prefix. Their share of the attention is then large, and a
# wrong tree mask shows in the output, which a few keys among thousands would not.
NODE_KEY_GAIN = 6.0
# Relative error of the attention against float64: at most that of plain torch in the same dtype, times the factor.
FLOAT32_FLOOR, FLOAT32_FACTOR, BFLOAT16_FACTOR = 2e-6, 1.5, 2.0
# Relative difference between the logits of the two forwards. In bfloat16 each is off by about 1e-2 by itself.
LOGIT_BUDGET = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


def block_mask(tree: DraftTree, prefix: int) -> torch.Tensor | None:
    """What transformers' `sdpa` needs: `(1, 1, N, prefix + N)`, or nothing for a lone root, which sees everything."""
    if tree.num_nodes == 1:
        return None
    seen = torch.ones(1, tree.num_nodes, prefix, dtype=torch.bool)
    return torch.cat([seen, tree.mask], dim=2)[:, None]


@dataclass
class AttentionCase:
    """Attention alone: N nodes behind `prefix` entries, layer after layer so that no cache level holds what is read.

    Args:
        attention (`torch.nn.Module`): Attention layer of the model; both functions read their settings off it.
        layers (`list`): Keys and values, `(1, K, at least prefix + N, D)`; the nodes' slots are overwritten.
        tree ([`DraftTree`]): The nodes.
        prefix (`int`): Entries before them.
    """

    attention: Any
    layers: list[Layer]
    tree: DraftTree
    prefix: int
    query: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(2)
        keys, nodes = self.layers[0][0], self.tree.num_nodes
        heads = keys.shape[1] * self.attention.num_key_value_groups
        self.query = torch.randn(1, heads, nodes, keys.shape[3], generator=generator).to(keys.dtype)
        self.mask = block_mask(self.tree, self.prefix)
        for keys, _ in self.layers:
            own = torch.randn(1, keys.shape[1], nodes, keys.shape[3], generator=generator)
            keys[:, :, self.prefix : self.prefix + nodes] = NODE_KEY_GAIN * own

    def hf(self, layer: Layer) -> torch.Tensor:
        """Transformers' `sdpa`, `(1, N, H, D)`."""
        scaling = self.attention.scaling
        return sdpa_attention_forward(self.attention, self.query, *self._written(layer), self.mask, scaling=scaling)[0]

    def ours(self, layer: Layer, context: TreeContext | None = None) -> torch.Tensor:
        """Our backend, `(1, N, H, D)`."""
        context, scaling = context or self.context(), self.attention.scaling
        return attention_forward(
            self.attention, self.query, *self._written(layer), self.tree.mask[:, None], scaling=scaling, tree=context
        )[0]

    def exact(self, layer: Layer) -> torch.Tensor:
        """The reference in float64, `(1, N, H, D)`."""
        keys, values = (part.double() for part in self._written(layer))
        query, lengths, scaling = self.query.double(), torch.tensor([self.prefix]), self.attention.scaling
        inside, behind = slice(0, self.prefix), slice(self.prefix, None)
        parts = [
            prefix_attention(query, keys[:, :, inside], values[:, :, inside], lengths, scaling=scaling),
            tree_attention(query, keys[:, :, behind], values[:, :, behind], self.tree.mask, scaling=scaling),
        ]
        return merge_attention_states(parts)[0].transpose(1, 2)

    def errors(self) -> tuple[float, float, float]:
        """Relative errors of ours and of `sdpa` in the first layer, and what ours may have."""
        exact = self.exact(self.layers[0])
        ours, hf = (relative_error(side(self.layers[0]), exact) for side in (self.ours, self.hf))
        if self.query.dtype == torch.float32:
            return ours, hf, max(FLOAT32_FLOOR, FLOAT32_FACTOR * hf)
        return ours, hf, BFLOAT16_FACTOR * hf

    def sides(self) -> dict[str, Callable[[], float]]:
        """Functions that return the seconds per layer of one pass over all layers."""

        def ours() -> None:
            context = self.context()  # one per forward, as in a model
            for layer in self.layers:
                self.ours(layer, context)

        def hf() -> None:
            for layer in self.layers:
                self.hf(layer)

        return {"hf": lambda: seconds_of(hf) / len(self.layers), "ours": lambda: seconds_of(ours) / len(self.layers)}

    def context(self) -> TreeContext:
        """What our backend is told about one forward."""
        lengths = torch.tensor([self.prefix])
        return TreeContext(lengths, (self.prefix,), self.tree.depths, self.tree.mask)

    def _written(self, layer: Layer) -> Layer:
        end = self.prefix + self.tree.num_nodes
        return layer[0][:, :, :end], layer[1][:, :, :end]


class ForwardCase:
    """The whole forward: `TargetView.verify` on a preallocated cache against the same model with a `DynamicCache`.

    Args:
        model (`LlamaForCausalLM`): Under `sdpa`, in the dtype of the cache.
        cache ([`SpeculativeCache`]): Holds the prefix. The other side reads the same keys and values.
        tree ([`DraftTree`]): The nodes.
    """

    def __init__(self, model: LlamaForCausalLM, cache: SpeculativeCache, tree: DraftTree):
        self.model = model
        self.cache = cache
        self.tree = tree
        self.prefix = cache.host_lengths[0]
        self.mask = block_mask(tree, self.prefix)

    def hf(self) -> tuple[float, torch.Tensor]:
        """Seconds and logits of transformers' forward. The growing cache copies itself, as it does in `generate`."""
        past = DynamicCache()
        for index, layer in enumerate(self.cache.layers):
            past.update(layer.keys[:, :, : self.prefix], layer.values[:, :, : self.prefix], index)
        positions = self.prefix + self.tree.depths
        logits: list[torch.Tensor] = []

        def forward() -> None:
            output = self.model(
                input_ids=self.tree.tokens, position_ids=positions, past_key_values=past, attention_mask=self.mask
            )
            logits.append(output.logits)

        return seconds_of(forward), logits[0]

    def ours(self) -> tuple[float, torch.Tensor]:
        """Seconds and logits of our verification; choosing the attention implementation is not in it."""
        target, logits = TargetView(self.model), []
        with target.attention():
            seconds = seconds_of(lambda: logits.append(target.verify(self.tree, self.cache).logits))
        self.cache.rollback()
        return seconds, logits[0]

    def errors(self) -> tuple[float, float, float]:
        """Relative difference of the logits, what it may be, and the seconds that both sides took."""
        (ours_seconds, ours), (hf_seconds, hf) = self.ours(), self.hf()
        return relative_error(ours, hf.double()), LOGIT_BUDGET[self.model.dtype], ours_seconds + hf_seconds

    def sides(self) -> dict[str, Callable[[], float]]:
        """Functions that return seconds."""
        return {"hf": lambda: self.hf()[0], "ours": lambda: self.ours()[0]}


def relative_error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative L2 distance; not a number stays one, and fails every budget."""
    return ((actual.double() - exact).norm() / exact.norm()).item()
