"""Fused kernels in captured steps, `compile="fused"`: norms, rotary embeddings and activations of known layers.

A captured step of a Llama layer in 16 bits has about forty launches, of which seven are matrix products and two are
attention; most others are small operations of norms, rotary embeddings and activations. While a step is captured, the
modules of `FAMILIES` run kernels of `attention_backends/triton/layers.py` in their place. The model is not changed: the
forwards are replaced for the thread that captures, and only until the capture ends.

A module is replaced if its class has a known name, its forward is that of its class, and a comparison on small inputs
shows that both forwards agree up to rounding. All other modules run as they are.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import partial
from inspect import unwrap
from types import FunctionType
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from ..attention_backends.triton.layers import add_norm, rotate_and_write, silu_mul
from .cache import CACHE_NAME
from .step_cache import StepCache
from .target_modules import ROTATION

logger = logging.get_logger(__name__)

# Models of transformers whose layers compute what `FORWARDS` computes.
FAMILIES = ("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Qwen3Moe")
# Modules, and what they run as `forward(module, ...)`.
Replaced = list[tuple[nn.Module, Callable[..., Any]]]
# Largest difference of two forwards that agree, in rounding steps of the largest result.
MOST_STEPS = 16
TOKENS = 3  # of the comparison
_NOTHING_FUSED = "compile='fused': no module of %s has a fused kernel, so its steps are captured as with 'graph'."


class FusedRunner:
    """Run functions with fused kernels, inside of [`CapturedRunner`]."""

    compiles = False

    def __init__(self) -> None:
        self._replaced: dict[nn.Module, Replaced] = {}  # as every captured function runs several times

    def __call__(self, function, shape, inputs, fixed, module, holder) -> Any:
        """Return `function(inputs, *fixed)`; see [`CapturedRunner`] for the arguments."""
        if module not in self._replaced:
            self._replaced[module] = fused_modules(module)
        with fused(self._replaced[module]):
            return function(inputs, *fixed)


def fused_modules(model: nn.Module) -> Replaced:
    """Return the modules of `model` that have fused kernels, with their forwards."""
    replaced = [(module, forward) for module in model.modules() if (forward := fused_forward(module)) is not None]
    if not replaced and not getattr(model, "_is_longspec_draft", False):
        logger.warning_once(_NOTHING_FUSED, type(model).__name__)
    return replaced


@contextmanager
def fused(replaced: Replaced) -> Iterator[None]:
    """Let this thread run fused kernels in place of these modules."""
    thread = threading.get_ident()
    try:
        for module, forward in replaced:
            module.forward = partial(_in_thread, thread, module, forward)
        yield
    finally:
        for module, _ in replaced:
            vars(module).pop("forward", None)


def _in_thread(thread: int, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run the fused forward in one thread, and that of the class in all others."""
    if threading.get_ident() != thread:
        return type(module).forward(module, *args, **kwargs)
    return forward(module, *args, **kwargs)


def fused_forward(module: nn.Module) -> Callable[..., Any] | None:
    """Return the fused forward of a module as `forward(module, ...)`, or `None` if the module runs as it is."""
    kind = FORWARDS.get(type(module).__name__)
    if kind is None or "forward" in vars(module):
        return None
    forward, agrees = kind
    implementation = getattr(getattr(module, "config", None), "_attn_implementation", None)
    hooked = tuple(bool(one._forward_hooks or one._forward_pre_hooks) for one in module.children())
    places = tuple((x.dtype, x.device) for x in module.parameters())
    key = type(module), repr(module), implementation, hooked, places
    if key not in _verdicts:
        try:
            _verdicts[key] = bool(agrees(module))
        except Exception as error:  # of a module of another form, or of Triton, whose errors share no class
            logger.info("longspec: %s is not fused: %s", type(module).__name__, error)
            _verdicts[key] = False
    return forward if _verdicts[key] else None


# Whether the forward of a class agrees with the fused one, by sizes, dtypes, devices and hooks.
_verdicts: dict[tuple, bool] = {}


def norm_forward(norm: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Compute an RMS norm by one kernel."""
    return add_norm(hidden_states, None, norm.weight, norm.variance_epsilon)[0]


def mlp_forward(mlp: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Compute a gated MLP, its activation and product by one kernel."""
    return mlp.down_proj(silu_mul(mlp.gate_proj(hidden_states), mlp.up_proj(hidden_states)))


def layer_forward(layer: Any, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """Compute a layer with norms before attention and MLP, the first residual sum and the second norm by one kernel."""
    attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **kwargs)
    norm = layer.post_attention_layernorm
    normed, total = add_norm(attended, hidden_states, norm.weight, norm.variance_epsilon)
    return total + layer.mlp(normed)


def attention_forward(attention: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute an attention module, the rotation and the write to the cache of a step by one kernel.

    It is the forward of the class, with another function in place of `apply_rotary_pos_emb`.
    """
    forward = unwrap(type(attention).forward)
    if isinstance(cache := kwargs.get(CACHE_NAME), StepCache):
        kwargs[CACHE_NAME] = rotating = _RotatingCache(cache)
        names = {**forward.__globals__, ROTATION: rotating.rotate}
        defaults, closure = forward.__defaults__, forward.__closure__
        forward = FunctionType(forward.__code__, names, forward.__name__, defaults, closure)
    return forward(attention, *args, **kwargs)


class _RotatingCache:
    """The cache of a step in one layer. It gets queries and keys that are not rotated yet."""

    def __init__(self, cache: StepCache):
        self.cache = cache

    def rotate(self, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple:
        """Keep what the kernel needs. `update` rotates the query in place, and no one reads it before."""
        if cos.shape[-1] != query.shape[-1] or cos.dtype != query.dtype:
            raise ValueError(
                f"factors of {cos.shape[-1]} numbers in {cos.dtype} for queries of {query.shape[-1]} in {query.dtype}: "
                "the kernel rotates whole vectors by factors of their dtype."
            )
        self.query, self.cos, self.sin = query, cos, sin
        return query, key

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate the query and the keys, write keys and values, and return the used part of both buffers."""
        (keys, values), (_, slots, end) = self.cache.buffers[layer_idx], self.cache.places[layer_idx]
        rotate_and_write(self.query, key_states, value_states, self.cos, self.sin, keys, values, slots)
        return keys[:, :, :end], values[:, :, :end]


def _mlp_agrees(mlp: Any) -> bool:
    hidden_states = _numbers(mlp.gate_proj, TOKENS, mlp.gate_proj.in_features)
    return _agree(type(mlp).forward(mlp, hidden_states), mlp_forward(mlp, hidden_states))


def _norm_agrees(norm: Any) -> bool:
    hidden_states = _numbers(norm, TOKENS, len(norm.weight))
    return _agree(type(norm).forward(norm, hidden_states), norm_forward(norm, hidden_states))


def _layer_agrees(layer: Any) -> bool:
    """Compare without the attention, which is compared by itself."""
    norms = layer.input_layernorm, layer.post_attention_layernorm
    if any(norm._forward_hooks or norm._forward_pre_hooks or fused_forward(norm) is None for norm in norms):
        return False  # `layer_forward` does not call the second one
    twin = copy(layer)
    twin._modules = layer._modules | {"self_attn": _Halved()}
    hidden_states = _numbers(norms[0], 1, TOKENS, len(norms[0].weight))
    return _agree(type(layer).forward(twin, hidden_states), layer_forward(twin, hidden_states))


class _Halved(nn.Module):
    """Stands for the attention in a comparison of layers."""

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
        return hidden_states / 2, None


def _attention_agrees(attention: Any) -> bool:
    """Compare the queries that reach the attention function, and the keys and values in the cache."""
    size, layers = attention.head_dim, attention.layer_idx + 1
    kv_heads = attention.k_proj.out_features // size
    hidden_states = _numbers(attention.q_proj, 1, TOKENS, attention.q_proj.in_features)
    angles = _numbers(attention.q_proj, 1, TOKENS, size // 2).repeat(1, 1, 2)
    slots = torch.arange(TOKENS, device=angles.device) + 1
    found = []
    for forward in (type(attention).forward, attention_forward):
        keys, values = (angles.new_zeros(1, kv_heads, TOKENS + 2, size) for _ in range(2))
        cache = StepCache([(keys, values)] * layers, [(True, slots, None)] * layers)
        reached: list[torch.Tensor] = []

        def trial(module: Any, query: torch.Tensor, *args: Any, reached: list = reached) -> torch.Tensor:
            reached.append(query)
            return query.transpose(1, 2).contiguous()

        options = {"position_embeddings": (angles.cos(), angles.sin()), "attention_mask": None, "trial": trial}
        forward(attention, hidden_states=hidden_states, **{CACHE_NAME: cache}, **options)
        (query,) = reached
        found.append((query, keys, values))
    return all(map(_agree, *found))


def _numbers(module: Any, *shape: int) -> torch.Tensor:
    """Return different numbers between -1 and 1, without a random generator, like the weight of a module."""
    count = torch.Size(shape).numel()
    numbers = torch.arange(1, count + 1, dtype=torch.float32, device=module.weight.device)
    return (numbers * numbers).sin().view(shape).to(module.weight.dtype)


def _agree(expected: torch.Tensor, found: torch.Tensor) -> bool:
    """Return whether two results are equal up to rounding."""
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return False
    step = torch.finfo(expected.dtype).eps * expected.abs().max().float()
    return bool((expected.float() - found.float()).abs().max() <= MOST_STEPS * step)


# By the suffix of a class: its fused forward, and the comparison that allows it.
_KINDS = {
    "RMSNorm": (norm_forward, _norm_agrees),
    "MLP": (mlp_forward, _mlp_agrees),
    "DecoderLayer": (layer_forward, _layer_agrees),
    "Attention": (attention_forward, _attention_agrees),
}
FORWARDS = {f"{family}{suffix}": kind for family in FAMILIES for suffix, kind in _KINDS.items()}
