"""Mamba-1 and Mamba-2 over one token, which change the state in place."""

from torch.nn.functional import silu, softplus

from tests.kernel_packages.counted import counted


@counted(lambda *_: 1)
def selective_state_update(
    state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False, state_batch_indices=None
):
    has_heads, given = state.ndim > 3, state
    if not has_heads:  # one head
        state, x, dt, B, C = (part[:, None] for part in (state, x, dt, B, C))
        A, D, dt_bias = (None if part is None else part[None] for part in (A, D, dt_bias))
        z = None if z is None else z[:, None]
    rows, heads, size, states = state.shape
    assert state_batch_indices is None
    assert x.shape == dt.shape == (rows, heads, size) and A.shape == (heads, size, states)
    assert B.shape == C.shape and heads % B.shape[1] == 0 and B.shape[::2] == (rows, states)
    assert D is None or D.shape == (heads, size)
    assert dt_bias is None or dt_bias.shape == (heads, size)
    B, C = (part.float().repeat_interleave(heads // part.shape[1], 1)[:, :, None] for part in (B, C))
    step = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    step = (softplus(step) if dt_softplus else step)[..., None]
    new = state.float() * (step * A.float()).exp() + step * B * x.float()[..., None]
    given.copy_(new if has_heads else new[:, 0])
    out = (new * C).sum(-1)
    out = out if D is None else out + x.float() * D.float()
    out = (out if z is None else out * silu(z.float())).to(x.dtype)
    return out if has_heads else out[:, 0]
