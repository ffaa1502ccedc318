"""Zeros between the tokens of a row in `attention_mask`, which the windows of some targets count."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from ...attention_backends.gapped import GappedContext
from ..cache import SpeculativeCache
from ..call import GAPS, Call, Prompts
from ..special_case import SpecialCase


class PromptsWithGaps(Prompts):
    """Prompts with padding between tokens. They run as chains if windows of the target count it."""

    has_gaps = True

    def __init__(self, call: Call):
        super().__init__(call)
        self.counts_gaps = self.target.hides_keys_within(call.max_length)
        self.by_chains |= self.counts_gaps

    def begin(self, cache: SpeculativeCache) -> None:
        super().begin(cache)
        columns: Any = self.columns(cache)
        if self.counts_gaps:
            cache.rows.context_of = partial(GappedContext, columns=columns)


class Gaps(SpecialCase):
    """Calls with padding between tokens."""

    case = GAPS

    def change(self, call: Call) -> None:
        call.read_as(PromptsWithGaps)

    def why_not(self, call: Call) -> Iterator[str]:
        implementation = str(call.target.config._attn_implementation)
        if "flash" in implementation and call.prompts.counts_gaps:
            yield (
                f"attention_mask has zeros between tokens, which sliding windows under attn_implementation="
                f"{implementation!r} do not count in the prompt. Move the zeros to the left of each row, or load the "
                "model with another attn_implementation."
            )
