"""Zeros between the tokens of a row in `attention_mask`, which the windows of some targets count."""

from collections.abc import Iterator

from ..call import Call
from ..wing import Wing


class Gaps(Wing):
    """Calls with padding between tokens."""

    def why_not(self, call: Call) -> Iterator[str]:
        implementation = str(call.target.config._attn_implementation)
        if "flash" in implementation and call.prompts.counts_gaps:
            yield (
                f"attention_mask has zeros between tokens, which sliding windows under attn_implementation="
                f"{implementation!r} do not count in the prompt. Move the zeros to the left of each row, or load the "
                "model with another attn_implementation."
            )
