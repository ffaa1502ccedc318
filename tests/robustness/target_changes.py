"""Changes that users make to a target, its class or the functions it runs, before or after a good call with a draft.

Some have the same effect on every token, and a draft may be used after them. Others depend on the size of a forward,
on the length of the cache or on the number of calls, or replace what the loop does in the place of `generate`. Those
here are of modules and weights; target_patches.py has those of classes, functions and settings.
"""

import copy
import dataclasses
import functools
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.nn.utils import parametrize
from transformers.models.llama import modeling_llama

from tests.tiny_targets import tiny_target

VOCAB = 32
DIRECTION = torch.linspace(-1, 1, 64) * 4


@dataclasses.dataclass(frozen=True)
class Entry:
    """One change.

    Attributes:
        change: Makes it to a model; returns what takes back what is not on the model, or `None`.
        name: Architecture of the target, of `tests/tiny_targets.py`.
        settings: Its settings, names and values.
        has_effect: Whether the text of a single prompt is another one; `None` if it may be.
    """

    change: Any
    name: str = "llama"
    settings: tuple[tuple[str, Any], ...] = ()
    has_effect: bool | None = True


CHANGES: dict[str, Entry] = {}


def kind(change: Any = None, **facts: Any) -> Any:
    """Add a function to the list, under its name."""
    if change is None:
        return functools.partial(kind, **facts)
    assert change.__name__ not in CHANGES
    CHANGES[change.__name__] = Entry(change, **facts)
    return change


def first_layer(model: Any) -> nn.Module:
    return model.model.layers[0]


def by_size(hidden: torch.Tensor, strength: float = 1.0) -> torch.Tensor:
    """Return hidden states `(B, N, D)` moved by a direction if there are several tokens."""
    return hidden + strength * DIRECTION[: hidden.shape[-1]] if hidden.shape[1] > 1 else hidden


def subclass(module: nn.Module, **methods: Any) -> None:
    """Give a module another class, as a user may."""
    module.__class__ = type(f"Changed{type(module).__name__}", (type(module),), methods)


def after_forward(function: Any) -> Any:
    """Return a forward that changes the output of the next class's."""

    def forward(self, *args, **kwargs):
        return function(self, super(type(self), self).forward(*args, **kwargs), *args, **kwargs)

    return forward


# Modules that are swapped, replaced or put in another order.


def _seeded(make: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        return make()


@kind
def other_layer(model):
    model.model.layers[1] = tiny_target("llama", seed=5, vocab_size=VOCAB).model.layers[1]


@kind
def layer_of_another_class(model):
    class Mine(modeling_llama.LlamaDecoderLayer):
        def forward(self, hidden_states, **kwargs):
            return by_size(super().forward(hidden_states, **kwargs))

    mine = _seeded(lambda: Mine(model.config, 0)).eval()
    mine.load_state_dict(first_layer(model).state_dict())
    model.model.layers[0] = mine


@kind
def wrapped_layer(model):
    class Wrapper(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, hidden_states, **kwargs):
            hidden = self.layer(hidden_states, **kwargs)
            return torch.cat([hidden[:, :-1], hidden[:, -1:] + DIRECTION], 1)

    model.model.layers[0] = Wrapper(first_layer(model))


@kind
def layers_in_another_order(model):
    model.model.layers = nn.ModuleList([model.model.layers[1], model.model.layers[0]])


@kind
def a_layer_less(model):
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1


@kind
def a_layer_less_without_the_config(model):
    model.model.layers = model.model.layers[:1]


@kind
def a_layer_more(model):
    layer = copy.deepcopy(first_layer(model))
    layer.self_attn.layer_idx = 2
    model.model.layers.append(layer)
    model.config.num_hidden_layers = 3


@kind
def other_norm(model):
    model.model.norm = nn.LayerNorm(64)


@kind
def norm_over_tokens(model):
    class OverTokens(nn.Module):
        def forward(self, hidden):
            return (hidden - hidden.mean(1, keepdim=True) * 0.5) * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True))

    first_layer(model).post_attention_layernorm = OverTokens()


@kind
def other_head(model):
    model.lm_head = _seeded(lambda: nn.Linear(64, VOCAB, bias=False))


@kind(has_effect=False)
def head_by_the_number_of_tokens(model):
    """Plain `generate` shows a head one token of each row."""
    subclass(model.lm_head, forward=after_forward(lambda self, out, *_: out.roll(int(out.shape[1] > 1), -1)))


@kind
def other_embedding(model):
    model.set_input_embeddings(_seeded(lambda: nn.Embedding(VOCAB, 64)))


@kind
def embedding_by_the_number_of_tokens(model):
    subclass(model.model.embed_tokens, forward=after_forward(lambda self, out, *_: by_size(out, 0.05)))


@kind
def activation_by_the_number_of_tokens(model):
    class Activation(nn.Module):
        def forward(self, x):
            return nn.functional.silu(x) if x.shape[1] > 1 else nn.functional.relu(x)

    for layer in model.model.layers:
        layer.mlp.act_fn = Activation()


@kind
def activation_module(model):
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.GELU()


@kind(name="qwen3")
def no_norm_of_queries(model):
    first_layer(model).self_attn.q_norm = nn.Identity()


# Weights.


@kind
def other_weights(model):
    model.load_state_dict(tiny_target("llama", seed=6, vocab_size=VOCAB).state_dict())


@kind
def weights_in_place(model):
    with torch.no_grad():
        first_layer(model).mlp.down_proj.weight.mul_(-1)


@kind
def tied_head(model):
    model.lm_head.weight = nn.Parameter(model.model.embed_tokens.weight * 90)
    model.model.embed_tokens.weight = model.lm_head.weight


@kind(settings=(("tie_word_embeddings", True),))
def untied_head(model):
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.flip(0).clone())


@kind(has_effect=None)
def through_half_precision(model):
    model.bfloat16().float()


@kind(has_effect=False)
def double_precision(model):
    model.double()


@kind(has_effect=None)
def half_precision_and_back(model):
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    model.bfloat16().float().load_state_dict(weights)


class Doubled(nn.Module):
    def forward(self, weight):
        return weight * 2


@kind
def parametrized_weight(model):
    parametrize.register_parametrization(first_layer(model).mlp.up_proj, "weight", Doubled())


ADAPTER = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)


@kind
def merged_adapter(model):
    _seeded(lambda: get_peft_model(model, ADAPTER)).eval().merge_and_unload()


@kind
def added_adapter(model):
    _seeded(lambda: inject_adapter_in_model(ADAPTER, model)).eval()


@kind(has_effect=False)
def disabled_adapter(model):
    added_adapter(model)
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            module.enable_adapters(False)


@kind(has_effect=False)
def training_and_back(model):
    model.train()
    model.eval()


@kind(has_effect=False)
def training(model):
    model.train()


@kind
def layer_that_reads_training(model):
    subclass(
        first_layer(model).mlp, forward=after_forward(lambda self, out, *_: by_size(out) if self.training else out)
    )
    first_layer(model).mlp.train()


# Layers that treat forwards or tokens differently.


@kind
def forward_of_one_token(model):
    subclass(first_layer(model).mlp, forward=after_forward(lambda self, out, *_: by_size(out)))


@kind(has_effect=None)
def a_little_of_several_tokens(model):
    """By a hundredth of the hidden states."""
    subclass(first_layer(model).mlp, forward=after_forward(lambda self, out, *_: out * (1 + 0.01 * (out.shape[1] > 1))))


@kind
def forward_of_few_tokens(model):
    """As many as a tree may have, and never as few as a check may take."""
    subclass(
        first_layer(model).mlp,
        forward=after_forward(lambda self, out, *_: out + DIRECTION * (8 < out.shape[1] or out.shape[1] == 1)),
    )


@kind
def last_token_alone(model):
    def last(self, out, *_):
        return torch.cat([out[:, :-1], out[:, -1:] + DIRECTION], 1)

    subclass(first_layer(model).mlp, forward=after_forward(last))


@kind
def length_of_the_cache(model):
    def by_length(self, out, *args, cache=None, past_key_values=None, **kwargs):
        held = cache if cache is not None else past_key_values
        return out + DIRECTION * (int(held.get_seq_length()) % 3)

    subclass(first_layer(model), forward=after_forward(by_length))


@kind
def largest_position(model):
    def by_largest(self, out, *args, position_ids=None, **kwargs):
        return out + DIRECTION * (int(position_ids.max()) % 3)

    subclass(first_layer(model), forward=after_forward(by_largest))


@kind(has_effect=None)
def first_position(model):
    def at_first(self, out, *args, position_ids=None, **kwargs):
        return out + 9 * DIRECTION * (position_ids == 0)[..., None]

    subclass(first_layer(model), forward=after_forward(at_first))


@kind
def absolute_position(model):
    def by_position(self, out, *args, position_ids=None, **kwargs):
        return out + DIRECTION * (position_ids % 3)[..., None]

    subclass(first_layer(model), forward=after_forward(by_position))


@kind
def counter_in_a_buffer(model):
    mlp = first_layer(model).mlp
    mlp.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def count(self, out, *_):
        self.calls += 1
        return out + DIRECTION * (int(self.calls) % 3 == 0)

    subclass(mlp, forward=after_forward(count))


@kind
def convolution_over_tokens(model):
    """A layer that looks at the token before, within a forward."""
    subclass(first_layer(model).mlp, forward=after_forward(lambda self, out, *_: out + 0.5 * out.roll(1, 1)))


@kind
def rows_that_mix(model):
    subclass(first_layer(model).mlp, forward=after_forward(lambda self, out, *_: out + out.mean((0, 1))))
