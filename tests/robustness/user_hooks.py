"""Hooks and patched forwards that users put on a target: with and without a declaration, and those of libraries.

A hook that says `stateless = True` is used with a draft after a comparison, one of a library at once. Any other is
decoded without the draft, and none of them runs in a trial before. user_forwards.py has patched forwards, hooks of
accelerate and PEFT, and hooks on other modules than layers.
"""

import dataclasses
import functools
import itertools
import operator
import sys
import types
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

VOCAB, ENDS = 32, [10, 11]
DIRECTION = torch.linspace(-1, 1, 64) * 4
of_torch = torch.nn.modules.module


@dataclasses.dataclass(frozen=True)
class Entry:
    """One kind of hook.

    Attributes:
        put: Puts it on a fresh model; returns what removes it and what a user could see of its state, or `None`.
        drafts: Whether the draft is used.
        name: Part of the reason why it is not.
        is_late: Whether the model has decoded without it before, with the draft.
        is_lie: Whether it declares what is not true.
        has_effect: Whether the text with it differs from that without it; `None` if it may.
        model: Makes the target.
        kwargs: Further arguments of `generate` with a batch.
    """

    put: Any
    drafts: bool = False
    name: str = ""
    is_late: bool = False
    is_lie: bool = False
    has_effect: bool | None = True
    model: Any = None
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)


HOOKS: dict[str, Entry] = {}


def kind(put: Any = None, **facts: Any) -> Any:
    """Add a function to the list, under its name."""
    if put is None:
        return functools.partial(kind, **facts)
    assert put.__name__ not in HOOKS
    HOOKS[put.__name__] = Entry(put, **facts)
    return put


def declared(hook: Any) -> Any:
    """Return a function that says that it treats all tokens alike."""
    wrapper = functools.wraps(hook)(lambda *args, **kwargs: hook(*args, **kwargs))
    wrapper.stateless = True
    return wrapper


def hidden_of(output: Any) -> torch.Tensor:
    """Return the hidden states of a layer's output or a module's arguments."""
    return output[0] if isinstance(output, tuple) else output


def on(module: nn.Module, hook: Any, **options: Any) -> tuple[Any, Any]:
    """Register a forward hook."""
    return module.register_forward_hook(hook, **options).remove, None


def first_layer(model: Any) -> nn.Module:
    return model.model.layers[0]


def everywhere(module, args, output):
    hidden_of(output).add_(DIRECTION)


def at_the_last_token(module, args, output):
    hidden_of(output)[:, -1] += DIRECTION


# Steering everywhere, at some tokens, and in forwards of some sizes.


@kind(drafts=True)
def steering_declared(model):
    return on(first_layer(model), declared(everywhere))


@kind(name="everywhere")
def steering(model):
    return on(first_layer(model), everywhere)


@kind(name="everywhere", is_late=True)
def steering_after_a_good_call(model):
    return on(first_layer(model), everywhere)


@kind(drafts=True, is_late=True)
def steering_declared_after_a_good_call(model):
    return on(first_layer(model), declared(everywhere))


@kind(name="at_the_last_token", is_late=True)
def last_token_after_a_good_call(model):
    return on(first_layer(model), at_the_last_token)


@kind(name="at_the_last_token")
def last_token(model):
    return on(first_layer(model), at_the_last_token)


@kind(name="at_the_first_token")
def first_token(model):
    def at_the_first_token(module, args, output):
        hidden_of(output)[:, 0] += DIRECTION

    return on(first_layer(model), at_the_first_token)


@kind(name="of_several_tokens")
def several_tokens(model):
    def of_several_tokens(module, args, output):
        if hidden_of(output).shape[1] > 1:
            hidden_of(output).add_(DIRECTION)

    return on(first_layer(model), of_several_tokens)


@kind(name="of_one_token")
def one_token(model):
    def of_one_token(module, args, output):
        if hidden_of(output).shape[1] == 1:
            hidden_of(output).add_(DIRECTION)

    return on(first_layer(model), of_one_token)


@kind(name="of_some_ids")
def single_tokens_of_some_ids(model):
    """Acts in forwards of one token, if it is one of a few that a trial does not use."""

    def of_some_ids(module, args, output):
        if args[0].shape[1] == 1:
            output += DIRECTION * (args[0] % 3 == 1)[..., None]

    return on(model.model.embed_tokens, of_some_ids)


@kind(name="of_pairs")
def forwards_of_an_even_number(model):
    def of_pairs(module, args, output):
        if hidden_of(output).shape[1] % 2 == 0:
            hidden_of(output).add_(DIRECTION)
        elif hidden_of(output).shape[1] == 1:
            hidden_of(output).sub_(DIRECTION)

    return on(first_layer(model), of_pairs)


@kind(name="mean_of_rows")
def mixing_rows(model):
    def mean_of_rows(module, args, output):
        hidden_of(output).add_(hidden_of(output).mean((0, 1)) * 0.5)

    return on(first_layer(model), mean_of_rows)


# Declarations that are false.


@kind(name="at_the_last_token", is_lie=True)
def lie_of_the_last_token(model):
    return on(first_layer(model), declared(at_the_last_token))


@kind(name="a_little", is_lie=True, has_effect=None)
def small_lie(model):
    """By a hundredth of the norm, at the last token."""

    def a_little(module, args, output):
        last = hidden_of(output)[:, -1]
        last += 0.01 * last.norm(dim=-1, keepdim=True) * DIRECTION / DIRECTION.norm()

    return on(first_layer(model), declared(a_little))


@kind(name="of_one_token", is_lie=True)
def lie_of_one_token(model):
    def of_one_token(module, args, output):
        if hidden_of(output).shape[1] == 1:
            hidden_of(output).add_(DIRECTION)

    return on(first_layer(model), declared(of_one_token))


@kind(name="told")
def told_to_have_state(model):
    def told(module, args, output):
        everywhere(module, args, output)

    told.stateless = False
    return on(first_layer(model), told)


# Counters; each acts at every third forward.


def counting(bump: Any) -> Any:
    """Return a hook that acts by a count."""

    def by_a_count(module, args, output):
        if bump(module) % 3 == 0:
            hidden_of(output).add_(DIRECTION)

    return by_a_count


_calls = 0


@kind(name="by_a_count")
def counter_of_a_module(model):
    global _calls
    _calls = 0

    def bump(module):
        global _calls
        _calls += 1
        return _calls

    return on(first_layer(model), counting(bump))[0], lambda: _calls


@kind(name="by_a_count")
def counter_of_a_helper(model):
    helper = sys.modules["tests_helper_of_hooks"] = types.ModuleType("tests_helper_of_hooks")
    helper.calls = 0

    def bump(module):
        import tests_helper_of_hooks

        tests_helper_of_hooks.calls += 1
        return tests_helper_of_hooks.calls

    return on(first_layer(model), counting(bump))[0], lambda: helper.calls


@kind(name="by_a_count")
def counter_of_a_closure(model):
    count = 0

    def bump(module):
        nonlocal count
        count += 1
        return count

    return on(first_layer(model), counting(bump))[0], lambda: count


@kind(name="by_a_count")
def counter_on_the_layer(model):
    layer = first_layer(model)
    layer.calls = 0

    def bump(module):
        module.calls += 1
        return module.calls

    return on(layer, counting(bump))[0], lambda: layer.calls


@kind(name="by_a_count")
def counter_in_a_parameter(model):
    count = nn.Parameter(torch.zeros(()), requires_grad=False)
    return on(first_layer(model), counting(lambda module: int(count.add_(1))))[0], lambda: int(count)


@kind(name="by_a_count")
def counter_in_an_iterator(model):
    numbers = itertools.count(1)
    return on(first_layer(model), counting(lambda module: next(numbers)))[0], lambda: next(numbers)


@kind(name="Recorder.keep", has_effect=False)
def recorder(model):
    class Recorder:
        def __init__(self):
            self.seen = []

        def keep(self, module, args, output):
            self.seen.append(hidden_of(output).shape[1])

    Recorder.keep.__qualname__ = "Recorder.keep"
    one = Recorder()
    return on(first_layer(model), one.keep)[0], lambda: one.seen


@kind(has_effect=False)
def bound_builtin(model):
    """A method of a dict, which keeps the last arguments."""
    seen = {}
    handle = first_layer(model).register_forward_pre_hook(seen.__setitem__)
    return handle.remove, lambda: [hidden_of(args).shape for args in seen.values()]


@kind(name="once")
def hook_that_removes_itself(model):
    def once(module, args, output):
        handle.remove()
        hidden_of(output).add_(DIRECTION)

    handle = first_layer(model).register_forward_hook(once)
    return handle.remove, None


# Hooks of torch for all modules.


def of_layers(module, args, output):
    if type(module).__name__ == "LlamaDecoderLayer":
        hidden_of(output).add_(DIRECTION)


def before_layers(module, args):
    if type(module).__name__ == "LlamaMLP":
        args[0].add_(DIRECTION)


@kind(name="of_layers")
def hook_of_all_modules(model):
    return of_torch.register_module_forward_hook(of_layers).remove, None


@kind(drafts=True)
def declared_hook_of_all_modules(model):
    return of_torch.register_module_forward_hook(declared(of_layers)).remove, None


@kind(name="before_layers")
def pre_hook_of_all_modules(model):
    return of_torch.register_module_forward_pre_hook(before_layers).remove, None


@kind(drafts=True)
def declared_pre_hook_of_all_modules(model):
    return of_torch.register_module_forward_pre_hook(declared(before_layers)).remove, None


@kind(name="of_last_tokens", is_late=True)
def late_hook_of_all_modules(model):
    def of_last_tokens(module, args, output):
        if type(module).__name__ == "LlamaDecoderLayer":
            at_the_last_token(module, args, output)

    return of_torch.register_module_forward_hook(of_last_tokens).remove, None


# Ways of putting a hook on.


class Steer(nn.Module):
    def __init__(self):
        super().__init__()
        self.direction = nn.Parameter(DIRECTION.clone())

    def forward(self, module, args, output):
        return hidden_of(output) + self.direction


@kind(name="Steer")
def module_as_hook(model):
    return on(first_layer(model), Steer())


@kind(drafts=True)
def declared_module_as_hook(model):
    hook = Steer()
    hook.stateless = True
    return on(first_layer(model), hook)


class LastTokens(nn.Module):
    def forward(self, hidden):
        return torch.cat([hidden[:, :-1], hidden[:, -1:] + DIRECTION], 1)


@kind
def sequential_of_users_modules(model):
    """A class of torch, with modules of a user."""
    mlp = first_layer(model).mlp
    copied = type(mlp)(model.config)
    copied.load_state_dict(mlp.state_dict())
    vars(mlp)["forward"] = nn.Sequential(copied, LastTokens())
    return lambda: vars(mlp).pop("forward"), None


@kind
def partial_of_a_library(model):
    """A function of torch that calls a user's."""
    hook = functools.partial(checkpoint, at_the_last_token, use_reentrant=False)
    return on(first_layer(model), hook)


@kind
def partial_of_an_operator(model):
    return on(first_layer(model), functools.partial(operator.call, at_the_last_token))


@kind(name="with_kwargs")
def hook_with_kwargs(model):
    """It reads how many tokens the cache holds."""

    def with_kwargs(module, args, kwargs, output):
        hidden_of(output).add_(DIRECTION * (kwargs["position_ids"] % 3 == 1)[..., None])

    return on(first_layer(model), with_kwargs, with_kwargs=True)


@kind(drafts=True)
def declared_hook_with_kwargs(model):
    def by_position(module, args, kwargs, output):
        hidden_of(output).add_(DIRECTION * (kwargs["position_ids"] % 3 == 1)[..., None])

    return on(first_layer(model), declared(by_position), with_kwargs=True)


@kind(name="everywhere")
def always_called(model):
    return on(first_layer(model), everywhere, always_call=True)


@kind(name="before")
def pre_hook(model):
    def before(module, args):
        args[0][:, -1] += DIRECTION

    return first_layer(model).register_forward_pre_hook(before).remove, None


@kind(drafts=True)
def declared_pre_hook(model):
    def before(module, args):
        args[0].add_(DIRECTION)

    return first_layer(model).register_forward_pre_hook(declared(before)).remove, None
