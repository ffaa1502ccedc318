"""The attention function that transformers calls, and its registration.

`attn_implementation="hf_longspec"` takes the preferred backend for each call; `"hf_longspec_reference"` and
`"hf_longspec_torch"` insist on one. With a context (`tree=`) the context computes; without one this is ordinary
attention: causal by itself when transformers hands over no mask, under the mask otherwise. It never delegates to
transformers' own implementations: eager has no causality of its own, sdpa has no softcap and no sinks.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from .merge import merge_attention_states
from .reference import REFERENCE_BACKEND
from .registry import AttentionBackend, AttentionCall, select
from .torch_sdpa import TORCH_BACKEND

# "flash", "sdpa", "/" and "paged|" in a name make transformers do something else with it
AUTOMATIC = "hf_longspec"


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    tree: Any = None,
    backend_name: str | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer, with the signature of transformers' `AttentionInterface`."""
    head_dim = query.shape[3]
    if scaling is None:
        scaling = head_dim**-0.5
    call = AttentionCall(
        query.device.type, query.dtype, head_dim, value.shape[3], softcap, sliding_window, s_aux is not None
    )
    backend = select(call, backend_name)
    if tree is not None:
        out = tree.attend(
            backend,
            module.layer_idx,
            query,
            key,
            value,
            scaling=scaling,
            sliding_window=sliding_window,
            softcap=softcap,
            sinks=s_aux,
        )
        return out.transpose(1, 2).contiguous(), None
    if kwargs.get("indices") is not None:
        raise ValueError("indices")
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    state = _attend(backend, query, key, value, attention_mask, causal, scaling, sliding_window, softcap)
    out = state[0] if s_aux is None else merge_attention_states([state], s_aux)[0]
    return out.transpose(1, 2).contiguous(), None


def _attend(
    backend: AttentionBackend,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    if mask is not None:  # the window is in it already, as transformers' eager expects too
        return backend.tree_attention(query, key, value, mask[..., : key.shape[2]], scaling=scaling, softcap=softcap)
    if causal:
        window = {"sliding_window": sliding_window}
        return backend.causal_attention(query, key, value, scaling=scaling, softcap=softcap, **window)
    batch, length = key.shape[0], key.shape[2]
    lengths = torch.full((batch,), length, device=key.device)
    host = {"host_lengths": (length,) * batch}
    return backend.prefix_attention(query, key, value, lengths, scaling=scaling, softcap=softcap, **host)


def attention_mask(
    *,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> torch.Tensor | None:
    sdpa_mask: Callable[..., torch.Tensor | None] = AttentionMaskInterface()["sdpa"]
    aligned = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    if allow_is_causal_skip and aligned and (attention_mask is None or bool(attention_mask.all())):
        return None
    return sdpa_mask(
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        attention_mask=attention_mask,
        allow_is_causal_skip=False,
        **kwargs,
    )


def register() -> None:
    """Make the backends known to transformers. Harmless to repeat."""
    for name in (AUTOMATIC, REFERENCE_BACKEND.name, TORCH_BACKEND.name):
        backend_name = None if name == AUTOMATIC else name
        AttentionInterface.register(name, partial(attention_forward, backend_name=backend_name))
        AttentionMaskInterface.register(name, attention_mask)
