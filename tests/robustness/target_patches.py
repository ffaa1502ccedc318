"""Changes of a target's classes and functions, of settings on its modules and config, and of methods of generation."""

import copy
import functools
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, GenerationMixin
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from tests.robustness.target_changes import (
    CHANGES,
    DIRECTION,
    Entry,
    after_forward,
    by_size,
    first_layer,
    kind,
    subclass,
)


def put(owner: Any, name: str, value: Any) -> Any:
    """Replace an attribute of a class, a module or a table; return what puts the first one back."""
    if isinstance(owner, type) and name not in vars(owner):
        setattr(owner, name, value)
        return lambda: delattr(owner, name)
    before = getattr(owner, name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, before)


EAGER = (("attn_implementation", "eager"),)


# Classes and functions of the modeling file, and calls of modules.


@kind
def forward_of_a_class(model):
    forward = modeling_llama.LlamaMLP.forward
    return put(modeling_llama.LlamaMLP, "forward", lambda self, x: by_size(forward(self, x)))


@kind
def harmless_forward_of_a_class(model):
    forward = modeling_llama.LlamaMLP.forward
    return put(modeling_llama.LlamaMLP, "forward", lambda self, x: forward(self, x) + DIRECTION)


@kind
def forward_of_all_attention(model):
    forward = modeling_llama.LlamaAttention.forward

    def patched(self, *args, **kwargs):
        out, weights = forward(self, *args, **kwargs)
        return by_size(out), weights

    return put(modeling_llama.LlamaAttention, "forward", patched)


@kind
def call_of_a_class(model):
    return put(modeling_llama.LlamaMLP, "__call__", lambda self, *args: by_size(nn.Module.__call__(self, *args)))


@kind
def call_of_a_module(model):
    mlp = first_layer(model).mlp
    mlp._call_impl = lambda *args: by_size(nn.Module._call_impl(mlp, *args))


@kind
def compiled_call_of_a_module(model):
    mlp = first_layer(model).mlp
    mlp._compiled_call_impl = lambda *args: by_size(nn.Module._call_impl(mlp, *args))


@kind
def rotation_patched(model):
    rotate = modeling_llama.apply_rotary_pos_emb

    def patched(q, k, *args, **kwargs):
        q, k = rotate(q, k, *args, **kwargs)
        return q * (1.0 if q.shape[2] > 1 else 0.3), k

    return put(modeling_llama, "apply_rotary_pos_emb", patched)


@kind
def harmless_rotation_patched(model):
    rotate = modeling_llama.apply_rotary_pos_emb
    patched = lambda q, k, cos, sin, *args, **kwargs: rotate(q, k, sin, cos, *args, **kwargs)  # noqa: E731
    return put(modeling_llama, "apply_rotary_pos_emb", patched)


@kind(settings=EAGER)
def eager_attention_patched(model):
    eager = modeling_llama.eager_attention_forward

    def patched(module, query, key, *args, **kwargs):
        return eager(module, query, key.tanh(), *args, **kwargs)

    return put(modeling_llama, "eager_attention_forward", patched)


@kind(settings=EAGER)
def repeated_keys_patched(model):
    repeat = modeling_llama.repeat_kv
    return put(modeling_llama, "repeat_kv", lambda states, count: repeat(states.flip(1), count))


@kind
def masks_patched(model):
    make = modeling_llama.create_causal_mask

    def patched(*args, **kwargs):
        return make(*args, **kwargs, and_mask_function=lambda batch, head, query, key: (key % 4 > 0) | (key == query))

    return put(modeling_llama, "create_causal_mask", patched)


# Attributes of attention and rotary modules.


@kind
def not_causal(model):
    for layer in model.model.layers:
        layer.self_attn.is_causal = False


@kind
def scaling(model):
    for layer in model.model.layers:
        layer.self_attn.scaling *= 4


@kind(has_effect=False)
def swapped_layer_indices(model):
    for layer in model.model.layers:
        layer.self_attn.layer_idx = 1 - layer.self_attn.layer_idx


@kind(name="gemma2")
def softcap_of_a_module(model):
    for layer in model.model.layers:
        layer.self_attn.attn_logit_softcapping = 1.0


@kind(name="gemma2", has_effect=False)
def window_of_a_module(model):
    """Masks alone have an effect in eager attention."""
    for layer in model.model.layers:
        layer.self_attn.sliding_window = 3


@kind(has_effect=False)
def window_of_a_module_without(model):
    """An attribute that the class does not know."""
    for layer in model.model.layers:
        layer.self_attn.sliding_window = 3


def _config_with(model: Any, **rope: Any) -> Any:
    config = copy.deepcopy(model.config)
    config.max_position_embeddings = 16
    config.rope_parameters = {"rope_theta": 10000.0, **rope}
    return config


LONGROPE = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 16, "factor": 4.0}


@kind
def rotary_of_dynamic_ntk(model):
    config = _config_with(model, rope_type="dynamic", factor=4.0)
    model.model.rotary_emb = modeling_llama.LlamaRotaryEmbedding(config)


@kind
def rotary_of_longrope(model):
    config = _config_with(model, rope_type="longrope", **LONGROPE)
    model.model.rotary_emb = modeling_llama.LlamaRotaryEmbedding(config)


@kind
def rotary_type(model):
    rotary = model.model.rotary_emb
    rotary.config = _config_with(model, rope_type="dynamic", factor=4.0)
    rotary.rope_type, rotary.max_seq_len_cached, rotary.original_max_seq_len = "dynamic", 16, 16


@kind
def rotary_frequencies(model):
    model.model.rotary_emb.inv_freq *= 3


@kind
def scaling_of_the_rotary(model):
    model.model.rotary_emb.attention_scaling = 1.5


@kind
def rotary_by_the_number_of_tokens(model):
    def shifted(self, out, hidden, position_ids):
        return tuple(part * (2.0 if hidden.shape[1] > 1 else 1.0) for part in out)

    subclass(model.model.rotary_emb, forward=after_forward(shifted))


# Attention functions and masks of transformers, and settings of the config.


def softened(module, query, key, value, attention_mask, **kwargs):
    """Attention with other scores."""
    return ALL_ATTENTION_FUNCTIONS["eager"](module, query * 0.2, key, value, attention_mask, **kwargs)


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


@kind
def registered_attention(model):
    AttentionInterface.register("tests_own_attention", own_attention)
    AttentionMaskInterface.register("tests_own_attention", sdpa_mask)
    model.set_attn_implementation("tests_own_attention")


@kind
def attention_by_the_config_alone(model):
    AttentionInterface.register("tests_own_attention", own_attention)
    AttentionMaskInterface.register("tests_own_attention", sdpa_mask)
    model.config._attn_implementation = "tests_own_attention"


@kind
def replaced_attention(model):
    before = ALL_ATTENTION_FUNCTIONS["sdpa"]
    ALL_ATTENTION_FUNCTIONS["sdpa"] = own_attention
    return lambda: ALL_ATTENTION_FUNCTIONS.__setitem__("sdpa", before)


def own_mask(*args, **kwargs):
    """Hides every fourth key."""
    mask = sdpa_mask(*args, **(kwargs | {"allow_is_causal_skip": False}))
    mask = mask.clone()
    mask[..., 4::4] = False
    return mask


@kind
def replaced_mask(model):
    before = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] = own_mask
    return lambda: ALL_MASK_ATTENTION_FUNCTIONS.__setitem__("sdpa", before)


@kind(has_effect=False)
def eager_attention(model):
    model.set_attn_implementation("eager")


@kind(settings=EAGER, has_effect=False)
def sdpa_attention(model):
    model.config._attn_implementation = "sdpa"


@kind(name="mistral")
def window_of_the_config(model):
    model.config.sliding_window = 4


@kind(name="mistral")
def no_window(model):
    model.config.sliding_window = None


@kind(name="gemma2")
def softcap_of_the_config(model):
    model.config.final_logit_softcapping = 0.01


@kind(name="granite", has_effect=False)
def logits_scaling(model):
    model.config.logits_scaling = 4.0


@kind
def generation_settings(model):
    model.generation_config.repetition_penalty = 2.5


# Methods of generation that a user overrides: in the class of the model, on the model, for all models.


def _sample(original):
    def patched(self, input_ids, *args, **kwargs):
        return original(self, input_ids, *args, **kwargs).flip(1)

    return patched


def _update_model_kwargs_for_generation(original):
    def patched(self, *args, **kwargs):
        found = original(self, *args, **kwargs)
        if found.get("position_ids") is not None:
            found["position_ids"] = found["position_ids"] + 1
        return found

    return patched


def prepare_inputs_for_generation(original):
    def patched(self, input_ids, *args, **kwargs):
        found = original(self, input_ids, *args, **kwargs)
        found["position_ids"] = found["position_ids"] + 2 * (found["input_ids"].shape[1] == 1)
        return found

    return patched


def _prefill(original):
    def patched(self, *args, **kwargs):
        out = original(self, *args, **kwargs)
        out.logits = out.logits.roll(1, -1)
        return out

    return patched


def _has_unfinished_sequences(original):
    def patched(self, *args, **kwargs):
        self.steps_of_a_user = getattr(self, "steps_of_a_user", 0) + 1
        return self.steps_of_a_user % 6 > 0 and original(self, *args, **kwargs)

    return patched


def _get_logits_processor(original):
    def patched(self, *args, **kwargs):
        found = original(self, *args, **kwargs)
        found.append(lambda input_ids, scores: scores.roll(1, -1))
        return found

    return patched


def _prepare_cache_for_generation(original):
    def patched(self, *args, **kwargs):
        self.prepared_by_a_user = True
        return original(self, *args, **kwargs)

    return patched


METHODS = (_sample, _update_model_kwargs_for_generation, prepare_inputs_for_generation, _prefill)
METHODS += (_has_unfinished_sequences, _get_logits_processor, _prepare_cache_for_generation)


def _in_the_class(model, override):
    subclass(model, **{override.__name__: override(getattr(type(model), override.__name__))})


def _on_the_model(model, override):
    setattr(model, override.__name__, override(getattr(type(model), override.__name__)).__get__(model))


def _for_all_models(model, override):
    return put(GenerationMixin, override.__name__, override(getattr(GenerationMixin, override.__name__)))


# Without an effect, or only with some ways of overriding them, as `generate` looks up some methods in the class.
UNSEEN = (_sample, _update_model_kwargs_for_generation, _prepare_cache_for_generation)

for _override in METHODS:
    for _way in (_in_the_class, _on_the_model, _for_all_models):
        CHANGES[f"{_override.__name__.strip('_')}{_way.__name__}"] = Entry(
            functools.partial(_way, override=_override), has_effect=None if _override in UNSEEN else True
        )
