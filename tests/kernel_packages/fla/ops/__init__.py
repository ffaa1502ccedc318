"""Delta rules, one token after another in float32."""

import torch
from torch import Tensor


def normalised(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None, initial_state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Outputs `(B, T, HV, V)` and a new state `(B, HV, K, V)` in float32.

    Queries and keys are `(B, T, H, K)`, values `(B, T, HV, V)`, decays `(B, T, HV)` or `(B, T, HV, K)`.
    """
    rows, count, heads, size = v.shape
    assert q.shape == k.shape and q.shape[:2] == (rows, count) and heads % q.shape[2] == 0
    assert beta.shape == (rows, count, heads) and g.shape[:3] == (rows, count, heads)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k = (x.repeat_interleave(heads // x.shape[2], 2) for x in (q, k))
    q, k, v, g, beta = (x.to(torch.float32) for x in (q, k, v, g, beta))
    state = torch.zeros(rows, heads, q.shape[-1], size)
    if initial_state is not None:
        assert initial_state.shape == state.shape
        state = state + initial_state
    out = torch.zeros(rows, count, heads, size)
    for i in range(count):
        fading = g[:, i].exp()
        state = state * (fading[..., None, None] if g.ndim == 3 else fading[..., None])
        change = beta[:, i, :, None] * (v[:, i] - torch.einsum("bhkv,bhk->bhv", state, k[:, i]))
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, i], change)
        out[:, i] = torch.einsum("bhkv,bhk->bhv", state, q[:, i] * scale)
    return out, state
