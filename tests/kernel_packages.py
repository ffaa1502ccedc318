"""Stand-ins of fla-core 0.6, mamba-ssm 2.3 and causal-conv1d 1.7 in plain torch, and models that call them.

They have the layouts, dtypes, refusals and updates in place of the packages. Of their arguments they have those that
transformers needs; it leaves out what a function does not have.
"""

import functools
import importlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch.nn.functional import silu, softplus

# Calls by the name of the function and the number of tokens.
CALLS: Counter[tuple[str, int]] = Counter()
# Functions by name that run in place of a stand-in and get it as their first argument. Transformers looks stand-ins up
# when it imports a model's module and keeps them, so a test cannot replace them later.
FAULTS: dict[str, Callable[..., Any]] = {}
# By name; the functions below are entered in them.
MODULES: dict[str, ModuleType] = {}


def stand_in(
    function: Callable[..., Any], module: str, tokens: Callable[..., int], name: str | None = None
) -> Callable[..., Any]:
    """Enter a function in a module, count its calls by `tokens` of its arguments, and let `FAULTS` change it."""
    name = name or function.__name__

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        CALLS[name, tokens(*args)] += 1
        if (fault := FAULTS.get(name)) is not None:
            return fault(function, *args, **kwargs)
        return function(*args, **kwargs)

    wrapper.__module__, wrapper.__name__ = module, name
    setattr(module_of(module), name, wrapper)
    return wrapper


def module_of(name: str) -> ModuleType:
    """Return a module, which is made and set as an attribute of its package the first time."""
    if name not in MODULES:
        MODULES[name] = module = ModuleType(name)
        # transformers looks for a package by its specification, and asks it for its version
        module.__spec__, module.__version__ = ModuleSpec(name, None), "2.3"
        package, _, last = name.rpartition(".")
        if package:
            setattr(module_of(package), last, MODULES[name])
    return MODULES[name]


@contextmanager
def with_packages(model: Any, **faults: Any) -> Iterator[Any]:
    """Yield a model of the same class and weights, whose module is imported again where the stand-ins are found.

    `faults` are functions that run in place of stand-ins and get them as their first argument.
    """
    name, kind = type(model).__module__, type(model).__name__
    before = sys.modules.pop(name)
    package, _, module_name = name.rpartition(".")
    sys.modules.update(MODULES)
    CALLS.clear()
    FAULTS.update(faults)
    try:
        copy = getattr(importlib.import_module(name), kind)(model.config).eval().to(model.dtype)
        copy.load_state_dict(model.state_dict())
        copy.generation_config.eos_token_id = None
        yield copy
    finally:
        FAULTS.clear()
        for module in MODULES:
            del sys.modules[module]
        sys.modules[name] = before
        # An import also sets the module as an attribute of its package, where the classes of `Auto` are looked up.
        setattr(sys.modules[package], module_name, before)


def normalised(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def recurrence(q, k, v, g, beta, scale, initial_state):
    """Outputs `(B, T, HV, V)` and a new state `(B, HV, K, V)` of a delta rule in float32, one token after another.

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


def chunk(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False):
    """A delta rule over a text."""
    if initial_state is not None:
        assert initial_state.dtype == torch.float32, "initial_state must be in float32."
    if use_qk_l2norm_in_kernel:
        q, k = (normalised(x.float()).to(x.dtype) for x in (q, k))
    out, state = recurrence(q, k, v, g, beta, scale, initial_state)
    return out.to(q.dtype), state if output_final_state else None


def fused_recurrent(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False
):
    """A delta rule over single tokens."""
    if use_qk_l2norm_in_kernel:
        q, k = normalised(q.float()), normalised(k.float())
    out, state = recurrence(q, k, v, g, beta, scale, initial_state)
    return out.to(v.dtype), state if output_final_state else None


def causal_conv1d_fn(x, weight, bias=None, activation=None):
    """A convolution over a text that begins without a state."""
    rows, channels, count = x.shape
    assert weight.shape[0] == channels
    if x.stride(2) != 1 and x.stride(1) != 1:
        x = x.contiguous()
    if x.stride(1) == 1 and x.stride(2) > 1:  # channels last
        assert channels % 8 == 0, "causal_conv1d only supports channel dimension divisible by 8 for now"
    size = weight.shape[1]
    padded = torch.zeros(rows, channels, size - 1 + count, dtype=x.dtype)
    padded[..., size - 1 :] = x
    return weighted(padded.unfold(2, size, 1), weight, bias, activation)


def causal_conv1d_update(x, conv_state, weight, bias=None, activation=None):
    """A convolution over one token, which changes the state in place."""
    rows, channels, count = x.shape
    places, size = conv_state.shape[2], weight.shape[1]
    assert conv_state.shape == (rows, channels, places) and places >= size - 1
    assert conv_state.dtype == x.dtype and count == 1
    inputs = torch.cat([conv_state, x], -1)
    conv_state.copy_(inputs[..., -places:])
    return weighted(inputs[..., None, -size:], weight, bias, activation)


def weighted(windows, weight, bias, activation):
    """Sums of windows `(B, C, T, K)` under weights `(C, K)` in float32, in the dtype of the windows."""
    if activation not in (None, "silu", "swish"):
        raise NotImplementedError("activation must be None, silu, or swish")
    assert 2 <= weight.shape[1] <= 4, "causal_conv1d only supports width between 2 and 4"
    out = (windows.to(torch.float32) * weight.to(torch.float32)[:, None]).sum(-1)
    out = out if bias is None else out + bias.to(torch.float32)[:, None]
    return (out if activation is None else silu(out)).to(windows.dtype)


def selective_scan_fn(
    u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, return_last_state=False
):
    """Mamba-1 over a text that begins without a state."""
    rows, channels, count = u.shape
    states = A.shape[1]
    assert delta.shape == u.shape and A.shape == (channels, states) and A.dtype == torch.float32
    assert B.shape == C.shape == (rows, states, count) and (z is None or z.shape == u.shape)
    assert D is None or D.dtype == torch.float32
    assert delta_bias is None or delta_bias.dtype == torch.float32
    step = delta.float() if delta_bias is None else delta.float() + delta_bias[:, None]
    step = softplus(step) if delta_softplus else step
    state, out = torch.zeros(rows, channels, states), torch.zeros(rows, channels, count)
    for i in range(count):
        now = step[:, :, i, None]
        state = state * (now * A).exp() + now * B[:, None, :, i].float() * u[:, :, i, None].float()
        out[:, :, i] = (state * C[:, None, :, i].float()).sum(-1)
    out = out if D is None else out + u.float() * D[:, None]
    out = (out if z is None else out * silu(z.float())).to(u.dtype)
    # the kernel leaves the states beside the decays of its chunks
    chunks = torch.stack([torch.ones_like(state), state], -1).flatten(-2)[:, :, None]
    return (out, chunks[:, :, -1, 1::2]) if return_last_state else out


def selective_state_update(state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False):
    """Mamba-1 and Mamba-2 over one token, which change the state in place."""
    has_heads, given = state.ndim > 3, state
    if not has_heads:  # one head
        state, x, dt, B, C = (part[:, None] for part in (state, x, dt, B, C))
        A, D, dt_bias = (None if part is None else part[None] for part in (A, D, dt_bias))
        z = None if z is None else z[:, None]
    rows, heads, size, states = state.shape
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
    dt_softplus=False,
    dt_limit=(0.0, float("inf")),
    return_final_states=False,
):
    """Mamba-2 over a text."""
    rows, count, heads, size = x.shape
    groups, states = B.shape[2:]
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


def of_training(*args, **kwargs):
    raise AssertionError("only training runs this function")


for rule in ("gated_delta_rule", "kda"):
    for function in (chunk, fused_recurrent):
        stand_in(function, f"fla.ops.{rule}", lambda q, *_: q.shape[1], f"{function.__name__}_{rule}")
for function in (causal_conv1d_fn, causal_conv1d_update):
    stand_in(function, "causal_conv1d", lambda x, *_: x.shape[2])
stand_in(selective_scan_fn, "mamba_ssm.ops.selective_scan_interface", lambda u, *_: u.shape[2])
stand_in(selective_state_update, "mamba_ssm.ops.triton.selective_state_update", lambda *_: 1)
stand_in(mamba_chunk_scan_combined, "mamba_ssm.ops.triton.ssd_combined", lambda x, *_: x.shape[1])
stand_in(of_training, "mamba_ssm.ops.selective_scan_interface", lambda *_: 0, "mamba_inner_fn")
stand_in(of_training, "mamba_ssm.ops.triton.ssd_combined", lambda *_: 0, "mamba_split_conv1d_scan_combined")
