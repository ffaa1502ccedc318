"""What is known of hooks and patched forwards of a user, and the comparison of those that are declared.

tests/robustness/user_hooks.py has the hooks that a user may write, and their texts.
"""

import types

import pytest
import torch

from hf_longspec.generation.special_cases.hooks import bare, hooks_of
from hf_longspec.generation.target import TargetView
from tests.robustness.drafts import make_draft
from tests.robustness.user_hooks import at_the_last_token, declared, everywhere
from tests.tiny_targets import generate as generate_text
from tests.tiny_targets import tiny_target

LENGTHS, NEW = (21, 5), 12
UNDECLARED, NOT_ALIKE = "only its owner knows whether it treats all tokens alike", "does not treat all tokens alike"


def generate(model, draft=None, **options):
    return generate_text(model, draft, LENGTHS, max_new_tokens=NEW, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral"])
def test_rounding_is_no_reason(name, dtype):
    """In half precision the difference of the same model without the hook is the measure."""
    model = tiny_target(name, dtype=dtype)
    handle = model.model.layers[0].register_forward_hook(declared(everywhere))
    draft = make_draft("ngram", model)
    generate(model, draft)
    assert draft.last_speculation.num_spec_steps > 0
    handle.remove()
    model.model.layers[0].register_forward_hook(declared(at_the_last_token))
    with pytest.raises(ValueError, match=NOT_ALIKE):
        generate(model, draft)


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


def patched(layer, note):
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: (note(), forward(*args, **kwargs))[1]


@pytest.mark.parametrize("apply", [patched, lambda layer, note: layer.register_forward_hook(note)])
def test_trials_run_no_code_of_users(apply):
    """They show how a model is built, and are kept for later calls."""
    model, seen = tiny_target("llama"), []
    apply(model.model.layers[0], lambda *_: seen.append(1))
    before = dict(vars(model.model.layers[0]))
    TargetView(model).why_not()
    assert not seen and TargetView(model).traits.windows
    twin = bare(model)
    assert twin is not model and twin.model.layers[0].mlp.up_proj.weight is model.model.layers[0].mlp.up_proj.weight
    assert vars(model.model.layers[0]) == before and not twin.model.layers[0]._forward_hooks


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
