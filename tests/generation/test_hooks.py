"""Hooks and patched forwards of a user on the target: the text of plain `generate`, with the draft or the reason."""

import functools
import itertools
import random
import re
import types

import pytest
import torch

from hf_longspec import PlainDraftModel
from hf_longspec.generation.special_cases.hooks import bare, hooks_of
from hf_longspec.generation.target import TargetView
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


def declared(function):
    """A copy of a hook that declares to treat all tokens alike."""
    copied = types.FunctionType(function.__code__, function.__globals__, function.__name__)
    copied.stateless = True
    return copied


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


class Module(torch.nn.Module):
    """A hook that is a module, so that torch's own code calls it."""

    def forward(self, module, args, output):
        at_the_last_token(module, args, output)


UNDECLARED, NOT_ALIKE = "only its owner knows whether it treats all tokens alike", "does not treat all tokens alike"
STEERS = declared(everywhere)
# Makers of hooks, so that each call begins with its own state; part of the reason, or `None` where the draft is used.
HOOKS = {
    "everywhere": (lambda: STEERS, None),
    "partial": (lambda: functools.partial(STEERS), None),
    "undeclared": (
        lambda: everywhere,
        f"everywhere on LlamaDecoderLayer: a draft changes .* {UNDECLARED}.*stateless = True",
    ),
    "last": (lambda: at_the_last_token, UNDECLARED),
    "random": (lambda: at_random, UNDECLARED),
    "counter": (Counter, "Counter on LlamaDecoderLayer"),
    "recorder": (lambda: Recorder().keep, "Recorder.keep on LlamaDecoderLayer"),
    "global": (lambda: of_a_global_counter, UNDECLARED),
    "attribute": (lambda: of_an_attribute, UNDECLARED),
    "closure": (lambda: of_a_closure(torch.zeros(())), UNDECLARED),
    "iterator": (lambda: of_an_iterator(itertools.count()), UNDECLARED),
    "module": (Module, UNDECLARED),
    "false, last": (lambda: declared(at_the_last_token), f"at_the_last_token on LlamaDecoderLayer: .* {NOT_ALIKE}"),
    "false, first": (lambda: declared(at_the_first_token), NOT_ALIKE),
    "false, several": (lambda: declared(of_several_tokens), NOT_ALIKE),
    "false, many": (lambda: declared(of_many_tokens), NOT_ALIKE),
    "false, one": (lambda: declared(of_one_token), NOT_ALIKE),
    "false, fails": (lambda: declared(of_single_tokens_alone), "fails in a verification: RuntimeError: not one token"),
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
        state = _calls, str(vars(getattr(hook, "__self__", hook))), random.random()
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
        assert drafted == plain and re.search(reason, spent.reason) and spent.num_forwards == 0


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
    model = steered(STEERS)
    draft = make_draft(kind, model, **({"acceptance": "coupled"} if kind == "specattn" else {}))
    assert generate(model, draft).tolist() == steered_text(everywhere) != steered_text(declared(nowhere))
    assert draft.last_speculation.num_spec_steps > 0
    sampled = steered_text(STEERS, PlainDraftModel, do_sample=True)
    assert generate(model, draft, do_sample=True).tolist() == sampled


@pytest.mark.parametrize("kind", few(ALL_KINDS, 5))
def test_a_hook_of_the_last_token_ends_speculation_of_every_draft(kind):
    model = steered(at_the_last_token)
    draft = make_draft(kind, model)
    with pytest.raises(ValueError, match=rf"{UNDECLARED}.*on_unsupported"):
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
    hook.stateless = True
    handle = model.model.layers[0].register_forward_hook(hook)
    draft = make_draft("ngram", model)
    generate(model, draft)
    assert draft.last_speculation.num_spec_steps > 0
    handle.remove()
    model.model.layers[0].register_forward_hook(declared(at_the_last_token))
    with pytest.raises(ValueError, match=NOT_ALIKE):
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
        assert UNDECLARED in draft.last_speculation.reason
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


@pytest.mark.parametrize("register", ["register_module_forward_hook", "register_module_forward_pre_hook"])
def test_hooks_on_all_modules_of_torch(register):
    """They run in every forward, also in those of trials: these must not run them."""
    model, seen = tiny_target("llama"), []

    def scales(module, args, output=None):
        seen.append(module)
        if type(module).__name__ == "LlamaMLP" and output is not None:
            return output * 1.5
        return None

    handle = getattr(torch.nn.modules.module, register)(scales)
    try:
        draft = make_draft("ngram", model)
        with pytest.raises(ValueError, match=rf"scales on all modules of torch.*{UNDECLARED}"):
            generate(model, draft)
        assert not seen
        text = generate(model).tolist()
        scales.stateless = True
        assert generate(model, draft).tolist() == text and draft.last_speculation.num_spec_steps
    finally:
        handle.remove()


def test_a_declared_hook_is_compared_with_a_model_without_any_hook():
    """One on all modules of torch that changes the last token of a forward a little."""
    model = tiny_target("llama")

    def lies(module, args, output):
        if type(module).__name__ == "LlamaMLP":
            return torch.cat([output[:, :-1], output[:, -1:] * 1.01], 1)
        return output

    lies.stateless = True
    handle = torch.nn.modules.module.register_module_forward_hook(lies)
    try:
        with pytest.raises(ValueError, match=NOT_ALIKE):
            generate(model, make_draft("ngram", model))
    finally:
        handle.remove()


def test_a_comparison_is_made_once(monkeypatch):
    """For each structure of a model and each size of tree."""
    model, sizes = steered(STEERS), []
    draft, hook = make_draft("ngram", model), declared(nowhere)
    model.model.layers[1].register_forward_hook(hook)
    forward = type(model).forward
    monkeypatch.setattr(
        type(model), "forward", lambda *args, **kw: sizes.append(kw["input_ids"].shape) or forward(*args, **kw)
    )
    generate(model, draft)
    first = len(sizes)
    generate(model, draft)
    assert len(sizes) - first < first - 8
    assert sizes[first] == (2, 20)  # the prompts but their last tokens


def test_a_hook_between_two_calls():
    model = tiny_target("llama")
    draft = make_draft("ngram", model)
    generate(model, draft)
    handle = model.model.layers[0].register_forward_hook(at_the_last_token)
    with pytest.raises(ValueError, match=UNDECLARED):
        generate(model, draft)
    handle.remove()
    generate(model, draft)
