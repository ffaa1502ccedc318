"""The same step as transformers computes it: masked attention, and a forward on a `DynamicCache`."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from benchmarks.random_inputs import DeviceAttention, Layer
from hf_longspec.generation.cache import SpeculativeCache
from hf_longspec.generation.draft_tree import DraftTree


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


def dynamic_cache(cache: SpeculativeCache, length: int) -> DynamicCache:
    """A copy of the first `length` tokens of a cache of ours, as transformers' own."""
    copy = DynamicCache()
    for index, layer in enumerate(cache.layers):
        copy.update(layer.keys[:, :, :length].clone(), layer.values[:, :, :length].clone(), index)
    return copy


class HfForward:
    """Transformers' forward of a tree on a `DynamicCache` with the same keys and values, which it forgets again.

    Args:
        model (`PreTrainedModel`): Under `sdpa`.
        cache ([`SpeculativeCache`]): Holds the prefix of rows of one length.
    """

    def __init__(self, model: PreTrainedModel, cache: SpeculativeCache):
        self.model = model
        self.prefix = cache.lengths.host[0]
        self.past = dynamic_cache(cache, self.prefix)
        self._stored = [(layer.keys, layer.values) for layer in self.past.layers]

    @torch.no_grad()
    def __call__(self, tree: DraftTree, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of the nodes, `(B, N, vocab)`.

        Args:
            mask (`torch.BoolTensor`, *optional*): That of [`block_mask`], if it is not to be made here.
        """
        logits: torch.Tensor = self.model(
            input_ids=tree.tokens,
            position_ids=self.prefix + tree.depths,
            past_key_values=self.past,
            attention_mask=block_mask(tree, self.prefix) if mask is None else mask,
        ).logits
        for layer, (keys, values) in zip(self.past.layers, self._stored, strict=True):
            layer.keys, layer.values = keys, values  # the step appended to a copy of them
        return logits
