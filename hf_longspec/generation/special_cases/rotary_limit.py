"""Targets whose rotary frequencies depend on the largest position of a forward.

Most rotary embeddings rotate a token by its position alone. Two kinds also depend on the largest position of a forward
(`dynamic_rope_update` in transformers):

- longrope has two sets of frequencies, and forwards beyond `original_max_position_embeddings` use the second one;
- dynamic NTK computes new frequencies for every new largest position beyond `max_position_embeddings`.

The longest row of a batch decides the frequencies of all rows. A call is served if all its forwards have the same
frequencies: if its text ends before the change or, with longrope, if a prompt is beyond it. That row stays in every
forward, also when it has ended.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from ..cache import CACHE_NAME
from ..call import Call
from ..special_case import SpecialCase
from ..target import ROTARY_LIMIT, TargetView


class FrequencyChange(NamedTuple):
    """A change of the frequencies of a target."""

    column: int  # the first position under other frequencies
    is_repeated: bool  # whether they change again at every position after it


def changes_of(target: TargetView) -> list[FrequencyChange]:
    """Return the changes of a target's rotary embeddings, in order; those of some types of layers may be others."""
    modules = [module for module in target.model.modules() if "rope_type" in vars(module)]
    found = (_changes_in(module, getattr(module, "config", target.config)) for module in modules or [None])
    return sorted({change for changes in found for change in changes})


def _changes_in(module: Any, config: Any) -> Iterator[FrequencyChange]:
    """Yield the changes of a rotary embedding, for each kind of layer, or of a config without one."""
    parameters = getattr(config, "rope_parameters", None) or {}
    of_layer_types = {name: value for name, value in parameters.items() if isinstance(value, dict)}
    for name, one in (of_layer_types or {None: parameters}).items():
        kind = getattr(module, "rope_type", one.get("rope_type", one.get("type", "default")))
        kind = str(kind.get(name, "default") if isinstance(kind, dict) else kind)
        if "dynamic" in kind:
            length = getattr(module, "original_max_seq_len", None) or config.max_position_embeddings
            # One position earlier: a forward of exactly this length keeps the frequencies of the last forward, and only
            # a shorter one resets them.
            yield FrequencyChange(length - 1, True)
        elif kind == "longrope" or "long_mscale" in one:  # phimoe changes its scale with every rope type
            yield FrequencyChange(one["original_max_position_embeddings"], False)


class RotaryFrequencies(SpecialCase):
    """Targets with a change of rotary frequencies."""

    case = ROTARY_LIMIT

    def column_of(self, target: TargetView) -> float:
        """Return the first position under other frequencies."""
        return min((change.column for change in changes_of(target)), default=math.inf)

    def why_not(self, call: Call) -> Iterator[str]:
        """Yield a reason if the forwards of plain `generate` have several sets of frequencies."""
        changes, prompts = changes_of(call.target), call.prompts
        if not changes or call.max_length <= (first := changes[0].column):
            return
        longest, stored = max(map(len, prompts.texts)), max(prompts.past_lengths)
        begins_after = longest > (last := changes[-1].column) and not 0 < stored <= last and not prompts.by_chains
        is_chunked = prompts.chunk_size is not None and prompts.chunk_size < longest - stored
        # whole prompts beyond the change, as the last token decides the frequencies; states would get it twice
        prompts.is_whole = begins_after
        is_repeated = any(change.is_repeated for change in changes)
        if is_repeated or not begins_after or is_chunked or call.target.has_states:
            yield (
                f"max_length={call.max_length} with prompts of up to {longest} tokens, {stored} of them in {CACHE_NAME}"
                f": rotary frequencies change at position {first} (rope_parameters), which a draft cannot cross. Keep "
                f"max_length at {first} or below, or pass a longer prompt, whole and in a new cache, to a target with "
                "longrope and without recurrent states."
            )
