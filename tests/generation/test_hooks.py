"""Hooks and patched forwards of a user on the target: the text of plain `generate`, with the draft or the reason."""

import functools
import itertools
import random
import types
from collections import OrderedDict, deque

import numpy as np
import pytest
import torch

from hf_longspec import PlainDraftModel
from hf_longspec.generation.target import TargetView
from hf_longspec.generation.wings.hooks import bare, hooks_of
from hf_longspec.generation.wings.user_state import UserState
from tests.pairwise import few
from tests.robustness.drafts import ALL_KINDS, make_draft
from tests.tiny_targets import generate as generate_text
from tests.tiny_targets import tiny_prompts, tiny_target

LENGTHS, NEW = (21, 5), 12
DIRECTION = torch.linspace(-1, 1, 64) * 4


def generate(model, draft=None, **options):
    return generate_text(model, draft, LENGTHS, max_new_tokens=NEW, **options)


def hidden_of(output):
    return output[0] if isinstance(output, tuple) else output


def nowhere(module, args, output):
    pass


def everywhere(module, args, output):
    hidden_of(output).add_(DIRECTION)


def at_the_last_token(module, args, output):
    hidden_of(output)[:, -1] += DIRECTION.to(hidden_of(output).dtype)


def at_the_first_token(module, args, output):
    hidden_of(output)[:, 0] += DIRECTION


def of_several_tokens(module, args, output):
    if hidden_of(output).shape[1] > 1:
        hidden_of(output).add_(DIRECTION)


def of_many_tokens(module, args, output):
    """More than a tree has, fewer than the prompt."""
    if hidden_of(output).shape[1] > 18:
        hidden_of(output).add_(DIRECTION)


def of_one_token(module, args, output):
    if hidden_of(output).shape[1] == 1:
        hidden_of(output).add_(DIRECTION)


def of_single_tokens_alone(module, args, output):
    if hidden_of(output).shape[1] not in (1, 21):
        raise RuntimeError("not one token")


def at_random(module, args, output):
    hidden_of(output).add_(torch.randn(64) * random.random())


class Counter:
    """Acts from its ninth call on."""

    calls = 0

    def __call__(self, module, args, output):
        self.calls += 1
        if self.calls > 8:
            hidden_of(output).add_(DIRECTION)


class Recorder:
    def __init__(self):
        self.seen = []

    def keep(self, module, args, output):
        self.seen.append(hidden_of(output).shape[1])


_calls = 0


def of_a_global_counter(module, args, output):
    global _calls
    _calls += 1
    if _calls % 3 == 0:
        hidden_of(output).add_(DIRECTION)


def of_an_attribute(module, args, output):
    module.calls = getattr(module, "calls", 0) + 1
    if module.calls % 3 == 0:
        hidden_of(output).add_(DIRECTION)


def of_a_closure(strength):
    def grows(module, args, output):
        strength.add_(0.3)
        hidden_of(output).add_(DIRECTION * strength)

    return grows


def of_an_iterator(numbers):
    def steps(module, args, output):
        hidden_of(output).add_(DIRECTION * (next(numbers) % 2))

    return steps


# Makers of hooks, so that each call begins with its own state; part of the reason, or `None` where the draft is used.
HOOKS = {
    "everywhere": (lambda: everywhere, None),
    "partial": (lambda: functools.partial(everywhere), None),
    "last": (lambda: at_the_last_token, "at_the_last_token on LlamaDecoderLayer does not treat all tokens alike"),
    "first": (lambda: at_the_first_token, "does not treat all tokens alike"),
    "several": (lambda: of_several_tokens, "does not treat all tokens alike"),
    "many": (lambda: of_many_tokens, "does not treat all tokens alike"),
    "one": (lambda: of_one_token, "does not treat all tokens alike"),
    "fails": (lambda: of_single_tokens_alone, "fails in a verification: RuntimeError: not one token"),
    "random": (lambda: at_random, "does not treat all tokens alike"),
    "counter": (Counter, "Counter on LlamaDecoderLayer keeps state from call to call"),
    "recorder": (lambda: Recorder().keep, "Recorder.keep on LlamaDecoderLayer keeps state"),
    "global": (lambda: of_a_global_counter, "keeps state"),
    "attribute": (lambda: of_an_attribute, "keeps state"),
    "closure": (lambda: of_a_closure(torch.zeros(())), "keeps state"),
    "iterator": (lambda: of_an_iterator(itertools.count()), "reaches a count, whose state cannot be compared"),
}


def texts(name, draft_kind, **options):
    """Texts, states and random numbers of a call with hook `name`, without and with the draft; the draft."""
    global _calls
    found = []
    for with_draft in (False, True):
        model, hook = tiny_target("llama"), HOOKS[name][0]()
        model.model.layers[0].register_forward_hook(hook)
        draft = make_draft(draft_kind, model) if with_draft else None
        if with_draft:
            draft.generation_config.on_unsupported = "plain"
        input_ids, mask = tiny_prompts(128, LENGTHS)
        _calls = 0
        random.seed(1)
        torch.manual_seed(1)
        out = model.generate(
            input_ids, attention_mask=mask, max_new_tokens=NEW, pad_token_id=0, assistant_model=draft, **options
        )
        state = _calls, vars(hook).copy() if hasattr(hook, "__dict__") else vars(hook.__self__), random.random()
        found.append((out.tolist(), state, torch.rand(1).item(), model.model.layers[0].__dict__.get("calls")))
    return found, draft


@pytest.mark.parametrize("name", HOOKS)
def test_hooks(name):
    """Greedy; the hook ends in the state that plain `generate` leaves."""
    reason = HOOKS[name][1]
    (plain, drafted), draft = texts(name, "specattn", do_sample=False)
    assert drafted[0] == plain[0]
    spent = draft.last_speculation
    if reason is None:
        assert spent.reason is None and spent.num_spec_steps > 0
    else:
        assert drafted == plain and reason in spent.reason and spent.num_forwards == 0


def steered(hook):
    """A target with a hook in its first layer."""
    model = tiny_target("llama")
    model.model.layers[0].register_forward_hook(hook)
    return model


@functools.cache
def steered_text(hook, draft_class=None, **options):
    """The text of a target with a hook, without a draft or with the plain one."""
    model = steered(hook)
    return generate(model, draft_class and draft_class.from_target(model), **options).tolist()


@pytest.mark.parametrize("kind", few(ALL_KINDS, 5))
def test_steering_everywhere_is_served_with_every_draft(kind):
    """Greedy, and at equal seed; the steering changes the text."""
    model = steered(everywhere)
    draft = make_draft(kind, model, **({"acceptance": "coupled"} if kind in ("specattn", "quest") else {}))
    assert generate(model, draft).tolist() == steered_text(everywhere) != steered_text(nowhere)
    assert draft.last_speculation.num_spec_steps > 0
    sampled = steered_text(everywhere, PlainDraftModel, do_sample=True)
    assert generate(model, draft, do_sample=True).tolist() == sampled


@pytest.mark.parametrize("kind", few(ALL_KINDS, 5))
def test_a_hook_of_the_last_token_ends_speculation_of_every_draft(kind):
    model = steered(at_the_last_token)
    draft = make_draft(kind, model)
    with pytest.raises(ValueError, match=r"does not treat all tokens alike.*on_unsupported"):
        generate(model, draft)
    draft.generation_config.on_unsupported = "plain"
    assert generate(model, draft, do_sample=True).tolist() == steered_text(at_the_last_token, do_sample=True)
    assert draft.last_speculation.num_forwards == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral"])
def test_rounding_is_no_reason(name, dtype):
    """In half precision the difference of the same model without the hook is the measure."""
    model = tiny_target(name, dtype=dtype)
    direction = DIRECTION.to(dtype)
    hook = lambda module, args, output: hidden_of(output).add_(direction)  # noqa: E731
    handle = model.model.layers[0].register_forward_hook(hook)
    draft = make_draft("ngram", model)
    generate(model, draft)
    assert draft.last_speculation.num_spec_steps > 0
    handle.remove()
    model.model.layers[0].register_forward_hook(at_the_last_token)
    with pytest.raises(ValueError, match="does not treat all tokens alike"):
        generate(model, draft)


def patched(module):
    """A forward in the place of a module's own, which looks at the last token, under a decorator of torch."""
    forward = module.forward

    @torch.no_grad()
    @functools.wraps(forward)
    def steered(*args, **kwargs):
        output = forward(*args, **kwargs)
        at_the_last_token(module, args, output)
        return output

    module.forward = steered


def dispatched(module):
    from accelerate.hooks import ModelHook, add_hook_to_module

    class Steer(ModelHook):
        def post_forward(self, module, output):
            at_the_last_token(module, (), output)
            return output

    add_hook_to_module(module, Steer())


WAYS = {
    "before": lambda module: module.register_forward_pre_hook(lambda one, args: at_the_last_token(one, (), args)),
    "patched": patched,
    "method": lambda module: setattr(
        module, "forward", types.MethodType(lambda one, *args, **kw: type(one).forward(one, *args, **kw), module)
    ),
    "accelerate": dispatched,
    "everywhere": lambda _: torch.nn.modules.module.register_module_forward_hook(lambda *_: None),
}


@pytest.mark.parametrize("way", WAYS)
def test_hooks_are_found_however_they_are_put_on(way):
    model = tiny_target("llama")
    own = hooks_of(model)
    handle = WAYS[way](model.model.layers[0])
    try:
        assert not own and len(hooks_of(model)) > 0
        draft = make_draft("ngram", model)
        draft.generation_config.on_unsupported = "plain"
        text = generate(model, draft).tolist()
        assert (draft.last_speculation.reason is None) == (way in ("method", "everywhere"))
        assert text == generate(model).tolist()
    finally:
        if hasattr(handle, "remove"):
            handle.remove()


def test_hooks_of_libraries_are_none_of_a_user():
    accelerate_hooks = pytest.importorskip("accelerate.hooks")
    peft = pytest.importorskip("peft")
    model = tiny_target("llama")
    lora = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"])).eval()
    layer = model.model.layers[0]
    layer.forward = types.MethodType(type(layer).forward, layer)
    accelerate_hooks.add_hook_to_module(layer, accelerate_hooks.AlignDevicesHook("cpu", io_same_device=True))
    found = []
    with lora._enable_peft_forward_hooks(adapter_names=["default"] * 3):
        assert any(module._forward_pre_hooks for module in model.modules())
        found += hooks_of(model)
        assert not any(module._forward_pre_hooks for module in bare(model).modules())
    assert not found and bare(model) is model


def test_trials_run_no_hooks():
    """They show how a model is built, and are kept for later calls."""
    model, recorder = tiny_target("llama"), Recorder()
    model.model.layers[0].register_forward_hook(recorder.keep)
    TargetView(model).why_not()
    assert not recorder.seen and TargetView(model).traits.windows
    twin = bare(model)
    assert twin is not model and twin.model.layers[0].mlp.up_proj.weight is model.model.layers[0].mlp.up_proj.weight
    assert model.model.layers[0]._forward_hooks and not twin.model.layers[0]._forward_hooks


class Everything:
    """A hook that changes something of every kind."""

    shared = 0

    def __init__(self):
        self.items, self.names, self.numbers = [1, [2]], {"a": {3}}, np.arange(3.0)
        self.vector, self.generator = torch.ones(2), torch.Generator().manual_seed(0)
        self.random, self.last = random.Random(0), deque([1], maxlen=2)
        self.order, self.draws = OrderedDict(a=1, b=2), np.random.default_rng(0)

    CHANGES = (
        lambda self: self.items[1].append(5),
        lambda self: self.names["a"].add(4),
        lambda self: self.names.clear(),
        lambda self: self.numbers.fill(2.0),
        lambda self: self.vector.add_(1),
        lambda self: torch.rand(1, generator=self.generator),
        lambda self: self.random.random(),
        lambda self: self.last.append(3),
        lambda self: self.order.move_to_end("a"),
        lambda self: self.draws.random(),
        lambda self: self.decorated(),
        lambda self: setattr(self, "new", 1),
        lambda self: setattr(self, "items", [1, [2], 3]),
        lambda self: setattr(type(self), "shared", 1),
    )

    @torch.no_grad()
    def decorated(self):
        global _calls
        _calls += 1

    def __call__(self, module, args, output):
        return output

    def values(self):
        parts = self.items, self.names, self.numbers.tolist(), self.vector.tolist(), list(self.last), self.shared
        parts += self.order, self.draws.bit_generator.state, _calls
        return repr((parts, self.generator.get_state().sum(), self.random.getstate(), sorted(vars(self))))


@pytest.mark.parametrize("change", Everything.CHANGES)
def test_state_is_put_back(change):
    hook, module = Everything(), torch.nn.Identity()
    module.register_buffer("steps", torch.zeros(()))
    state, before = UserState({"hook": [module, hook.__call__]}), hook.values()
    assert state.unknown is None and not state.restore()
    change(hook)
    module.steps += 1
    assert hook.values() != before
    assert state.restore() and hook.values() == before and not state.restore() and module.steps == 0


class Counting(itertools.count):
    """Has attributes, and a state in C beside them."""


UNKNOWN = (Counting(), itertools.count().__next__, np.array([[1], None], dtype=object), torch.eye(2).to_sparse())


@pytest.mark.parametrize("one", UNKNOWN, ids=lambda one: type(one).__name__)
def test_state_that_cannot_be_put_back(one):
    assert UserState({"hook": lambda: one}).unknown == type(one).__name__
