"""Mamba-2 over a text."""

import torch
from torch.nn.functional import silu, softplus

from tests.kernel_packages.counted import counted


@counted(lambda x, *_: x.shape[1])
def mamba_chunk_scan_combined(
    x,
    dt,
    A,
    B,
    C,
    chunk_size,
    D=None,
    z=None,
    dt_bias=None,
    initial_states=None,
    seq_idx=None,
    cu_seqlens=None,
    dt_softplus=False,
    dt_limit=(0.0, float("inf")),
    return_final_states=False,
    return_varlen_states=False,
):
    rows, count, heads, size = x.shape
    groups, states = B.shape[2:]
    assert seq_idx is None and cu_seqlens is None and not return_varlen_states
    assert dt.shape == (rows, count, heads) and A.shape == (heads,) and heads % groups == 0
    assert B.shape == C.shape == (rows, count, groups, states)
    state = torch.zeros(rows, heads, size, states)
    if initial_states is not None:
        assert initial_states.shape == state.shape
        state = state + initial_states
    step = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    step = (softplus(step) if dt_softplus else step).clamp(*dt_limit)
    inputs, (B, C) = x.float(), (part.float().repeat_interleave(heads // groups, 2) for part in (B, C))
    out = torch.zeros(rows, count, heads, size)
    for i in range(count):
        now = step[:, i, :, None, None]
        state = state * (now * A.float()[:, None, None]).exp() + now * inputs[:, i, ..., None] * B[:, i, :, None]
        out[:, i] = (state * C[:, i, :, None]).sum(-1)
    out = out if D is None else out + inputs * (D.float() if D.ndim == 2 else D.float()[:, None])
    out = (out if z is None else out * silu(z.float())).to(x.dtype)
    return (out, state) if return_final_states else out


def mamba_split_conv1d_scan_combined(
    zxbcdt,
    conv1d_weight,
    conv1d_bias,
    dt_bias,
    A,
    D,
    chunk_size,
    initial_states=None,
    seq_idx=None,
    dt_limit=(0.0, float("inf")),
    return_final_states=False,
    activation="silu",
    rmsnorm_weight=None,
    rmsnorm_eps=1e-6,
    outproj_weight=None,
    outproj_bias=None,
    headdim=None,
    ngroups=1,
    norm_before_gate=True,
):
    raise AssertionError("only training runs this function")
