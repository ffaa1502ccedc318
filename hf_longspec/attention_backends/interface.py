"""The attention function that transformers calls, and its registration.

`attn_implementation="hf_longspec"` uses the preferred backend for every call; `"hf_longspec_torch"`,
`"hf_longspec_triton"` and `"hf_longspec_fa"` require one. With a context (`tree=`), the
context computes (contexts.py). Without one this is ordinary attention: causal if transformers passes no mask, under the
mask otherwise. No call is delegated to transformers' own implementations, as eager is not causal without a mask, and
sdpa has neither softcap nor sinks.
"""

from functools import partial
from typing import Any

import torch
from torch.nn.functional import dropout as drop
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from .flash import FLASH_BACKEND
from .lengths import SeqLens
from .registry import (
    AttentionBackend,
    AttentionCall,
    AttentionState,
    choose,
    merge_attention_states,
    outside_autocast,
    select,
)
from .torch_backend import TORCH_BACKEND
from .triton.backend import TRITON_BACKEND

BACKENDS: tuple[AttentionBackend, ...] = (TORCH_BACKEND, TRITON_BACKEND, FLASH_BACKEND)

# Transformers handles names with "flash", "sdpa", "/" or "paged|" in a special way.
AUTOMATIC = "hf_longspec"
# Names beside the implementation that a model was loaded with.
BESIDE = {"eager": f"{AUTOMATIC}_beside_eager", "sdpa": f"{AUTOMATIC}_beside_default"}

REFUSED = {
    "indices": "the model selects keys for each query (DSA); attending to all of them would change its output",
    "position_bias": "the model adds a learned bias to the scores",
    "cache": "continuous batching keeps keys in pages",
}


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
    trial: Any = None,
    backend_name: str | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute the attention of one layer, with the signature of transformers' `AttentionInterface`.

    Args:
        module (`torch.nn.Module`): The attention layer: `layer_idx`, `is_causal` and `config` are read.
        attention_mask (`torch.Tensor` of shape `(B, 1 or H, N, >= S)`, *optional*):
            Boolean or additive, causality and window included. Without one, the N queries are the last of S positions.
        sliding_window (`int`, *optional*): Window of the layer. A [`WindowMask`] brings its own.
        tree (*optional*): [`TreeContext`], [`SparseContext`] or any other object with their `attend`.
        trial (*optional*): Called with the arguments instead of a backend; returns the output `(B, N, H, Dv)`.
        backend_name (`str`, *optional*): Require this backend.

    Returns:
        `torch.Tensor` of shape `(B, N, H, Dv)`, contiguous, and None in place of the weights.
    """
    if torch.is_autocast_enabled(query.device.type):
        kwargs |= {"scaling": scaling, "dropout": dropout, "sliding_window": sliding_window, "softcap": softcap}
        kwargs |= {"s_aux": s_aux, "tree": tree, "trial": trial, "backend_name": backend_name}
        return outside_autocast(partial(attention_forward, module), query, key, value, attention_mask, **kwargs)
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    if trial is not None:
        return trial(module, query, key, value, attention_mask, sliding_window, causal, kwargs), None
    if isinstance(attention_mask, WindowMask):
        sliding_window, attention_mask = attention_mask.sliding_window, None
    if scaling is None:
        scaling = query.shape[3] ** -0.5
    sizes = (query.shape[3], value.shape[3])
    call = AttentionCall(query.device, query.dtype, *sizes, softcap, sliding_window, s_aux is not None)
    backend = (choose if torch.compiler.is_compiling() else select)(call, backend_name)
    options: dict[str, Any] = {"scaling": scaling, "sliding_window": sliding_window, "softcap": softcap, "sinks": s_aux}
    for name, reason in REFUSED.items():
        if kwargs.get(name) is not None:
            raise ValueError(
                f"hf_longspec attention does not support {name}: {reason}. "
                'Load the model with another attn_implementation, such as "eager".'
            )
    if tree is not None:
        out = tree.attend(backend, module.layer_idx, query, key, value, **options)
        return out.transpose(1, 2).contiguous(), None
    mask = None if attention_mask is None else attention_mask[..., : key.shape[2]]
    if dropout > 0.0 or (torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))):
        out = differentiable_attention(query, key, value, mask, causal=causal, dropout=dropout, **options)
        return out.transpose(1, 2).contiguous(), None
    state: AttentionState
    if mask is not None:  # it includes the window, as for transformers' eager attention
        state = backend.tree_attention(query, key, value, mask, scaling=scaling, softcap=softcap)
    elif causal:
        window = {"sliding_window": sliding_window}
        state = backend.causal_attention(query, key, value, scaling=scaling, softcap=softcap, **window)
    else:
        lengths = SeqLens.equal(key.shape[2], key.shape[0])
        state = backend.prefix_attention(query, key, value, lengths, scaling=scaling, softcap=softcap)
    return merge_attention_states([state], s_aux)[0].transpose(1, 2).contiguous(), None


def differentiable_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    causal: bool,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Compute attention with gradients, for fine-tuning a model on this implementation.

    The backends return a log-sum-exp, for which the fused ops have no gradient. This costs the memory of ordinary
    attention. Queries that see nothing get 0. `mask` `(B, 1 or H, N, S)` includes causality and window.
    """
    nodes, length = query.shape[2], key.shape[2]
    plain = mask is None and softcap is None and sinks is None
    if plain and (not causal or (nodes == length and (sliding_window is None or sliding_window >= length))):
        return scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=causal, scale=scaling, enable_gqa=True
        )
    if mask is None and causal:
        distance = torch.arange(length - nodes, length, device=query.device)[:, None]
        distance = distance - torch.arange(length, device=query.device)
        mask = distance >= 0 if sliding_window is None else (distance >= 0) & (distance < sliding_window)
    groups = query.shape[1] // key.shape[1]
    products = query @ key.repeat_interleave(groups, dim=1).transpose(2, 3)
    scores = products.to(torch.promote_types(query.dtype, torch.float32)) * scaling  # [B, H, N, S]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    visible = None
    if mask is not None:
        visible = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min
        scores = scores if mask.dtype == torch.bool else scores + mask
        # not -inf: softmax of a row of -inf is NaN, forward and backward
        scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    if sinks is not None:
        column = sinks.to(scores.dtype).reshape(1, -1, 1, 1).expand(scores.shape[0], -1, nodes, 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(dim=-1)[..., :length]
    if visible is not None:
        weights = weights.masked_fill(~visible, 0.0)
    return drop(weights, dropout).to(value.dtype) @ value.repeat_interleave(groups, dim=1)


def attention_mask(*, allow_is_causal_skip: bool = True, **options: Any) -> torch.Tensor | None:
    """Return the mask of a forward, with the signature of transformers' `AttentionMaskInterface`.

    If the queries are the last of the keys' positions and nothing is padded, `attention_forward` needs no entries:
    `None` for a causal mask, a [`WindowMask`] for the config's sliding window. Otherwise, for instance with chunks, the
    boolean `sdpa_mask` `(B, 1, q_length, kv_length)` of transformers.
    """
    queries, keys, size = options["q_length"], options["kv_length"], options.get("local_size")
    first, offset = options.get("q_offset", 0), options.get("kv_offset", 0)
    is_last = isinstance(first, int) and first + queries == offset + keys
    if allow_is_causal_skip and is_last and _nothing_padded(options.get("attention_mask")):
        if size is None or size > keys:
            return None
        if size == getattr(options.get("config"), "sliding_window", None) and not torch.compiler.is_compiling():
            return WindowMask.of(options["batch_size"], queries, keys, size, options.get("device", "cpu"))
    mask: torch.Tensor | None = AttentionMaskInterface()["sdpa"](allow_is_causal_skip=False, **options)
    return mask


def register(*backends: AttentionBackend) -> None:
    """Register the backends of this package, and others, with transformers under their names. It may be repeated."""
    for name in (None, *(backend.name for backend in (*BACKENDS, *backends))):
        AttentionInterface.register(name or AUTOMATIC, partial(attention_forward, backend_name=name))
        AttentionMaskInterface.register(name or AUTOMATIC, attention_mask)


def name_beside(implementation: str | None) -> str:
    """Register the implementation of this package for a model that was loaded with another one, and return its name.

    The implementation is state of the model, so it may change in the middle of a plain forward in another thread,
    between the mask and the layers. Masks are therefore created by the model's own implementation. The attention
    function supports the masks of eager and sdpa, and no mask.
    """
    name = BESIDE.get(implementation or "")
    if name is None:
        return AUTOMATIC
    AttentionInterface.register(name, partial(attention_forward, backend_name=None))
    AttentionMaskInterface.register(name, AttentionMaskInterface()[implementation])
    return name


def _nothing_padded(attention_mask: torch.Tensor | None) -> bool:
    if attention_mask is None:
        return True
    # reading the values of a tensor would break the graph
    return not torch.compiler.is_compiling() and bool(attention_mask.all())


class WindowMask(torch.Tensor):
    """Causal mask of a sliding window, `(B, 1, N, S)`, for queries that are the last N of S positions.

    It has the shape of that mask, the dtype `torch.bool` and no memory for entries. An attention function reads
    `sliding_window` instead. All other operations run on the whole mask, which is computed for them.
    """

    sliding_window: int

    @classmethod
    def of(cls, batch_size: int, queries: int, keys: int, sliding_window: int, device: Any) -> "WindowMask":
        """Return the mask of this shape on a device."""
        one = torch.zeros((), dtype=torch.bool, device=device)
        mask = one.expand(batch_size, 1, queries, keys).as_subclass(cls)
        mask.sliding_window = sliding_window
        return mask

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run properties and copies to a device without entries, and all other operations on the whole mask."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func.__name__ in _PROPERTIES:
                return func(*args, **kwargs)
            if func is torch.Tensor.to and (mask := func(*args, **kwargs)).dtype == torch.bool:
                batch_size, _, queries, keys = mask.shape
                return cls.of(batch_size, queries, keys, args[0].sliding_window, mask.device)
            args, kwargs = torch.utils._pytree.tree_map_only(cls, cls.entries, (args, kwargs))
            return func(*args, **kwargs)

    def entries(self) -> torch.Tensor:
        """Return the boolean mask itself."""
        batch_size, _, queries, keys = self.shape
        positions = torch.arange(keys - queries, keys, device=self.device)[:, None]
        distance = positions - torch.arange(keys, device=self.device)
        return ((distance >= 0) & (distance < self.sliding_window)).expand(batch_size, 1, -1, -1)


# Properties of a tensor that need no entries; attributes arrive as `__get__`.
_PROPERTIES = {"__get__", "dim", "size", "stride", "numel", "__len__", "is_floating_point", "get_device", "ndimension"}
