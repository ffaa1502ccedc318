"""How far two float32 results of a tiny model may lie apart if both are right: the same sums in another order.

Another order changes a sum of n terms by up to n eps of the size of its terms, and mostly by about the root of n eps;
every layer adds its own part. The rest of the bound is for what magnifies an error: sharp attention, norms of small
states. A broken rule changes a result by a hundredth and more (tests/mutations).
float64 is no way out: transformers computes norms, rotary embeddings and routers in float32 in every model.
"""

import torch

# Terms of the longest sum in a layer of a tiny model: the three states of 64 numbers that EAGLE-3 joins.
TERMS = 192


def share(layers: int) -> float:
    """Return the bound after `layers` layers, as a share of the largest number of the result."""
    return layers * TERMS * torch.finfo(torch.float32).eps


def rounding(expected: torch.Tensor, layers: int) -> dict[str, float]:
    """Tolerances of `assert_close` for a result of `layers` layers, by its largest finite number."""
    return {"rtol": 0.0, "atol": share(layers) * expected[expected.isfinite()].abs().max().item()}
