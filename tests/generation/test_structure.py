"""What decisions about a target depend on, and which code is of a library."""

import functools
import gc
import types
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from transformers import GenerationMixin, LlamaForCausalLM
from transformers.models.llama import modeling_llama

from hf_longspec import NgramDraftModel
from hf_longspec.generation.target import TargetView
from hf_longspec.generation.target_modules import METHODS, foreign_code, foreign_methods, name_of, structure_of
from tests.tiny_targets import generate, tiny_target


@pytest.fixture
def model():
    return tiny_target("llama")


def users(*args, **kwargs):
    raise AssertionError("only looked at")


def other_class(model):
    kind = type(model.model.norm)
    model.model.norm.__class__ = type(kind.__name__, (kind,), {})


CHANGES = {
    "attribute": lambda model: setattr(model.model.layers[1].self_attn, "is_causal", False),
    "new attribute": lambda model: setattr(model.model.layers[1], "number", 1),
    "names in a list": lambda model: setattr(model.model.layers[1], "names", ["a"]),
    "numbers in a dict": lambda model: setattr(model.model.layers[1], "scaling", {"a": 2.0}),
    "function": lambda model: setattr(model.model.norm, "forward", users),
    "class": other_class,
    "module": lambda model: setattr(model.model.layers[0].mlp, "act_fn", nn.Tanh()),
    "config of a module": lambda model: setattr(
        model.model.layers[0].self_attn, "config", type(model.config)(**model.config.to_dict())
    ),
    "order": lambda model: setattr(model.model, "layers", model.model.layers[:1]),
    "kind of rotation": lambda model: setattr(model.model.rotary_emb, "rope_type", "dynamic"),
}
PATCHES = {
    "forward of a class": (modeling_llama.LlamaMLP, "forward", users),
    "call of a class": (modeling_llama.LlamaMLP, "__call__", users),
    "attribute of a class": (modeling_llama.LlamaAttention, "is_causal", False),
    "property of a class": (modeling_llama.LlamaModel, "layers", property(users)),
    "function of the file": (modeling_llama, "apply_rotary_pos_emb", users),
    "call of all modules": (nn.Module, "_call_impl", users),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_a_model(model, change):
    before = structure_of(model)
    assert structure_of(model) == before
    CHANGES[change](model)
    assert structure_of(model) != before == before


@pytest.mark.parametrize("patch", PATCHES)
def test_changes_of_its_code(model, patch, monkeypatch):
    before = structure_of(model)
    with monkeypatch.context() as changed:
        changed.setattr(*PATCHES[patch], raising=False)
        assert structure_of(model) != before
    assert structure_of(model) == before


def test_it_keeps_no_module_alive(model):
    model.model.norm.forward = types.MethodType(lambda self, x: x, model.model.norm)
    structure, norm = structure_of(model), weakref.ref(model.model.norm)
    del model.model.norm
    gc.collect()
    assert norm() is None and structure


def test_a_changed_target_is_examined_again(model):
    draft = NgramDraftModel.from_target(model)
    generate(model, draft, max_new_tokens=4)
    known = TargetView(model).known
    model.model.layers[1].self_attn.is_causal = False
    with pytest.raises(ValueError, match="attend to later tokens"):
        generate(model, draft, max_new_tokens=4)
    model.model.layers[1].self_attn.is_causal = True
    assert TargetView(model).known is known


@functools.wraps(torch.relu)
def looks_like_torch(x):
    return x


class Callable:
    def __call__(self, *args):
        return users(*args)


FOREIGN = [
    users,
    looks_like_torch,
    partial(users),
    partial(torch.utils.checkpoint.checkpoint, users),
    torch.no_grad()(users),
    Callable(),
    Callable().__call__,
    [].append,
    nn.Linear(1, 1),
    types.MethodType(users, nn.Linear(1, 1)),
]


@pytest.mark.parametrize("function", FOREIGN, ids=lambda function: name_of(function))
def test_code_of_users(function):
    assert foreign_code(function) is not None


def test_code_of_libraries(model):
    norm, modules = model.model.norm, {id(module) for module in model.modules()}
    own = types.MethodType(type(norm).forward, norm)
    found = [
        own,
        norm.forward,
        partial(torch.add, alpha=2),
        torch.no_grad()(torch.nn.functional.relu),
        generate_of(model),
    ]
    found += [torch.compile(norm.forward, backend="eager"), functools.update_wrapper(partial(nn.Module.forward), own)]
    assert [function for function in found if foreign_code(function, modules) is not None] == []


def generate_of(model):
    return model.generate


@pytest.mark.parametrize("name", METHODS)
def test_methods_of_generation(model, name, monkeypatch):
    """In a class, on the model, and for all models: the text of stock `generate`, and the reason."""
    stock = getattr(LlamaForCausalLM, name)

    @functools.wraps(stock)
    def own(*args, **kwargs):
        return stock(*args, **kwargs)

    draft = NgramDraftModel.from_target(model)
    assert foreign_methods(model) == []
    with monkeypatch.context() as patch:
        patch.setattr(model, name, types.MethodType(own, model), raising=False)
        assert foreign_methods(model) == [f"{name} on the model"]
    with monkeypatch.context() as patch:
        patch.setattr(GenerationMixin, name, own)
        assert foreign_methods(model) == [f"LlamaForCausalLM.{name}"]
    model.__class__ = type("Own", (LlamaForCausalLM,), {name: own})
    text = generate(model, None, max_new_tokens=4)
    draft.generation_config.on_unsupported = "plain"
    assert torch.equal(generate(model, draft, max_new_tokens=4), text)
    assert f"Own.{name}: drafts do not run what is not of transformers" in draft.last_speculation.reason
