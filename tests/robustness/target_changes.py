"""Changes that users make to a target, its class or the functions it runs, before or after a good call with a draft.

Some have the same effect on every token, and a draft may be used after them. Others depend on the size of a forward or
on the length of the cache. Methods of `generate` that a user overrides are in tests/generation/test_structure.py.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.models.llama import modeling_llama

from tests.robustness.user_code import DIRECTION, Applied, Entry, first_layer, replaced

EAGER = (("attn_implementation", "eager"),)
MLP = "model.layers.0.mlp"

CHANGES: dict[str, Entry] = {}


def kind(change: Any = None, **facts: Any) -> Any:
    """Add a function of a model to the list, under its name; it returns what takes back what is not on the model."""
    if change is None:
        return functools.partial(kind, **facts)
    CHANGES[change.__name__] = Entry(change, **facts)
    return change


# Ways to make a change.


def subclass(module: nn.Module, **methods: Any) -> None:
    """Give a module another class, as a user may."""
    module.__class__ = type(f"Changed{type(module).__name__}", (type(module),), methods)


def after_forward(change: Callable[..., Any], path: str = MLP) -> Callable[[Any], None]:
    """Return what gives a module a class whose forward returns `change(output, **arguments)`."""

    def forward(self, *args, **kwargs):
        return change(super(type(self), self).forward(*args, **kwargs), **kwargs)

    return lambda model: subclass(model.get_submodule(path), forward=forward)


def patched(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Callable[[Any], Applied]:
    """Return what replaces a function of a class or a Python module by what `wrap` makes of it."""
    return lambda model: replaced(owner, name, wrap(getattr(owner, name)))


def each_attention(**attributes: Any) -> Callable[[Any], None]:
    """Return what sets attributes of all attention modules; a function gets the value before."""

    def change(model):
        for layer in model.model.layers:
            for name, value in attributes.items():
                before = getattr(layer.self_attn, name, None)
                setattr(layer.self_attn, name, value(before) if callable(value) else value)

    return change


def by_size(hidden: torch.Tensor, **_: Any) -> torch.Tensor:
    """Return hidden states `(B, N, D)` moved by a direction if there are several tokens."""
    return hidden + DIRECTION[: hidden.shape[-1]] if hidden.shape[1] > 1 else hidden


# Modules that are swapped, replaced or put in another order.


@kind
def wrapped_layer(model):
    class Wrapper(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, hidden_states, **kwargs):
            hidden = self.layer(hidden_states, **kwargs)
            return torch.cat([hidden[:, :-1], hidden[:, -1:] + DIRECTION], 1)

    model.model.layers[0] = Wrapper(first_layer(model))


@kind
def a_layer_less(model):
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1


@kind
def norm(model):
    model.model.norm = nn.LayerNorm(64)


# Weights, and the mode of the model.


@kind
def weights_in_place(model):
    with torch.no_grad():
        first_layer(model).mlp.down_proj.weight.mul_(-1)


@kind(has_effect=False)
def double_precision(model):
    model.double()


@kind
def added_adapter(model):
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        inject_adapter_in_model(config, model).eval()


# Layers that treat forwards or tokens differently.


def by_length(out, cache=None, past_key_values=None, **_):
    held = cache if cache is not None else past_key_values
    return out + DIRECTION * (int(held.get_seq_length()) % 3)


LAYER = "model.layers.0"
CHANGES |= {
    "forward of one token": Entry(after_forward(by_size)),
    # as many as a tree may have, and never as few as a check may take
    "forward of few tokens": Entry(
        after_forward(lambda out, **_: out + DIRECTION * (8 < out.shape[1] or out.shape[1] == 1))
    ),
    "length of the cache": Entry(after_forward(by_length, LAYER)),
    # plain `generate` shows a head one token of each row
    "head by size": Entry(
        after_forward(lambda out, **_: out.roll(int(out.shape[1] > 1), -1), "lm_head"), has_effect=False
    ),
}


# Classes and functions of the modeling file, and calls of modules.


def one_token_rotated(rotate):
    def patched(q, k, *args, **kwargs):
        q, k = rotate(q, k, *args, **kwargs)
        return q * (1.0 if q.shape[2] > 1 else 0.3), k

    return patched


def keys_squashed(attend):
    return lambda module, query, key, *args, **kwargs: attend(module, query, key.tanh(), *args, **kwargs)


OF_LLAMA = modeling_llama.LlamaMLP
CHANGES |= {
    "forward of a class": Entry(patched(OF_LLAMA, "forward", lambda own: lambda self, x: by_size(own(self, x)))),
    "rotation by size": Entry(patched(modeling_llama, "apply_rotary_pos_emb", one_token_rotated)),
    "eager attention of the file": Entry(
        patched(modeling_llama, "eager_attention_forward", keys_squashed), settings=EAGER
    ),
}


# Attributes of attention and rotary modules.


@kind
def rotary_of_dynamic_ntk(model):
    config = copy.deepcopy(model.config)
    config.max_position_embeddings = 16
    config.rope_parameters = {"rope_theta": 10000.0, "rope_type": "dynamic", "factor": 4.0}
    model.model.rotary_emb = modeling_llama.LlamaRotaryEmbedding(config)


CHANGES |= {
    "not causal": Entry(each_attention(is_causal=False)),
    "scaling": Entry(each_attention(scaling=lambda before: 4 * before)),
    "softcap of modules": Entry(each_attention(attn_logit_softcapping=1.0), name="gemma2"),
    # masks alone have an effect in eager attention
    "window of modules": Entry(each_attention(sliding_window=3), name="gemma2", has_effect=False),
}


# Attention functions and masks of transformers, and settings of configs.


def own_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """Attention of a user, with a softcap."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = (query @ key.transpose(2, 3) * (scaling or query.shape[-1] ** -0.5)).tanh() * 2
    if attention_mask is not None:
        is_seen = attention_mask if attention_mask.dtype == torch.bool else attention_mask >= 0
        scores = scores.masked_fill(~is_seen, -1e9)
    elif query.shape[2] > 1:
        is_seen = torch.ones(query.shape[2], key.shape[2]).tril(key.shape[2] - query.shape[2]).bool()
        scores = scores.masked_fill(~is_seen, -1e9)
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None


def own_mask(*args, **kwargs):
    """Hides every fourth key."""
    mask = sdpa_mask(*args, **(kwargs | {"allow_is_causal_skip": False})).clone()
    mask[..., 4::4] = False
    return mask


def replaced_mask(model):
    """Replace the mask of sdpa in the table of transformers."""
    before = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] = own_mask
    return Applied(undo=lambda: ALL_MASK_ATTENTION_FUNCTIONS.__setitem__("sdpa", before))


def registered_attention(model):
    """Register attention of a user, and choose it for a model."""
    AttentionInterface.register("tests_own_attention", own_attention)
    AttentionMaskInterface.register("tests_own_attention", sdpa_mask)
    model.set_attn_implementation("tests_own_attention")


def of_config(**fields: Any) -> Callable[[Any], None]:
    """Return what sets fields of the config of a model."""
    return lambda model: vars(model.config).update(fields)


CHANGES |= {
    "registered attention": Entry(registered_attention),
    "replaced mask": Entry(replaced_mask),
    "window of the config": Entry(of_config(sliding_window=4), name="mistral"),
    "softcap of the config": Entry(of_config(final_logit_softcapping=0.01), name="gemma2"),
}
