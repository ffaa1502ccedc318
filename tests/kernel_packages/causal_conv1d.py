"""A stand-in of causal-conv1d 1.7: signatures, layouts, refusals and in-place updates, in plain torch."""

from torch import Tensor, cat, float32, zeros
from torch.nn.functional import silu

from tests.kernel_packages.counted import counted

__version__ = "1.7.0"


def _weighted(windows: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """Sums of windows `(B, C, T, K)` under weights `(C, K)` in float32, in the dtype of the windows."""
    if activation not in (None, "silu", "swish"):
        raise NotImplementedError("activation must be None, silu, or swish")
    assert 2 <= weight.shape[1] <= 4, "causal_conv1d only supports width between 2 and 4"
    out = (windows.to(float32) * weight.to(float32)[:, None]).sum(-1)
    out = out if bias is None else out + bias.to(float32)[:, None]
    return (out if activation is None else silu(out)).to(windows.dtype)


@counted(lambda x, *_: x.shape[2])
def causal_conv1d_fn(
    x,
    weight,
    bias=None,
    seq_idx=None,
    initial_states=None,
    return_final_states=False,
    final_states_out=None,
    activation=None,
):
    assert seq_idx is None and initial_states is None and not return_final_states
    rows, channels, count = x.shape
    assert weight.shape[0] == channels
    if x.stride(2) != 1 and x.stride(1) != 1:
        x = x.contiguous()
    if x.stride(1) == 1 and x.stride(2) > 1:  # channels last
        assert channels % 8 == 0, "causal_conv1d only supports channel dimension divisible by 8 for now"
    size = weight.shape[1]
    padded = zeros(rows, channels, size - 1 + count, dtype=x.dtype)
    padded[..., size - 1 :] = x
    return _weighted(padded.unfold(2, size, 1), weight, bias, activation)


@counted(lambda x, *_: x.shape[2])
def causal_conv1d_update(
    x, conv_state, weight, bias=None, activation=None, cache_seqlens=None, conv_state_indices=None
):
    assert cache_seqlens is None and conv_state_indices is None
    rows, channels, count = x.shape
    places, size = conv_state.shape[2], weight.shape[1]
    assert conv_state.shape == (rows, channels, places) and places >= size - 1
    assert conv_state.dtype == x.dtype and count == 1
    inputs = cat([conv_state, x], -1)
    conv_state.copy_(inputs[..., -places:])
    return _weighted(inputs[..., None, -size:], weight, bias, activation)
