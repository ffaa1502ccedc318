"""This package's attention for a model that other threads keep using with its own implementation.

The implementation is state of the model, so it may change in the middle of a plain forward in another thread, between
the mask and the layers. Masks are therefore created by the model's own implementation. The attention function supports
the masks of eager and sdpa, and no mask.
"""

from functools import partial

from transformers import AttentionInterface, AttentionMaskInterface

from .interface import AUTOMATIC, attention_forward

# Names by the implementation that the model was loaded with. They do not contain "sdpa", as transformers handles names
# with "sdpa" in a special way.
BESIDE = {"eager": f"{AUTOMATIC}_beside_eager", "sdpa": f"{AUTOMATIC}_beside_default"}


def name_beside(implementation: str | None) -> str:
    """Register the implementation that replaces `implementation` with transformers, and return its name."""
    name = BESIDE.get(implementation or "")
    if name is None:
        return AUTOMATIC
    AttentionInterface.register(name, partial(attention_forward, backend_name=None))
    AttentionMaskInterface.register(name, AttentionMaskInterface()[implementation])
    return name
