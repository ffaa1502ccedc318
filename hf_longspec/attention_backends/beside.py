"""This package's attention for a model that other threads go on using as it was loaded.

The implementation is state of the model, so a plain forward in another thread meets whatever is set at that
moment, and it may change between its mask and its layers. Masks are therefore made as the model's own implementation
makes them; the attention function reads those of eager and sdpa as well as none.
"""

from functools import partial

from transformers import AttentionInterface, AttentionMaskInterface

from .interface import AUTOMATIC, attention_forward

# Names by the implementation that the model was loaded with. Transformers treats names with "sdpa" in them in its
# own way.
BESIDE = {"eager": f"{AUTOMATIC}_beside_eager", "sdpa": f"{AUTOMATIC}_beside_default"}


def name_beside(implementation: str | None) -> str:
    """Name of the implementation to switch to from `implementation`, registered with transformers."""
    name = BESIDE.get(implementation or "")
    if name is None:
        return AUTOMATIC
    AttentionInterface.register(name, partial(attention_forward, backend_name=None))
    AttentionMaskInterface.register(name, AttentionMaskInterface()[implementation])
    return name
