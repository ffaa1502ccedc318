"""Zeros between the tokens of a row in `attention_mask`, which the windows of some targets count."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from ...attention_backends.contexts import TreeContext
from ...attention_backends.gapped import GappedContext
from ..call import Call
from ..wing import Wing


class Gaps(Wing):
    """Calls with padding between tokens."""

    def context_of(self, columns: torch.Tensor) -> Callable[..., TreeContext]:
        """Return what makes contexts for texts whose tokens stand in these columns `(batch, T)`."""
        return partial(GappedContext, columns=columns)

    def why_not(self, call: Call) -> Iterator[str]:
        implementation = str(call.target.config._attn_implementation)
        if "flash" in implementation and call.prompts.counts_gaps:
            yield (
                f"attention_mask has zeros between tokens, which sliding windows under attn_implementation="
                f"{implementation!r} do not count in the prompt. Move the zeros to the left of each row, or load the "
                "model with another attn_implementation."
            )
