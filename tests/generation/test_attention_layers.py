"""Attention layers are found by what their forward does, and get keywords that their decoder layers withhold."""

import threading

import pytest
import torch

from hf_longspec.generation.target_modules import attention_layers, passed_on, withheld
from tests.robustness.enumeration import build
from tests.tiny_targets import tiny_prompts


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "deepseek_v3"])
def test_layers_of_most_models_are_found_and_withhold_nothing(target, name):
    model = target(name)
    assert sorted(attention_layers(model)) == list(range(model.config.num_hidden_layers))
    assert withheld(model) == []


@pytest.mark.parametrize("name", ["stablelm", "nemotron"])
class TestLayersThatKeepKeywords:
    def seen(self, model, **keywords):
        """The inputs of the attention layers of a forward."""
        found = []
        handles = [
            module.register_forward_pre_hook(lambda _, args, kwargs: found.append(kwargs.get("tree")), with_kwargs=True)
            for module in attention_layers(model).values()
        ]
        with torch.no_grad():
            model(tiny_prompts(128, (5,))[0], use_cache=False, **keywords)
        for handle in handles:
            handle.remove()
        return found

    def test_keywords_are_passed_on_while_the_context_is_open(self, name):
        model = build(name)
        assert len(withheld(model)) == model.config.num_hidden_layers
        context = object()
        assert set(self.seen(model, tree=context)) == {None}
        hooks = {module: len(module._forward_pre_hooks) for module in model.modules()}
        with passed_on(model):
            assert set(self.seen(model, tree=context)) == {context}
            assert set(self.seen(model)) == {None}  # nothing is left of the forward before
        assert hooks == {module: len(module._forward_pre_hooks) for module in model.modules()}

    def test_forwards_of_another_thread_keep_theirs(self, name):
        model, other = build(name), []
        with passed_on(model):
            self.seen(model, tree="mine")
            thread = threading.Thread(target=lambda: other.extend(self.seen(model, tree="other")))
            thread.start()
            thread.join()
            assert set(self.seen(model, tree="mine")) == {"mine"}
        assert set(other) == {"other"}
