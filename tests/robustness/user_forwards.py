"""Patched forwards of users, hooks of accelerate and PEFT, and hooks on other modules than layers."""

import functools
import types
from typing import Any

import torch
from accelerate.hooks import AlignDevicesHook, ModelHook, SequentialHook, add_hook_to_module
from peft import LoraConfig, get_peft_model
from torch import nn

from tests.robustness.user_hooks import (
    DIRECTION,
    HOOKS,
    VOCAB,
    Entry,
    at_the_last_token,
    declared,
    everywhere,
    first_layer,
    hidden_of,
    kind,
    on,
)
from tests.tiny_targets import tiny_target

# Forwards in the place of a module's own.


def patch(module: nn.Module, forward: Any) -> tuple[Any, None]:
    module.forward = forward
    return lambda: vars(module).pop("forward"), None


@kind(name="steered")
def patched_forward(model):
    layer = first_layer(model)
    forward = layer.forward

    def steered(*args, **kwargs):
        output = forward(*args, **kwargs)
        at_the_last_token(layer, args, output)
        return output

    return patch(layer, steered)


@kind(name="steered")
def patched_method(model):
    layer = first_layer(model)

    def steered(self, *args, **kwargs):
        output = type(self).forward(self, *args, **kwargs)
        at_the_last_token(self, args, output)
        return output

    return patch(layer, types.MethodType(steered, layer))


@kind(name="steered")
def patched_without_gradients(model):
    layer = first_layer(model)
    forward = layer.forward

    @torch.no_grad()
    def steered(*args, **kwargs):
        return forward(*args, **kwargs) + DIRECTION

    return patch(layer, steered)


@kind(name="forward")
def patched_under_its_own_name(model):
    layer = first_layer(model)
    forward = layer.forward

    @functools.wraps(forward)
    def steered(*args, **kwargs):
        output = forward(*args, **kwargs)
        at_the_last_token(layer, args, output)
        return output

    return patch(layer, steered)


@kind(drafts=True)
def patched_and_declared(model):
    layer = first_layer(model)
    forward = layer.forward
    return patch(layer, declared(lambda *args, **kwargs: forward(*args, **kwargs) + DIRECTION))


@kind(drafts=True, has_effect=False)
def own_forward_as_attribute(model):
    layer = first_layer(model)
    return patch(layer, types.MethodType(type(layer).forward, layer))


@kind(drafts=True, has_effect=False)
def compiled_forward(model):
    mlp = first_layer(model).mlp
    return patch(mlp, torch.compile(mlp.forward, backend="eager", dynamic=True))


@kind(name="forward")
def patched_forward_of_the_model(model):
    forward = model.forward

    def steered(*args, **kwargs):
        out = forward(*args, **kwargs)
        out.logits[:, -1] = out.logits[:, -1].roll(1, -1)
        return out

    return patch(model, functools.wraps(forward)(steered))


# Hooks of accelerate and PEFT.


class LastOfAccelerate(ModelHook):
    def post_forward(self, module, output):
        at_the_last_token(module, (), output)
        return output


@kind(name="LastOfAccelerate")
def hook_of_accelerate_by_a_user(model):
    add_hook_to_module(first_layer(model), LastOfAccelerate())
    return lambda: None, None


@kind(name="LastOfAccelerate")
def sequence_of_accelerate_with_a_users(model):
    add_hook_to_module(first_layer(model), SequentialHook(AlignDevicesHook("cpu"), LastOfAccelerate()))
    return lambda: None, None


@kind(drafts=True, has_effect=False)
def hook_of_accelerate(model):
    add_hook_to_module(first_layer(model), AlignDevicesHook("cpu", io_same_device=True))
    return lambda: None, None


def adapted() -> Any:
    """A target with an adapter that is felt."""
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return get_peft_model(tiny_target("llama", vocab_size=VOCAB), config).eval()


NAMED_ADAPTERS = {"adapter_names": ["default", "__base__", "default"]}


@kind(drafts=True, has_effect=False, model=adapted, kwargs=NAMED_ADAPTERS)
def adapters_by_row(model):
    return lambda: None, None


@kind(name="at_the_last_token", model=adapted)
def hook_on_an_adapter(model):
    layer = model.base_model.model.model.layers[0].mlp.down_proj
    assert hasattr(layer, "lora_A")
    return on(layer, at_the_last_token)


@kind(drafts=True, model=adapted)
def declared_hook_on_an_adapter(model):
    return on(model.base_model.model.model.layers[0].mlp.down_proj, declared(everywhere))


# Hooks on other modules than layers.

PLACES = {
    "embedding": lambda model: model.model.embed_tokens,
    "norm": lambda model: model.model.norm,
    "attention": lambda model: first_layer(model).self_attn,
    "mlp": lambda model: first_layer(model).mlp,
    "base_model": lambda model: model.model,
}


def steer_output(module, args, output):
    hidden = output.last_hidden_state if hasattr(output, "last_hidden_state") else hidden_of(output)
    hidden.add_(DIRECTION)


def steer_last_output(module, args, output):
    hidden = output.last_hidden_state if hasattr(output, "last_hidden_state") else hidden_of(output)
    hidden[:, -1] += DIRECTION


for _name, _module_of in PLACES.items():

    def _declared(model, module_of=_module_of):
        return on(module_of(model), declared(steer_output))

    def _undeclared(model, module_of=_module_of):
        return on(module_of(model), steer_last_output)

    HOOKS[f"{_name}_declared"] = Entry(_declared, drafts=True)
    HOOKS[_name] = Entry(_undeclared, name="steer_last_output")


def roll_logits(module, args, output):
    return output.roll(1, -1)


@kind(name="roll_logits")
def head(model):
    return on(model.lm_head, roll_logits)


@kind(drafts=True)
def head_declared(model):
    return on(model.lm_head, declared(roll_logits))
