"""The modules of a target that trained drafts share: embedding, language-model head, rotary embedding, final norm.

The modules and functions are the target's own, found and called, never copied. Differences between architectures
outside of them are rows of data in this file. tests/generation/test_target_modules.py compares each row with the
target's own hidden states, queries and logits.

An attention function gets its context as a keyword of the model's forward. The decoder layers of nemotron and stablelm
accept keywords and do not pass them on to their attention, which would accept them. Such layers are found in the source
of their forward, and hooks pass the keywords on.

[`structure_of`] is what decisions about a model depend on, and [`foreign_code`] tells code of libraries from others.
"""

import ast
import inspect
import re
import sys
import textwrap
import threading
import types
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any, ClassVar, Self

import torch
from torch import nn
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils.hooks import RemovableHandle
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .cache import CACHE_NAME

# Keywords that this package adds to a forward.
KEYWORDS = ("tree", "trial")
# Attributes of every module, on which no decision depends: a mode is examined in every call, as are hooks.
OF_MODULES = vars(nn.Module()).keys()
# Attributes of a module that run in the place of the forward of its class, some of them if a library put them there.
FORWARDS = ("forward", "_old_forward", "_call_impl", "_compiled_call_impl")
LONGEST = "max_seq_len_cached"
PLAIN = {bool, int, float, str}
# Packages whose hooks, forwards and methods are no user's; those of Python wrap functions, which are looked at as well.
LIBRARIES = {__name__.split(".")[0], "torch", "transformers", "accelerate", "bitsandbytes", "compressed_tensors", "hqq"}
LIBRARIES |= {"kernels", "liger_kernel", "optimum", "peft", "torchao", "trl", "contextlib", "functools"}
# Methods of a model that `generate` without a draft calls for every token.
_CALLED = {*GenerationMixin._sample.__code__.co_names, *GenerationMixin._prefill.__code__.co_names}
METHODS = ("_sample", *sorted(name for name in _CALLED if inspect.isfunction(getattr(GenerationMixin, name, None))))


def structure_of(model: nn.Module) -> list[Any]:
    """Return what decisions about a model depend on: two lists are equal if nothing of it has changed in between.

    It holds the tree of modules, their classes, plain attributes and functions, and the functions in the classes and in
    the Python modules of these. It keeps no module alive. Of a Llama of 501 modules it took 0.98 ms on an AMD EPYC.
    """
    state, configs = list[Any](), dict[int, int]()
    kinds, pending = dict[type, None](), [model]
    while pending:
        values, kind = vars(module := pending.pop()), type(module)
        kinds[kind] = None
        state += kind, *values["_modules"]
        names = [name for name in values if name not in OF_MODULES]  # in their order
        if LONGEST in values:  # which dynamic rotary embeddings note in every forward, also for each kind of layer
            names = [name for name in names if not name.endswith(LONGEST)]
        for value in map(values.__getitem__, names):
            if type(value) in PLAIN:
                state.append(value)
            elif type(value) in (dict, list, set, tuple):
                items = (*value, *value.values()) if type(value) is dict else value
                state.append(tuple(item for item in items if type(item) in PLAIN))
            elif getattr(value, "is_of_loop", False):
                continue  # the forward of a layer while the loop runs
            elif callable(value) and not isinstance(value, nn.Module | weakref.ref):
                state.append(weakly(value))
            elif isinstance(value, PreTrainedConfig):
                state.append(configs.setdefault(id(value), len(configs)))
        pending += [child for child in values["_modules"].values() if child is not None]
    classes = dict.fromkeys(cls for kind in kinds for cls in kind.__mro__[:-1])
    files = dict.fromkeys(sys.modules.get(cls.__module__) for cls in classes)
    for owner in (*classes, *filter(None, files)):
        parts = [part for part in vars(owner).values() if callable(part) or isinstance(part, property | classmethod)]
        state += [weakref.ref(part) if type(part) is types.FunctionType else weakly(part) for part in parts]
    for cls in classes:
        state += [
            part for name, part in vars(cls).items() if type(part) in PLAIN and not name.endswith("_cached_value")
        ]
    return state


def weakly(value: Any) -> Any:
    """Return a reference that equals another one to the same object."""
    try:
        return weakref.ref(value)
    except TypeError:  # of C, and no model's
        return value


def package_of(function: Any) -> str:
    """Return the package that the code of a function is in; `__module__` may be that of another one."""
    if re.search("snapshots.*build.torch", getattr(getattr(function, "__code__", None), "co_filename", "")):
        return "kernels"  # which runs code of the Hub where it was downloaded to, under a name of its own
    return str(getattr(function, "__globals__", {}).get("__name__", "")).split(".")[0]


def attention_functions(config: Any) -> tuple[Any, Any, Any]:
    """Return the name of the attention implementation of a text config, and its functions for attention and masks."""
    name = str(config._attn_implementation)
    return name, ALL_ATTENTION_FUNCTIONS.get(name), ALL_MASK_ATTENTION_FUNCTIONS.get(name)


def foreign_methods(model: PreTrainedModel) -> list[str]:
    """Return the methods that `generate` calls in its loop, and functions of attention, that are of no library."""
    kind, own = type(model), vars(model)
    found = [f"{kind.__name__}.{name}" for name in METHODS if foreign_code(getattr(kind, name, None)) is not None]
    found += [f"{name} on the model" for name in METHODS if foreign_code(own.get(name)) is not None]
    functions = map(foreign_code, attention_functions(model.config.get_text_config(decoder=True))[1:])
    return found + [f"{name_of(one)}, a function of attention" for one in functions if one is not None]


def foreign_code(one: Any, modules: Collection[int] = (), seen: tuple[Any, ...] = ()) -> Any:
    """Return what is of no library in a function and all that it wraps, binds or holds; `None` if nothing is.

    Forwards of a model are of a library; `modules` are the ids of its modules.
    """
    if one is None or id(one) in modules or any(one is other for other in seen):
        return None
    parts, package = [vars(one)["__wrapped__"]] if "__wrapped__" in getattr(one, "__dict__", ()) else [], ""
    if isinstance(one, types.MethodType):
        owner, name = one.__self__, one.__name__
        if id(owner) in modules and one.__func__ is getattr(type(owner), name, None):
            return None
        parts += [one.__func__, owner if isinstance(owner, nn.Sequential) else type(owner)]
    elif isinstance(one, partial):
        parts += [*one.args, *one.keywords.values(), one.func]
    elif isinstance(one, type | types.BuiltinFunctionType):
        package = str(one.__module__).split(".")[0]
    elif isinstance(one, types.FunctionType):
        package = package_of(one)
        parts += [cell.cell_contents for cell in one.__closure__ or () if cell != types.CellType()]
    elif not isinstance(one, nn.Module):
        package = package_of(type(one).__call__)
    if not isinstance(one, types.MethodType | partial) and package not in LIBRARIES:
        return one
    found = (foreign_code(part, modules, (*seen, one)) for part in parts if callable(part))
    return next((part for part in found if part is not None), None)


def name_of(function: Any) -> str:
    """Return the name of a function or of the class of an object, with that of the code if that is another one."""
    function = getattr(function, "__func__", function)
    name = str(getattr(function, "__qualname__", type(function).__qualname__))
    own = getattr(getattr(function, "__code__", None), "co_qualname", name)
    return name if own == name else f"{name} ({own})"


def before_forward(module: nn.Module, hook: Callable[[Any, dict[str, Any]], Any]) -> RemovableHandle:
    """Call `hook(args, kwargs)` before every forward of a module; it may return others. The handle removes it.

    A forward of another thread that has begun to call the hooks of a module passes no keywords to one that is removed
    meanwhile (`torch.nn.Module._call_impl`). The hook then gets none, and what it returns is not used.
    """

    def call(_: nn.Module, args: Any, kwargs: dict[str, Any] | None = None) -> Any:
        found = hook(args, kwargs or {})
        return None if kwargs is None else found

    return module.register_forward_pre_hook(call, with_kwargs=True)


@contextmanager
def keywords_forwarded(model: nn.Module) -> Iterator[None]:
    """Pass `KEYWORDS` of this thread's forwards on to every attention layer of `model` while the context is open."""
    pairs = layers_dropping_keywords(model)
    if not pairs:
        yield
        return
    of_layer = threading.local()  # another thread may be using the same model

    def note(args: Any, kwargs: dict[str, Any]) -> None:
        of_layer.keywords = {name: kwargs[name] for name in KEYWORDS if name in kwargs}

    def add(args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, getattr(of_layer, "keywords", {}) | kwargs

    with ExitStack() as hooks:
        for layer, attention in pairs:
            for module, hook in ((layer, note), (attention, add)):
                hooks.callback(before_forward(module, hook).remove)
        yield


def layers_dropping_keywords(model: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    """Return the decoder layers that do not pass keywords on, each with its attention layer."""
    return [
        (layer, child)
        for layer in model.modules()
        for child in layer.children()
        if _attends(child) and _keeps_keywords(type(layer))  # type: ignore[arg-type]
    ]


def attention_layers(model: nn.Module) -> dict[int, nn.Module]:
    """Return every attention layer of `model` by the index of its cache layer."""
    return {module.layer_idx: module for module in model.modules() if _attends(module)}  # type: ignore[misc]


def _attends(module: nn.Module) -> bool:
    return isinstance(getattr(module, "layer_idx", None), int) and "get_interface(" in _source(type(module))  # type: ignore[arg-type]


@cache
def _keeps_keywords(kind: type) -> bool:
    """Return whether a forward accepts any keyword and passes none on."""
    parameters = inspect.signature(kind.forward).parameters.values()  # type: ignore[attr-defined]
    names = [parameter.name for parameter in parameters if parameter.kind is parameter.VAR_KEYWORD]
    if not names or not (source := _source(kind)):  # transformers, too, trusts a model without source
        return False
    return names[0] not in (node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name))


@cache
def _source(kind: type) -> str:
    """Return the source of a forward; an empty string if there is none."""
    try:
        return textwrap.dedent(inspect.getsource(kind.forward))  # type: ignore[attr-defined]
    except (OSError, TypeError):
        return ""


_GRANITE = ("granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared")

# Config field of the factor between the embedding module and the first layer, if the module does not apply it.
EMBEDDING_FACTORS = dict.fromkeys((*_GRANITE, "hyperclovax"), "embedding_multiplier")

# Config fields of a factor and of a divisor between the head module and the logits.
LOGIT_FACTORS = dict.fromkeys(("cohere", "cohere2", "cohere2_moe"), "logit_scale") | {"hyperclovax": "logits_scaling"}
LOGIT_DIVISORS = dict.fromkeys(_GRANITE, "logits_scaling")


class TargetEnds:
    """Embedding and language-model head of a target, with the factors around them."""

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.config = model.config.get_text_config(decoder=True)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the input `(B, N, hidden)` of the target's first layer for `tokens` `(B, N)`."""
        hidden = self.model.get_input_embeddings()(tokens)
        factor = EMBEDDING_FACTORS.get(self.config.model_type)
        return hidden if factor is None else hidden * getattr(self.config, factor)

    def head(self, hidden: torch.Tensor, module: Any = None) -> torch.Tensor:
        """Return logits `(..., vocab)` of hidden states `(..., hidden)`, without applying the target's final norm.

        `module` is a function in the place of the head module.
        """
        logits = (module or self.model.get_output_embeddings())(hidden)
        kind = self.config.model_type
        if kind in LOGIT_FACTORS:
            logits = logits * getattr(self.config, LOGIT_FACTORS[kind])
        if kind in LOGIT_DIVISORS:
            logits = logits / getattr(self.config, LOGIT_DIVISORS[kind])
        softcap = getattr(self.config, "final_logit_softcapping", None)
        return logits if softcap is None else torch.tanh(logits / softcap) * softcap


class PartOfHead:
    """The language-model head of a target for some of its tokens.

    The rows of these tokens are copied if the head is a plain linear layer in memory, so that only they are read.

    Args:
        ends ([`TargetEnds`]): Embedding and head of the target.
        token_ids (`torch.LongTensor` of shape `(V,)`): The tokens.
    """

    def __init__(self, ends: TargetEnds, token_ids: torch.Tensor):
        head = ends.model.get_output_embeddings()
        self.ends, self.token_ids = ends, token_ids.to(head.weight.device)
        whole = head.weight.shape[0] >= ends.config.vocab_size and not hasattr(head.weight, "placements")
        is_plain = type(head) is nn.Linear and "forward" not in vars(head) and not head.weight.is_meta and whole
        self.weight = head.weight.detach()[self.token_ids] if is_plain else None
        self.bias = head.bias.detach()[self.token_ids] if is_plain and head.bias is not None else None

    @property
    def nbytes(self) -> int:
        return 0 if self.weight is None else self.weight.nbytes

    def renew(self) -> None:
        """Copy the rows again to where they are, as training may have changed the head since."""
        head = self.ends.model.get_output_embeddings()
        for own, of_head in ((self.weight, head.weight), (self.bias, head.bias)):
            if own is not None:
                own.copy_(of_head.detach()[self.token_ids])

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits `(..., V)` of hidden states `(..., hidden)`, see [`TargetEnds.head`]."""
        if self.weight is None:
            return self.ends.head(hidden)[..., self.token_ids]
        return self.ends.head(hidden, lambda states: nn.functional.linear(states, self.weight, self.bias))


def device_of(module: nn.Module, default: torch.device) -> torch.device:
    """Return the device that a module of a target runs on; `default` if it has no parameters."""
    # accelerate may store weights on another device than the one they run on, which is in the hooks of the modules
    hooks = (getattr(part, "_hf_hook", None) for part in module.modules())
    devices = (getattr(hook, "execution_device", None) for hook in hooks)
    device = next((device for device in devices if device is not None), None)
    if device is None:
        device = next((parameter.device for parameter in module.parameters()), default)
    return torch.device(device)


# Layer type that does not rotate queries and keys, in models of which some layers have a sliding window.
UNROTATED_LAYERS = dict.fromkeys(("cohere2", "cohere2_moe", "exaone4", "exaone_moe"), "full_attention")

# Name of the function that rotates queries and keys, in the Python module of every attention class.
ROTATION = "apply_rotary_pos_emb"


class TargetParts(TargetEnds):
    """Modules of a target that a draft with attention uses.

    `kv_layer` is the index of the layer whose keys and values the draft attends to.
    """

    def __init__(self, model: PreTrainedModel, kv_layer: int):
        super().__init__(model)
        self.kv_layer = kv_layer
        self.decoder = decoder_of(model)
        self.attention = attention_of(self.decoder, kv_layer)
        self.rotates = rotates(self.config, kv_layer)
        self._rotation = _rotation_of(self.attention)
        self._layer_type = _rotary_layer_type(self.decoder.rotary_emb, self.config, kv_layer)
        # time, height and width, the same for text; qwen3_5 has a section of its own if the configuration has none
        section = getattr(self.decoder.rotary_emb, "mrope_section", None)
        section = section or (getattr(self.config, "rope_parameters", None) or {}).get("mrope_section") or ()
        self._num_axes = len(section[self._layer_type] if isinstance(section, dict) else section)
        self._is_partial: bool | None = None

    @property
    def place(self) -> tuple[torch.device, torch.dtype]:
        """Device and dtype of the keys that the KV layer computes."""
        weight = self.model.get_input_embeddings().weight
        return device_of(self.attention, weight.device), weight.dtype

    def rotary(self, positions: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines of `positions` `(B, N)` at the KV layer, with dtype and device of `like`."""
        extra = {} if self._layer_type is None else {"layer_type": self._layer_type}
        if self._num_axes:
            positions = positions.expand(self._num_axes, -1, -1)
        cos, sin = self.decoder.rotary_emb(like, positions, **extra)
        return cos, sin

    def rotate(
        self, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries `(B, H, N, D)` and keys `(B, K, N, D)`, rotated as in the target."""
        if self._is_partial is None:
            self._is_partial = _takes_parts_only(self._rotation, query, cos, sin)
        if not self._is_partial:
            return rotated(self._rotation, query, key, cos, sin)
        size = cos.shape[-1]
        parts = self._rotation(query[..., :size], key[..., :size], cos, sin)
        query, key = (
            torch.cat([turned, whole[..., size:]], -1) for turned, whole in zip(parts, (query, key), strict=True)
        )
        return query, key

    def rotate_query(self, query: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Return the queries rotated if the cached keys of the KV layer are rotated, else unchanged."""
        return self.rotate(query, query[:, :0], cos, sin)[0] if self.rotates else query


def rotated(rotation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return queries and keys rotated by a function; a mode of torch functions may replace it."""
    if has_torch_function(args[:1]):
        return handle_torch_function(rotated, args[:1], rotation, *args, **kwargs)
    return rotation(*args, **kwargs)


def written(
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    first: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write keys and values `(B, K, n, D)` to slots of two buffers, and return these.

    They are those of `slots` `(T,)` or `(B, T)` from `first` on. A mode of torch functions may replace it, which gets
    the keys before any other function of torch.
    """
    states = key, value
    if has_torch_function(states):
        return handle_torch_function(written, states, *states, keys, values, slots, first)
    slots = slots[..., first : first + key.shape[2]]
    row = torch.arange(len(slots), device=slots.device)[:, None] if slots.dim() == 2 else None
    for part, buffer in ((key, keys), (value, values)):
        part = part.to(buffer.dtype)  # another one comes from autocast
        if row is None:
            buffer.index_copy_(2, slots, part)
        else:
            buffer[row, :, slots] = part.transpose(1, 2)
    return keys, values


def decoder_of(model: PreTrainedModel) -> Any:
    """Return the module that holds the layers and the rotary embedding."""
    for module in model.get_decoder().modules():
        if getattr(module, "rotary_emb", None) is not None and hasattr(module, "layers"):
            return module
    raise ValueError(
        f"{type(model).__name__} has no rotary embedding beside its layers, which this draft needs. Use a "
        "training-free draft, such as SpecAttnDraftModel."
    )


def attention_of(decoder: Any, layer: int) -> Any:
    """Return the attention module of a layer, which rotates queries and keys with `apply_rotary_pos_emb`."""
    attention = attention_layers(decoder).get(layer)
    if attention is None or not hasattr(sys.modules[type(attention).__module__], ROTATION):
        raise ValueError(
            f"{type(decoder).__name__} has no attention in layer {layer} with a function {ROTATION} in its module, "
            "which this draft needs. Use a training-free draft, such as SpecAttnDraftModel."
        )
    return attention


def _rotation_of(attention: Any) -> Any:
    """Return the target's own function as `rotation(query, key, cos, sin)`; some take one tensor at a time."""
    function = vars(sys.modules[type(attention).__module__])[ROTATION]
    if list(inspect.signature(function).parameters)[1] != "cos":
        return function
    return lambda query, key, cos, sin: (function(query, cos, sin), function(key, cos, sin))


def _takes_parts_only(rotation: Any, query: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """Return whether the rotation function expects only the rotated part of each head; some split heads themselves."""
    if cos.shape[-1] >= query.shape[-1]:
        return False
    one = query[:, :1, :1]
    try:
        return bool(rotation(one, one, cos[:, :1], sin[:, :1])[0].shape != one.shape)
    except RuntimeError:
        return True


def _rotary_layer_type(rotary_emb: Any, config: Any, layer: int) -> str | None:
    """Return the argument `layer_type` of a rotary embedding with settings per layer type; `None` without such types.

    For a layer without rotary embedding it is the type of the other layers, as a draft always rotates its own queries.
    """
    if "layer_type" not in inspect.signature(rotary_emb.forward).parameters:
        return None
    kinds = dict.fromkeys([config.layer_types[layer], *config.layer_types])
    return next(kind for kind in kinds if (config.rope_parameters or {}).get(kind, True) is not None)


def rotates(config: Any, layer: int) -> bool:
    """Return whether layer `layer` of a target rotates its queries and keys."""
    kinds = getattr(config, "layer_types", None)
    if kinds and (getattr(config, "rope_parameters", None) or {}).get(kinds[layer], True) is None:
        return False
    unrotated = UNROTATED_LAYERS.get(config.model_type)
    if unrotated is not None and config.sliding_window is not None and config.layer_types[layer] == unrotated:
        return False
    no_rope_layers = getattr(config, "no_rope_layers", None)  # 1: the layer rotates
    return True if not no_rope_layers else bool(no_rope_layers[layer])


def shape_of(config: Any, name: str) -> Any:
    """Return a field of a target's text config: a list if its layers differ (gemma4), `None` if it does not exist."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers refuses to read a field that differs between layers
        return [getattr(layer, name, None) for layer in config.per_layer_config]


def last_full_layer(config: Any) -> int:
    """Return the last layer that caches keys of the text and has no sliding window; the last with keys if all slide."""
    return last_layer(config, "full_attention")


def last_layer(config: Any, kind: str) -> int:
    """Return the last layer of a type that caches keys of the text; the last with keys if none has this type."""
    others = set(getattr(config, "cross_attention_layers", None) or ())  # keys of images
    # the last layers of gemma3n read the keys of earlier ones
    depth = int(config.num_hidden_layers) - int(getattr(config, "num_kv_shared_layers", None) or 0)
    layers = [layer for layer in range(depth) if layer not in others]
    kinds = getattr(config, "layer_types", None) or []
    found = [layer for layer in layers if layer < len(kinds) and kinds[layer] == kind]
    return (found or layers)[-1]


# Names of the norm after the last layer, the most common first.
FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "norm_f", "ln_f")


def final_norm_of(model: PreTrainedModel) -> nn.Module:
    """Return the norm between the last layer and the language-model head."""
    for module in model.get_decoder().modules():
        if hasattr(module, "layers") or hasattr(module, "h"):
            for name in FINAL_NORMS:
                if isinstance(norm := getattr(module, name, None), nn.Module):
                    return norm
    raise ValueError(
        f"{type(model).__name__} has no final norm under one of the names {', '.join(FINAL_NORMS)}, which this draft "
        "needs. Use a training-free draft, such as SpecAttnDraftModel."
    )


def refuse_compiled_forward(model: PreTrainedModel) -> None:
    """Refuse a model whose forward the user compiled, as hooks on the final norm do not run in that graph."""
    for module in (model, model.get_decoder()):
        if module._compiled_call_impl is not None or hasattr(module.forward, "_torchdynamo_orig_callable"):
            raise ValueError(
                f"the forward of {type(module).__name__} is compiled, and this draft needs hooks inside it. Use the "
                "model as it was before torch.compile (`del model.forward`), with "
                'draft.generation_config.compile = "compile".'
            )


class LayerInputs:
    """Keep the inputs of some layers in forwards of this thread, while the context is open.

    The input of layer j is the residual stream after j layers, transformers' `hidden_states[j]`. Transformers'
    `hidden_states[-1]` is the output of the final norm, and `output_hidden_states` keeps the states of all layers.

    Args:
        layers (`Sequence[int]` or `True`): Indices of layers. The number of layers stands for the final norm, and so
            does `True`, which needs no list of layers.
    """

    def __init__(self, model: PreTrainedModel, layers: bool | Sequence[int]):
        self._name = type(model).__name__
        self._modules = (
            [final_norm_of(model)] if isinstance(layers, bool) else [layer_at(model, layer) for layer in layers]
        )
        self._caught: dict[int, torch.Tensor] = {}

    @property
    def hidden(self) -> torch.Tensor:
        """Inputs of the layers in the latest forward, one after another, `(B, N, layers * hidden)`."""
        return joined_inputs(self._caught, len(self._modules))

    def __enter__(self) -> Self:
        self._thread = threading.get_ident()  # another thread may be generating on the same model
        self._handles = [before_forward(module, self._hook(place)) for place, module in enumerate(self._modules)]
        return self

    def __exit__(self, *error: Any) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, place: int) -> Callable[[tuple[Any, ...], dict[str, Any]], None]:
        def catch(inputs: tuple[Any, ...], arguments: dict[str, Any]) -> None:
            if not torch.compiler.is_compiling() and threading.get_ident() != self._thread:
                return
            states = inputs[0] if inputs else arguments["hidden_states"]
            if states.dim() != 3:
                raise ValueError(
                    f"the layers of {self._name} pass states of shape {tuple(states.shape)}, and the draft reads one "
                    "stream (batch, tokens, hidden). Use a draft that does not read them, such as SpecAttnDraftModel."
                )
            if torch.compiler.is_compiling():
                if _traced.wanted:
                    _traced.caught[place] = states
            else:
                self._keep(place, states)

        return catch

    def _keep(self, place: int, states: torch.Tensor) -> None:
        self._caught[place] = states


def layer_at(model: PreTrainedModel, layer: int) -> nn.Module:
    """Return decoder layer `layer` of a model, or its final norm for the number of layers."""
    for module in model.get_decoder().modules():
        layers = getattr(module, "layers", getattr(module, "h", None))
        if isinstance(layers, nn.ModuleList):
            if layer == len(layers):
                return final_norm_of(model)
            if 0 <= layer < len(layers):
                return layers[layer]
            raise ValueError(
                f"layer {layer}: {type(model).__name__} has {len(layers)} layers. Pass indices from 0 to {len(layers)}."
            )
    raise ValueError(
        f"{type(model).__name__} has no list of layers under one of the names layers, h, whose inputs the draft reads. "
        "Use a draft that does not read them, such as SpecAttnDraftModel."
    )


def joined_inputs(caught: dict[int, torch.Tensor], count: int) -> torch.Tensor:
    """Return the caught inputs `(B, N, hidden)` of `count` places, joined along the last dimension."""
    states = [caught[place] for place in range(count)]
    return states[0] if count == 1 else torch.cat([one.to(states[-1].device) for one in states], -1)


class _Traced:
    """Inputs of layers in a forward that is being traced. It holds nothing outside of tracing.

    A traced function can neither register hooks nor read its thread. The flag `wanted` distinguishes its forward from
    one that another thread traces while the hooks are registered.
    """

    wanted = False
    caught: ClassVar[dict[int, torch.Tensor]] = {}


_traced = _Traced()


def with_final_norm_input(
    model: PreTrainedModel, forward: Callable[[], torch.Tensor], layers: bool | tuple[int, ...] = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result of `forward`, and the input `(B, N, hidden)` of the final norm in it, or those of layers.

    It may be part of a compiled function if the context of [`LayerInputs`] is open during every call of that function.
    """
    if not torch.compiler.is_compiling():
        with LayerInputs(model, layers) as caught:
            return forward(), caught.hidden
    _traced.wanted = True
    result = forward()
    hidden = joined_inputs(_traced.caught, 1 if isinstance(layers, bool) else len(layers))
    _traced.wanted = False
    _traced.caught.clear()
    return result, hidden


def plain_forward(model: PreTrainedModel, cache: Any, positions: torch.Tensor, num_keys: int, **inputs: Any) -> Any:
    """Return the result of a forward of prompts at `positions` `(B, N)`, which attend to `num_keys` keys."""
    return model(**inputs, **{CACHE_NAME: cache}, use_cache=True)


def plain_logits(forward: Any, model: PreTrainedModel, cache: Any, tokens: torch.Tensor, **more: Any) -> Any:
    """Logits of tokens `(B, N)` after those of the cache, by [`plain_forward`] or the function in its place."""
    start, count = cache.get_seq_length(), tokens.shape[1]
    positions = torch.arange(start, start + count, device=tokens.device).expand_as(tokens)
    inputs = {"input_ids": tokens, "position_ids": positions, **more}
    return forward(model, cache, positions, start + count, **inputs).logits


def logits_under(
    context: Any,
    model: PreTrainedModel,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    cache: Any,
    mask: torch.Tensor,
    **more: Any,
) -> torch.Tensor:
    """Logits `(B, N, vocab)` of `(B, N)` tokens in one forward whose attention layers are handed `context`.

    `more` are further arguments of the forward.
    """
    logits: torch.Tensor = model(
        input_ids=tokens,
        position_ids=positions,
        **{CACHE_NAME: cache},
        attention_mask=mask,
        tree=context,
        use_cache=True,
        **more,
    ).logits
    return logits
