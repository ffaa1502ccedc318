"""Hooks and patched forwards that users put on a target: with and without a declaration, and those of libraries.

A hook that says `stateless = True` is used with a draft after a comparison, one of a library at once. Any other is
decoded without the draft, and never called before. There is an entry for each way to put code on a model, and for each
effect that a comparison may find.
"""

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from accelerate.hooks import AlignDevicesHook, ModelHook, SequentialHook, add_hook_to_module
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.robustness.user_code import DIRECTION, Applied, Entry, hidden_of

LAYER, MLP = "model.layers.0", "model.layers.0.mlp"
ADAPTED = "base_model.model.model.layers.0.mlp.down_proj"


def undeclared(apply: Any, name: str, **facts: Any) -> Entry:
    """Return an entry whose reason names the code, and proposes a declaration."""
    return Entry(apply, drafts=False, reason=f"{name}.* on .*only its owner knows.*stateless = True", **facts)


def lie(function: Any, reason: str = "does not treat all tokens alike", **facts: Any) -> Entry:
    """Return an entry of a forward hook that declares what is not true."""
    pattern = f"{function.__name__} on .*declares stateless, and {reason}"
    return Entry(hook(declared(function)), drafts=False, reason=pattern, is_lie=True, **facts)


def declared(function: Any) -> Any:
    """Return a copy of a function that says that it treats all tokens alike."""
    copied = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    return told(copied, True)


def told(function: Any, is_stateless: bool) -> Any:
    """Declare something of a function or an object, and return it."""
    function.stateless = is_stateless
    return function


# Ways to put code on a model.


def hook(function: Any, path: str = LAYER, register: str = "register_forward_hook", **options: Any) -> Any:
    """Return what registers a hook on the module at a path."""

    def apply(model):
        return Applied(undo=getattr(model.get_submodule(path), register)(function, **options).remove)

    return apply


def hook_of_all(function: Any, register: str = "register_module_forward_hook") -> Any:
    """Return what registers a hook on all modules of torch."""
    return lambda model: Applied(undo=getattr(torch.nn.modules.module, register)(function).remove)


def recorder(model):
    """Put a bound method on a layer, which notes how often and with how many tokens it is called."""

    class Recorder:
        def __init__(self):
            self.seen = []

        def keep(self, module, args, output):
            self.seen.append(hidden_of(output).shape[1])

    one = Recorder()
    return Applied(state=lambda: one.seen, undo=model.get_submodule(LAYER).register_forward_hook(one.keep).remove)


def bound_builtin(model):
    """Put a method of a dict on a layer, which keeps the last arguments."""
    seen = {}
    handle = model.get_submodule(LAYER).register_forward_pre_hook(seen.__setitem__)
    return Applied(state=lambda: [hidden_of(args).shape for args in seen.values()], undo=handle.remove)


def forward(make: Callable[[nn.Module, Any], Any], path: str = LAYER) -> Any:
    """Return what puts a function in the place of the forward of a module; `make` gets the module and its forward."""

    def apply(model):
        module = model.get_submodule(path)
        vars(module)["forward"] = make(module, module.forward)

    return apply


def of_accelerate(*hooks: ModelHook) -> Any:
    """Return what adds hooks of accelerate to a layer, as a sequence if there are several."""
    one = hooks[0] if len(hooks) == 1 else SequentialHook(*hooks)

    def apply(model):
        add_hook_to_module(model.get_submodule(LAYER), one)

    return apply


def adapted(model: Any) -> Any:
    """Return a target with an adapter that is felt."""
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return get_peft_model(model, config).eval()


# What hooks do.


def everywhere(module, args, output):
    hidden_of(output).add_(DIRECTION)


def before(module, args):
    args[0].add_(DIRECTION)


def at_the_last_token(module, args, output):
    hidden_of(output)[:, -1] += DIRECTION


def a_little_at_the_last_token(module, args, output):
    """By a hundredth of the norm."""
    last = hidden_of(output)[:, -1]
    last += 0.01 * last.norm(dim=-1, keepdim=True) * DIRECTION / DIRECTION.norm()


def of_several_tokens(module, args, output):
    if hidden_of(output).shape[1] > 1:
        hidden_of(output).add_(DIRECTION)


def of_one_token(module, args, output):
    if hidden_of(output).shape[1] == 1:
        hidden_of(output).add_(DIRECTION)


def of_whole_prompts(module, args, output):
    """Of as many tokens as the prompts of the calls have."""
    if hidden_of(output).shape[1] == 13:
        hidden_of(output).add_(DIRECTION)


def of_single_tokens_alone(module, args, output):
    if hidden_of(output).shape[1] not in (1, 13):
        raise RuntimeError("not one token")


def of_rows_together(module, args, output):
    hidden_of(output).add_(hidden_of(output).mean((0, 1)) * 0.5)


def by_position(module, args, kwargs, output):
    hidden_of(output).add_(DIRECTION * (kwargs["position_ids"] % 3 == 1)[..., None])


def of_layers(module, args, output):
    if type(module).__name__ == "LlamaDecoderLayer":
        everywhere(module, args, output)


def before_layers(module, args):
    if type(module).__name__ == "LlamaMLP":
        before(module, args)


def roll_logits(module, args, output):
    return output.roll(1, -1)


class Steer(nn.Module):
    """A hook that is a module, so that code of torch calls it."""

    def __init__(self):
        super().__init__()
        self.direction = nn.Parameter(DIRECTION.clone())

    def forward(self, module, args, output):
        return hidden_of(output) + self.direction


class Declared:
    """An object that says that its methods treat all tokens alike."""

    stateless = True

    def steer(self, module, args, output):
        everywhere(module, args, output)


class LastOfAccelerate(ModelHook):
    def post_forward(self, module, output):
        at_the_last_token(module, (), output)
        return output


def steered(module, own):
    """Return a forward with a direction at the last token."""

    def steered(*args, **kwargs):
        output = own(*args, **kwargs)
        at_the_last_token(module, args, output)
        return output

    return steered


class LastTokens(nn.Module):
    def forward(self, hidden):
        return torch.cat([hidden[:, :-1], hidden[:, -1:] + DIRECTION], 1)


def in_a_sequence(module, own):
    """Return a method of a class of torch, which calls modules of a user."""
    copied = type(module)(module.config)
    copied.load_state_dict(module.state_dict())
    return nn.Sequential(copied, LastTokens()).forward


def as_method(module, own):
    return types.MethodType(lambda self, *args, **kwargs: type(self).forward(self, *args, **kwargs) + DIRECTION, module)


HOOKS: dict[str, Entry] = {
    # hooks on a module
    "declared": Entry(hook(declared(everywhere)), drafts=True),
    "undeclared": undeclared(hook(at_the_last_token), "at_the_last_token"),
    "recorder": undeclared(recorder, r"recorder.*Recorder.keep", has_effect=False),
    "bound builtin": undeclared(bound_builtin, "dict.__setitem__", has_effect=False),
    "before": undeclared(hook(before, register="register_forward_pre_hook"), "before"),
    "before, declared": Entry(hook(declared(before), register="register_forward_pre_hook"), drafts=True),
    "with keywords, declared": Entry(hook(declared(by_position), with_kwargs=True), drafts=True),
    "module": undeclared(hook(Steer()), "Steer"),
    "method of a declared object": Entry(hook(Declared().steer), drafts=True),
    "partial of a declared one": Entry(hook(functools.partial(declared(everywhere))), drafts=True),
    "partial of torch": undeclared(
        hook(functools.partial(checkpoint, at_the_last_token, use_reentrant=False)), "at_the_last_token"
    ),
    # what is declared and not true
    "last token, a little": lie(a_little_at_the_last_token, has_effect=None),
    "several tokens": lie(of_several_tokens),
    "one token": lie(of_one_token),
    "whole prompts": lie(of_whole_prompts),
    "rows together": lie(of_rows_together),
    "a failure": lie(of_single_tokens_alone, "fails in a verification: RuntimeError: not one token", has_effect=False),
    # hooks of torch for all modules
    "all modules": undeclared(hook_of_all(of_layers), "of_layers"),
    "before all modules, declared": Entry(
        hook_of_all(declared(before_layers), "register_module_forward_pre_hook"), drafts=True
    ),
    # hooks on other modules than layers
    "embedding": Entry(hook(declared(everywhere), "model.embed_tokens"), drafts=True),
    "attention": Entry(hook(declared(everywhere), "model.layers.0.self_attn"), drafts=True),
    "decoder": Entry(hook(declared(everywhere), "model"), drafts=True),
    "head": Entry(hook(declared(roll_logits), "lm_head"), drafts=True),
    "decoder, undeclared": undeclared(hook(at_the_last_token, "model"), "at_the_last_token"),
    # forwards in the place of a module's own
    "forward": undeclared(forward(steered), "steered"),
    "forward, declared": Entry(
        forward(lambda module, own: declared(lambda *args, **kwargs: own(*args, **kwargs) + DIRECTION)), drafts=True
    ),
    "forward under its own name": undeclared(
        forward(lambda module, own: functools.wraps(own)(steered(module, own))), "forward"
    ),
    "forward as a method": undeclared(forward(as_method), "as_method"),
    "sequence": undeclared(forward(in_a_sequence, MLP), "Sequential"),
    "own forward": Entry(
        forward(lambda module, own: types.MethodType(type(module).forward, module)), drafts=True, has_effect=False
    ),
    "compiled forward": Entry(
        forward(lambda module, own: torch.compile(own, backend="eager", dynamic=True), MLP),
        drafts=True,
        has_effect=False,
    ),
    # hooks of libraries, and what users make of them
    "accelerate": Entry(of_accelerate(AlignDevicesHook("cpu", io_same_device=True)), drafts=True, has_effect=False),
    "user's of accelerate": undeclared(of_accelerate(LastOfAccelerate()), "LastOfAccelerate.post_forward"),
    "sequence of accelerate": undeclared(
        of_accelerate(AlignDevicesHook("cpu"), LastOfAccelerate()), "LastOfAccelerate.post_forward"
    ),
    "adapters by row": Entry(
        lambda model: Applied({"adapter_names": ["default", "__base__", "default"]}),
        drafts=True,
        has_effect=False,
        wrap=adapted,
    ),
    "adapter": undeclared(hook(at_the_last_token, ADAPTED), "at_the_last_token", wrap=adapted),
}
