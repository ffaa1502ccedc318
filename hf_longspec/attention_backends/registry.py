"""The attention backends of this package, and the choice among them.

A backend is four functions and a `why_not`, which returns `None` for a call that the backend can compute and the
reason for any other. `select` returns the preferred backend that accepts; if none does, its error lists every reason.
`tests/attention_backends/reference.py` defines what the functions compute.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

AttentionFunction = Callable[..., tuple[torch.Tensor, torch.Tensor]]

WINDOW_WITHOUT_POSITIONS = (
    "sliding_window is {}, but positions is None: a window is counted from the position of each query. "
    "Pass positions of shape (batch, num_nodes)."
)


class AttentionCall(NamedTuple):
    """The properties by which a backend accepts or refuses a call. Hashable, and equal for every step of one layer.

    Args:
        device (`torch.device`): Device of the tensors. Reading its type takes longer than all of `select`.
        dtype (`torch.dtype`): Dtype of query, key and value.
        head_dim (`int`): Size of a query and a key vector.
        value_dim (`int`): Size of a value vector.
        softcap (`float`, *optional*): Scores become `softcap * tanh(scores / softcap)`.
        sliding_window (`int`, *optional*): A query sees the last `sliding_window` positions, its own included.
        sinks (`bool`, *optional*, defaults to `False`): Whether the layer adds sink logits to the denominator.
    """

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    value_dim: int
    softcap: float | None = None
    sliding_window: int | None = None
    sinks: bool = False


@dataclass(frozen=True)
class AttentionBackend:
    """Four attention functions with one name.

    Args:
        name (`str`): Name by which users choose it: `attn_implementation=name`.
        prefix_attention (`Callable`): Attends N queries to the first `lengths[b]` key slots.
        tree_attention (`Callable`): Attends N queries to M keys under an explicit mask.
        sparse_attention (`Callable`): Attends N queries to chosen key slots.
        causal_attention (`Callable`): Attends the last N of S positions to all S, causally.
        why_not (`Callable`): Returns `None` for an `AttentionCall` it accepts, or the reason for refusing.
        hybrid_attention (`Callable`, *optional*):
            Prefix, tree and merge in one, for the calls where this is faster; see torch_fused.py. Returns `None` for
            the others.
        scored_attention (`Callable`, *optional*):
            Prefix, tree, merge and the scores of two nodes in one pass over the keys; see triton/backend.py.
            Returns `None` for calls whose scores it cannot write.
    """

    name: str
    prefix_attention: AttentionFunction
    tree_attention: AttentionFunction
    sparse_attention: AttentionFunction
    causal_attention: AttentionFunction
    why_not: Callable[[AttentionCall], str | None]
    hybrid_attention: Callable[..., tuple[torch.Tensor, torch.Tensor] | None] | None = None
    scored_attention: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None] | None = None


def outside_autocast(attention: Callable[..., Any], *tensors: torch.Tensor) -> Any:
    """Return `attention(*tensors)`; inside of `torch.autocast` in its dtype, with autocast off.

    Under autocast rotary embeddings give queries and keys in float32 beside values in half precision. Autocast casts
    all three for torch's own attention function and knows no others. Products of the others would lose precision.

    Args:
        attention (`Callable`): Function of a query, a key and a value.
        tensors (`torch.Tensor`): Query, key and value.
    """
    device_type = tensors[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return attention(*tensors)
    dtype = torch.get_autocast_dtype(device_type)
    with torch.autocast(device_type, enabled=False):
        return attention(*(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors))


_backends: dict[str, AttentionBackend] = {}
_priorities: dict[str, int | None] = {}


def register_backend(backend: AttentionBackend, priority: int | None = None) -> AttentionBackend:
    """Add a backend.

    Args:
        backend ([`AttentionBackend`]): The backend.
        priority (`int`, *optional*):
            Among the backends that accept a call, the one with the highest priority runs. Without a priority, the
            backend runs only for users who choose it by name.

    Raises:
        ValueError: If another backend has this name.
    """
    if _backends.setdefault(backend.name, backend) is not backend:
        raise ValueError(f"an attention backend named {backend.name!r} exists already. Choose another name.")
    _priorities[backend.name] = priority
    select.cache_clear()
    return backend


def backend_names() -> list[str]:
    """Return the names of the registered backends: the preferred one first, those that run only by name last."""
    return sorted(_backends, key=lambda name: -1 if (rank := _priorities[name]) is None else rank, reverse=True)


def why_not(name: str, call: AttentionCall) -> str | None:
    """Return the reason of backend `name` for refusing a call; `None` if it accepts."""
    return _backends[name].why_not(call)


def why_not_dtype(call: AttentionCall, dtypes: Sequence[torch.dtype]) -> str | None:
    """Return the reason for refusing every dtype but these; `None` if the call has one of them."""
    if call.dtype in dtypes:
        return None
    return f"dtype is {call.dtype}, expected one of {', '.join(map(str, dtypes))}"


def choose(call: AttentionCall, name: str | None = None) -> AttentionBackend:
    """Return the backend for this kind of call.

    Args:
        call ([`AttentionCall`]): Device, dtype, sizes and features of the call.
        name (`str`, *optional*): Require this backend. By default, the preferred one that accepts.

    Raises:
        ValueError: If no backend accepts the call; the message lists every candidate with its reason.
    """
    if name is not None and name not in _backends:
        raise ValueError(f"{name!r} is not an attention backend. Choose one of {', '.join(backend_names())}.")
    candidates = [n for n in backend_names() if _priorities[n] is not None] if name is None else [name]
    reasons = []
    for candidate in candidates:
        reason = _backends[candidate].why_not(call)
        if reason is None:
            return _backends[candidate]
        reasons.append(f"  {candidate}: {reason}")
    raise ValueError("\n".join([f"no attention backend supports this call ({_describe(call)}):", *reasons, _REMEDY]))


# Once per layer and step: a look-up without a frame of Python. Graphs call `choose`, once each.
select = lru_cache(maxsize=None)(choose)

_REMEDY = (
    "Load the model in float32, float16 or bfloat16, call generate() without assistant_model, or add a backend: see "
    "the kernel recipe in CONTRIBUTING.md."
)


def _describe(call: AttentionCall) -> str:
    used = {field: value for field, value in call._asdict().items() if value is not None and value is not False}
    return ", ".join(f"{field}={str(value).removeprefix('torch.')}" for field, value in used.items())
