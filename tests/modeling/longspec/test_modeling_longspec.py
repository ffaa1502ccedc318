"""The training forward of the LongSpec draft."""

import torch
from transformers import DynamicCache

from hf_longspec import LongSpecDraftModel
from hf_longspec.generation.cache import CACHE_NAME
from hf_longspec.generation.target_modules import TargetParts
from tests.modeling.longspec.restated_longspec import Restated
from tests.rounding import rounding


def test_the_training_forward_is_the_restated_block(llama):
    """Row by row, at places before and after the window's edge, with a gap of its own in each row."""
    torch.manual_seed(0)
    draft = LongSpecDraftModel.from_target(llama, window=6, initializer_range=0.3)
    parts, restated = TargetParts(llama, draft.config.kv_layer), Restated(draft, llama)
    ids = torch.randint(3, 128, (2, 17))
    cache = DynamicCache()
    with torch.no_grad():
        llama(ids, **{CACHE_NAME: cache})
        layer = cache.layers[draft.config.kv_layer]
        positions = torch.arange(17).expand(2, -1)
        logits = parts.head(draft(ids, positions, layer.keys, layer.values, [1, 3], parts))
    for row, gap in enumerate([1, 3]):
        text = ids[row].tolist()
        for place in (gap, 5, 6, 11, 16):
            # gap g: the target's keys end g places before the query, as for a node of depth g - 1
            committed = text[: place - gap + 1]
            expected = restated.logits(committed, text[place - gap + 1 : place + 1], restated.target_keys(committed))
            torch.testing.assert_close(logits[row, place].double(), expected, **rounding(expected, layers=3))
