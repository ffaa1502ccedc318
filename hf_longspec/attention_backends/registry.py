"""The attention backends of this package: what they return, how it is merged, and the choice among them.

A backend is three functions and a `why_not`, which returns `None` for a call that the backend can compute and the
reason for any other. `select` returns the preferred backend that accepts; if none does, its error lists every reason.
`tests/attention_backends/reference.py` defines what the functions compute.

Softmax over a union of key sets needs from each part only its output and the log of its denominator:

    lse = log(sum_p exp(lse_p))        out = sum_p exp(lse_p - lse) * out_p

An attention sink is a logit without a value: it enters the denominator once, whatever the number of parts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch

from .lengths import SeqLens

AttentionState = tuple[torch.Tensor, torch.Tensor]
AttentionFunction = Callable[..., AttentionState]


def merge_attention_states(parts: Sequence[AttentionState], sinks: torch.Tensor | None = None) -> AttentionState:
    """Merge attention over disjoint key sets into attention over their union.

    Args:
        parts (sequence of `(out, lse)`): `out` of shape `(B, H, N, Dv)`, `lse` of shape `(B, H, N)`, natural logarithm.
            A part in which a query sees nothing has `out` 0 and `lse` -inf there.
        sinks (`torch.Tensor` of shape `(H,)`, *optional*): Sink logits, added once to the denominator.

    Returns:
        `(out, lse)`: `out` in the dtype of the parts, 0 where no part sees anything; `lse` with the sinks included.
        Computed in float32, or in float64 for float64 parts.
    """
    (out, lse), *others = parts
    dtype = out.dtype
    for other_out, other_lse in others:
        # sigmoid(b - a) = exp(b) / (exp(a) + exp(b)); NaN from -inf - -inf, where neither part sees anything
        weight = (other_lse - lse).sigmoid_().nan_to_num_(0.0)
        # float32: the parts are rounded already, and a weight rounded to bfloat16 as well would double the error
        out = torch.lerp(out.to(lse.dtype), other_out.to(lse.dtype), weight.unsqueeze(-1))
        lse = torch.logaddexp(lse, other_lse)
    if sinks is not None:
        sinks = sinks.to(lse.dtype)[:, None]
        out = out * (lse - sinks).sigmoid_().unsqueeze(-1)
        lse = torch.logaddexp(lse, sinks)
    return out.to(dtype), lse


def nothing_visible(query: torch.Tensor, value: torch.Tensor) -> AttentionState:
    """Return the state of queries `(B, H, N, D)` that see no key: `out` 0, `lse` -inf. Merging it changes nothing."""
    shape = query.shape[:3]
    lse = query.new_full(shape, -torch.inf, dtype=torch.promote_types(query.dtype, torch.float32))
    return value.new_zeros((*shape, value.shape[3])), lse


def concatenate(states: Sequence[AttentionState], dim: int) -> AttentionState:
    """Concatenate states of different rows (`dim` 0) or queries (`dim` 2)."""
    if len(states) == 1:
        return states[0]
    return torch.cat([out for out, _ in states], dim=dim), torch.cat([lse for _, lse in states], dim=dim)


class AttentionCall(NamedTuple):
    """The properties by which a backend accepts or refuses a call. Hashable, and equal for every step of one layer."""

    device: torch.device  # device of the tensors. Reading its type takes longer than all of `select`.
    dtype: torch.dtype  # dtype of query, key and value
    head_dim: int  # size of a query and a key vector
    value_dim: int  # size of a value vector
    softcap: float | None = None  # scores become `softcap * tanh(scores / softcap)`
    sliding_window: int | None = None  # a query sees the last `sliding_window` positions, its own included
    sinks: bool = False  # whether the layer adds sink logits to the denominator


@dataclass(frozen=True)
class AttentionBackend:
    """Three attention functions with one name."""

    name: str  # name by which users choose it: `attn_implementation=name`
    # attends N queries to the first `lengths[b]` key slots; with a window also to be given the positions it counts from
    prefix_attention: AttentionFunction
    tree_attention: AttentionFunction  # attends N queries to M keys under an explicit mask
    causal_attention: AttentionFunction  # attends the last N of S positions to all S, causally
    # returns `None` for an `AttentionCall` it accepts, or the reason for refusing
    why_not: Callable[[AttentionCall], str | None]
    # prefix, tree and merge in one, for the calls where this is faster; see torch_backend.py. Returns `None` for the
    # others.
    hybrid_attention: Callable[..., AttentionState | None] | None = None
    # prefix, tree, merge and the scores of two nodes in one pass over the keys; see triton/backend.py. Returns `None`
    # for calls whose scores it cannot write.
    attention_with_scores: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None] | None = None

    def sparse_attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        indices: torch.Tensor,
        counts: torch.Tensor,
        **options: Any,
    ) -> AttentionState:
        """Attend N queries to copies of chosen key slots.

        Args:
            query (`torch.Tensor` of shape `(B, H, N, D)`): Queries.
            key (`torch.Tensor` of shape `(B, K, S, D)`): Keys.
            value (`torch.Tensor` of shape `(B, K, S, Dv)`): Values.
            indices (`torch.LongTensor` of shape `(B, K or 1, T)`): Slots, all of which are valid.
            counts (`torch.LongTensor` of shape `(B,)`): How many of them a row attends to.
            options (`Any`): `scaling` and `softcap`.
        """
        slots = indices.expand(-1, key.shape[1], -1)[..., None]  # [B, K, T, 1]
        entries = (cached.gather(2, slots.expand(-1, -1, -1, cached.shape[3])) for cached in (key, value))
        return self.prefix_attention(query, *entries, SeqLens(None, counts), **options)


def outside_autocast(attention: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    """Return `attention(*inputs, **options)`; inside of `torch.autocast` in its dtype, with autocast off.

    Under autocast rotary embeddings give queries and keys in float32 beside values in half precision. Autocast casts
    all three for torch's own attention function and knows no others. Products of the others would lose precision.
    """
    device_type = inputs[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return attention(*inputs, **options)
    dtype = torch.get_autocast_dtype(device_type)
    tensors = (x if x.dtype == torch.float64 else x.to(dtype) for x in inputs[:3])
    with torch.autocast(device_type, enabled=False):
        return attention(*tensors, *inputs[3:], **options)


def under_autocast(backend: AttentionBackend) -> AttentionBackend:
    """Return a backend for use inside of `torch.autocast`, whose functions run [`outside_autocast`]."""
    functions = "prefix_attention", "tree_attention", "causal_attention"
    wrapped: dict[str, Any] = {name: partial(outside_autocast, getattr(backend, name)) for name in functions}
    return replace(backend, **wrapped, hybrid_attention=None, attention_with_scores=None)


_backends: dict[str, AttentionBackend] = {}
_priorities: dict[str, int | None] = {}


def register_backend(backend: AttentionBackend, priority: int | None = None) -> AttentionBackend:
    """Add a backend; among those that accept a call, the one with the highest priority runs.

    Without a priority, the backend runs only for users who choose it by name.
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
    """Return the backend for this kind of call, or raise an error that lists every candidate with its reason."""
    if name is not None and name not in _backends:
        raise ValueError(f"{name!r} is not an attention backend. Choose one of {', '.join(backend_names())}.")
    candidates = [n for n in backend_names() if _priorities[n] is not None] if name is None else [name]
    reasons = []
    for candidate in candidates:
        reason = _backends[candidate].why_not(call)
        if reason is None:
            return _backends[candidate]
        reasons.append(f"  {candidate}: {reason}")
    properties = {field: value for field, value in call._asdict().items() if value is not None and value is not False}
    shown = ", ".join(f"{field}={str(value).removeprefix('torch.')}" for field, value in properties.items())
    raise ValueError("\n".join([f"no attention backend supports this call ({shown}):", *reasons, _REMEDY]))


# Once per layer and step: a look-up without a frame of Python. Graphs call `choose`, once each.
select = lru_cache(maxsize=None)(choose)

_REMEDY = (
    "Load the model in float32, float16 or bfloat16, call generate() without assistant_model, or add a backend: see "
    "the kernel recipe in CONTRIBUTING.md."
)
