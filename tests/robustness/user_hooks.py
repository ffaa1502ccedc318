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
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.robustness.user_code import DIRECTION, Applied, Entry, hidden_of

LAYER, MLP = "model.layers.0", "model.layers.0.mlp"


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
    copied.stateless = True
    return copied


# Ways to put code on a model.


def hook(function: Any, path: str = LAYER, register: str = "register_forward_hook", **options: Any) -> Any:
    """Return what registers a hook on the module at a path."""

    def apply(model):
        return Applied(undo=getattr(model.get_submodule(path), register)(function, **options).remove)

    return apply


def recorder(model):
    """Put a bound method on a layer, which notes how often and with how many tokens it is called."""

    class Recorder:
        def __init__(self):
            self.seen = []

        def keep(self, module, args, output):
            self.seen.append(hidden_of(output).shape[1])

    one = Recorder()
    return Applied(state=lambda: one.seen, undo=model.get_submodule(LAYER).register_forward_hook(one.keep).remove)


def forward(make: Callable[[nn.Module, Any], Any], path: str = LAYER) -> Any:
    """Return what puts a function in the place of the forward of a module; `make` gets the module and its forward."""

    def apply(model):
        module = model.get_submodule(path)
        vars(module)["forward"] = make(module, module.forward)

    return apply


def of_accelerate(model: Any) -> None:
    """Add a hook of a user to a layer after one of accelerate."""
    add_hook_to_module(model.get_submodule(LAYER), SequentialHook(AlignDevicesHook("cpu"), LastOfAccelerate()))


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


def roll_logits(module, args, output):
    return output.roll(1, -1)


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


HOOKS: dict[str, Entry] = {
    # hooks on a module
    "declared": Entry(hook(declared(everywhere)), drafts=True),
    "undeclared": undeclared(hook(at_the_last_token), "at_the_last_token"),
    "recorder": undeclared(recorder, r"recorder.*Recorder.keep", has_effect=False),
    "before": undeclared(hook(before, register="register_forward_pre_hook"), "before"),
    "before, declared": Entry(hook(declared(before), register="register_forward_pre_hook"), drafts=True),
    "with keywords, declared": Entry(hook(declared(by_position), with_kwargs=True), drafts=True),
    "method of a declared object": Entry(hook(Declared().steer), drafts=True),
    "partial of torch": undeclared(
        hook(functools.partial(checkpoint, at_the_last_token, use_reentrant=False)), "at_the_last_token"
    ),
    # what is declared and not true
    "last token, a little": lie(a_little_at_the_last_token, has_effect=None),
    "one token": lie(of_one_token),
    "whole prompts": lie(of_whole_prompts),
    "rows together": lie(of_rows_together),
    "a failure": lie(of_single_tokens_alone, "fails in a verification: RuntimeError: not one token", has_effect=False),
    # hooks on other modules than layers
    "decoder": Entry(hook(declared(everywhere), "model"), drafts=True),
    "head": Entry(hook(declared(roll_logits), "lm_head"), drafts=True),
    # forwards in the place of a module's own
    "forward": undeclared(forward(steered), "steered"),
    "forward, declared": Entry(
        forward(lambda module, own: declared(lambda *args, **kwargs: own(*args, **kwargs) + DIRECTION)), drafts=True
    ),
    "forward under its own name": undeclared(
        forward(lambda module, own: functools.wraps(own)(steered(module, own))), "forward"
    ),
    "compiled forward": Entry(
        forward(lambda module, own: torch.compile(own, backend="eager", dynamic=True), MLP),
        drafts=True,
        has_effect=False,
    ),
    # what users make of hooks of libraries; those of libraries alone are in tests/generation/test_hooks.py
    "user's of accelerate": undeclared(of_accelerate, "LastOfAccelerate.post_forward"),
}
