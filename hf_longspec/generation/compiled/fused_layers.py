"""Fused kernels in captured steps, `compile="fused"`: norms, sums, rotary embeddings, gates, delta rules.

Most launches of a captured step are small operations between the matrix products. While a step is captured, kernels of
`attention_backends/triton/layers.py` run in their place, in any model and draft. The model is not changed: what follows
holds for the thread that captures, and only until the capture ends.

[`FusedOperations`] sees every function of torch. It holds back a sum, an activation or a rotation until the next
function. A norm of this very sum, a product with this very activation, or a write of these very keys to the cache is
then one kernel with it. Any other function runs after the operation that was held back, so no function ever sees a
tensor that is not computed yet.

Torch has no function for an RMS norm as most models write it, and none for a rotation. Modules that look like a norm
are replaced, and so is the function that attention modules rotate with. A kernel runs for them, for an activation and
for one node of a delta rule, if a comparison on first use shows that it agrees with the original up to rounding.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from inspect import signature, unwrap
from types import CodeType, FunctionType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function_unary
from transformers.utils import logging

from ...attention_backends.triton.layers import (
    NORM_FORMS,
    ROTARY_FORMS,
    NormForm,
    RotaryForm,
    add_norm,
    delta_rule,
    gated,
    rotate,
)
from ..special_cases.recurrences import delta_step
from ..target import FixedStep
from ..target_modules import ROTATION, rotated, written

logger = logging.get_logger(__name__)

# Modules, and what they run as `forward(module, ...)`.
Replaced = list[tuple[nn.Module, Callable[..., Any]]]
# Largest difference of two results that agree, in rounding steps of the largest number.
MOST_STEPS = 8
TOKENS = 3  # of a comparison
GATES = ("silu", "sigmoid")  # activations of norms with a gate
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class FusedRunner:
    """Run steps with fused kernels, inside of [`CapturedRunner`]."""

    compiles = False

    def __init__(self) -> None:
        self._replaced: dict[nn.Module, Replaced] = {}  # as every captured step runs several times

    def __call__(self, step: FixedStep, *inputs: torch.Tensor, sizes: tuple = ()) -> Any:
        """Return `step.run(*inputs)`."""
        if torch.is_autocast_enabled("cuda"):  # kernels take the dtypes that tensors have
            return step.run(*inputs)
        module = step.module
        if module not in self._replaced:
            self._replaced[module] = fused_modules(module)
        with fused(self._replaced[module]):
            return step.run(*inputs)


def fused_modules(model: nn.Module) -> Replaced:
    """Return the modules of `model` that have fused kernels, with their forwards."""
    return [(module, forward) for module in model.modules() if (forward := fused_forward(module)) is not None]


@contextmanager
def fused(replaced: Replaced) -> Iterator[None]:
    """Let this thread run fused kernels, and these forwards of modules."""
    thread = threading.get_ident()
    try:
        for module, forward in replaced:
            module.forward = partial(_in_thread, thread, module, forward)
        with FusedOperations():
            yield
    finally:
        for module, _ in replaced:
            vars(module).pop("forward", None)


def _in_thread(thread: int, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run the fused forward in one thread, and that of the class in all others."""
    if threading.get_ident() != thread:
        return type(module).forward(module, *args, **kwargs)
    return forward(module, *args, **kwargs)


def fused_forward(module: nn.Module) -> Callable[..., Any] | None:
    """Return the fused forward of a module as `forward(module, ...)`, or `None` if the module runs as it is."""
    if "forward" in vars(module):
        return None
    own = unwrap(type(module).forward)
    if isinstance(own, FunctionType) and ROTATION in own.__globals__ and _names(own.__code__, ROTATION):
        return _rotating(own)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    parts: Any = dict((*module.named_parameters(), *module.named_buffers(), *module.named_children()))
    if list(parts) != ["weight"] or parts["weight"].dim() != 1 or not isinstance(epsilon, float):
        return None
    has_gate = list(signature(own).parameters)[1:] == ["hidden_states", "gate"]
    form = _norm_form(module, epsilon, GATES if has_gate else (None,))
    return None if form is None else partial(_norm_forward, epsilon, *form)


def _names(code: CodeType, name: str) -> bool:
    """Return whether a function, or one inside of it, uses a global name."""
    return name in code.co_names or any(_names(x, name) for x in code.co_consts if isinstance(x, CodeType))


def _rotating(own: Any) -> Callable[..., Any]:
    """Return a forward that rotates by [`rotated`], else the same: another name in the globals of its code."""
    names = {**own.__globals__, ROTATION: partial(rotated, own.__globals__[ROTATION])}
    forward = FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
    forward.__kwdefaults__ = own.__kwdefaults__
    return forward


def _norm_forward(
    epsilon: float, form: NormForm, gate: str | None, norm: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    weight = norm.weight
    is_alike = hidden.dtype == weight.dtype and hidden.shape[-1:] == weight.shape and hidden.numel()
    if kwargs or not is_alike or len(args) != (gate is not None) or not all(_are_alike(hidden, x) for x in args):
        return type(norm).forward(norm, hidden, *args, **kwargs)
    # nothing is held back after it, as it passes `FusedOperations`
    normed = normalized(hidden, weight, epsilon, form)
    return normed if gate is None else gated(gate, args[0], normed)


def normalized(hidden: torch.Tensor, weight: torch.Tensor, epsilon: float, form: NormForm) -> torch.Tensor:
    """Return the RMS norm of `hidden` `(..., size)`, by one kernel. It is a function for [`FusedOperations`]."""
    if has_torch_function_unary(hidden):
        return handle_torch_function(normalized, (hidden,), hidden, weight, epsilon, form)
    return add_norm(hidden, weight, epsilon, form)


class Sum(NamedTuple):
    """A residual sum that is held back, and the memory of its result."""

    result: torch.Tensor
    terms: tuple[torch.Tensor, torch.Tensor]

    def run(self) -> None:
        torch.add(*self.terms, out=self.result)

    def joined(self, function: Any, args: Sequence[Any]) -> Any:
        """Return the result of `function`, a norm of the sum, by one kernel with the sum; `None` if it is another."""
        if function is not normalized or args[0] is not self.result:
            return None
        (first, second), (_, weight, epsilon, form) = self.terms, args
        return add_norm(first, weight, epsilon, form, second, self.result)


class Activation(NamedTuple):
    """An activation that is held back."""

    result: torch.Tensor
    name: str
    x: torch.Tensor

    def run(self) -> None:
        _activate(self.name, self.x, self.result)

    def joined(self, function: Any, args: Sequence[Any]) -> Any:
        """Return the product of the activation and another tensor by one kernel; `None` for other functions."""
        if function not in PRODUCTS or len(args) != 2:
            return None
        others = [x for x in args if x is not self.result]
        return gated(self.name, self.x, others[0]) if len(others) == 1 and _are_alike(self.x, others[0]) else None


class Rotation(NamedTuple):
    """A rotation that is held back."""

    result: tuple[torch.Tensor, torch.Tensor]
    form: RotaryForm
    args: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # query, key, cos, sin

    def run(self) -> None:
        rotate(*self.args, self.form, *self.result)

    def joined(self, function: Any, args: Sequence[Any]) -> Any:
        """Return the buffers that the keys are written to, by one kernel; `None` for other functions."""
        if function is not written or args[0] is not self.result[1]:
            return None
        _, value, keys, values, slots, first = args
        key = self.args[1]
        slots = slots[..., first : first + key.shape[2]]
        if value.stride(-1) != 1 or not value.dtype == values.dtype == key.dtype == keys.dtype:
            return None
        rotate(*self.args, self.form, self.result[0], keys, (value, values, slots))
        return keys, values


class FusedOperations(TorchFunctionMode):
    """Run pairs of operations as one kernel, in this thread, while the context is open."""

    def __init__(self) -> None:
        super().__init__()
        self._held: Sum | Activation | Rotation | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, held = kwargs or {}, self._held
        if func in OF_METADATA:
            return func(*args, **kwargs)
        if held is not None:
            if not kwargs and (result := held.joined(func, args)) is not None:
                self._held = None
                return result
            # the projection between the activation of a gate and its product
            if func is F.linear and all(x is not held.result for x in (*args, *kwargs.values())):
                return func(*args, **kwargs)
            self.run_held()
        if func in STARTS and not torch.is_grad_enabled():
            self._held = STARTS[func](*args, **kwargs)
            if self._held is not None:
                return self._held.result
        if func is delta_step and _delta_rule_agrees(*args):
            return delta_rule(*args)
        return func(*args, **kwargs)

    def run_held(self) -> None:
        """Run the operation that is held back, if there is one."""
        held, self._held = self._held, None
        if held is not None:
            held.run()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if error[0] is None:
            self.run_held()


def _sum(first: Any, second: Any = None, **kwargs: Any) -> Sum | None:
    if kwargs or not _are_alike(first, second) or first.dim() != 3:
        return None
    return Sum(torch.empty_like(first), (first, second)) if first.is_contiguous() and second.is_contiguous() else None


def _activation(name: str, x: Any, inplace: bool = False, **kwargs: Any) -> Activation | None:
    if kwargs or inplace or not _are_alike(x, x) or not _activation_agrees(name, x.dtype, x.device):
        return None
    return Activation(torch.empty_like(x), name, x)


def _gelu(x: Any, approximate: str = "none") -> Activation | None:
    return _activation("gelu_tanh" if approximate == "tanh" else "gelu", x)


def _rotation(rotation: Any, *args: Any, **kwargs: Any) -> Rotation | None:
    if kwargs or len(args) != 4 or not all(isinstance(x, torch.Tensor) for x in args):
        return None
    query, key, cos, sin = args
    same = query.shape[0] == key.shape[0] and query.shape[2:] == key.shape[2:] and cos.shape == sin.shape
    if query.dim() != 4 or not same or cos.dim() != 3 or cos.shape[1] not in (1, query.shape[2]) or not query.numel():
        return None
    dtypes = query.dtype in DTYPES and key.dtype == query.dtype and cos.dtype == sin.dtype
    if not dtypes or cos.dtype not in (query.dtype, torch.float32) or any(x.stride(-1) != 1 for x in args):
        return None
    form = _rotary_form(rotation, query.shape[-1], query.dtype, cos, sin)
    return None if form is None else Rotation((torch.empty_like(query), torch.empty_like(key)), form, args)


def _are_alike(first: Any, second: Any) -> bool:
    """Return whether both are tensors of one shape, dtype and device that kernels take."""
    if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor) or not first.numel():
        return False
    return first.dtype in DTYPES and all(getattr(first, x) == getattr(second, x) for x in ("shape", "dtype", "device"))


def _activate(name: str, x: torch.Tensor, out: torch.Tensor) -> None:
    if name == "silu":
        torch.ops.aten.silu.out(x, out=out)
    elif name == "sigmoid":
        torch.sigmoid(x, out=out)
    else:
        torch.ops.aten.gelu.out(x, approximate="tanh" if name == "gelu_tanh" else "none", out=out)


# What is held back.
STARTS: dict[Any, Callable[..., Any]] = {
    torch.Tensor.add: _sum,
    torch.add: _sum,
    F.silu: partial(_activation, "silu"),
    F.gelu: _gelu,
    torch.sigmoid: partial(_activation, "sigmoid"),
    torch.Tensor.sigmoid: partial(_activation, "sigmoid"),
    rotated: _rotation,
}
PRODUCTS = {torch.Tensor.mul, torch.mul}
# Functions that read no numbers and return no tensors.
_ATTRIBUTES = ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_cuda", "is_meta")
OF_METADATA = {getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES}
OF_METADATA |= {getattr(torch.Tensor, name) for name in ("dim", "size", "stride", "numel", "is_contiguous")}

# Decisions about norms and activations by what they depend on, and about rotations by their function.
_decided: dict[tuple, Any] = {}
_of_rotations: WeakKeyDictionary[Any, dict[tuple, Any]] = WeakKeyDictionary()
_UNDECIDED = object()


def _once(decisions: dict[tuple, Any], key: tuple, decide: Callable[[], Any]) -> Any:
    """Return a decision, which a comparison makes on first use; `None` in captures, which cannot compare."""
    if key not in decisions:
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return None
        try:
            decision = decide()
        except Exception as error:  # of a module of another form, or of Triton, whose errors share no class
            logger.info("hf_longspec: %s has no fused kernel: %s", key[0], error)
            decision = None
        if decision is _UNDECIDED:
            return None
        decisions[key] = decision
    return decisions[key]


def _norm_form(
    norm: Any, epsilon: float, gates: tuple[str | None, ...] = (None,)
) -> tuple[NormForm, str | None] | None:
    """Return form and gate of a norm whose kernels agree best with it; `None` if none agree."""

    def decide() -> tuple[NormForm, str | None] | None:
        twin = copy(norm)
        weight = _numbers(norm.weight, size)
        twin._parameters = {"weight": nn.Parameter(weight, requires_grad=False)}
        hidden, residual = _numbers(weight, 1, TOKENS, size), _numbers(weight, 1, 2 * TOKENS, size)[:, TOKENS:] / 2
        total = torch.empty_like(hidden)
        expected = type(norm).forward(twin, hidden + residual, *([] if None in gates else [2 * hidden]))
        found: dict[Any, torch.Tensor] = {}
        for form in NORM_FORMS:
            normed = add_norm(hidden, weight, epsilon, form, residual.contiguous(), total)
            for gate in gates:
                found[form, gate] = normed if gate is None else gated(gate, 2 * hidden, normed)
        steps = {key: _steps(expected, one) for key, one in found.items()}
        best = min(steps, key=steps.__getitem__)
        return best if steps[best] <= MOST_STEPS and _steps(hidden + residual, total) <= MOST_STEPS else None

    size = len(norm.weight)
    plain = tuple((name, x) for name, x in vars(norm).items() if isinstance(x, bool | int | float | str))
    return _once(_decided, (type(norm), type(norm).forward, plain, epsilon, size, *_place(norm.weight)), decide)


def _activation_agrees(name: str, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the kernel of an activation agrees with torch."""

    def decide() -> bool:
        numbers = 8 * _numbers(torch.empty(0, dtype=dtype, device=device), 2, TOKENS, 100)
        gate, up = numbers
        expected = torch.empty_like(gate)
        _activate(name, gate, expected)
        return _steps(expected * up, gated(name, gate, up)) <= MOST_STEPS

    return bool(_once(_decided, (name, dtype, device), decide))


def _delta_rule_agrees(*args: Any) -> bool:
    """Return whether the kernel of the delta rule agrees with `delta_step` in float64, for one row of such tensors."""
    *tensors, epsilon = args

    def decide() -> bool:
        inputs: Any = (*(_numbers(x, 1, *x.shape[1:]) for x in tensors), epsilon)
        (out, last), found = delta_step(inputs[0].double(), *inputs[1:]), delta_rule(*inputs)
        return max(_steps(out, found[0]), _steps(last.float(), found[1])) <= MOST_STEPS

    key = "delta rule", epsilon, *((x.shape[1:], *_place(x)) for x in tensors)
    return not torch.is_grad_enabled() and bool(_once(_decided, key, decide))


def _rotary_form(
    rotation: Any, size: int, dtype: torch.dtype, cos: torch.Tensor, sin: torch.Tensor
) -> RotaryForm | None:
    """Return the one form whose kernel agrees with a function on vectors of `size`; `None` if none or several do.

    The factors are those of the step, as only the model knows how they are ordered. At position 0 nothing is rotated,
    and all forms agree; the next step decides then.
    """

    def decide() -> Any:
        like = torch.empty(0, dtype=dtype, device=cos.device)
        query, key = _numbers(like, 2, cos.shape[0], 1, cos.shape[1], size)
        expected = rotation(query, key, cos, sin)
        agreeing = []
        for form in ROTARY_FORMS:
            if not 0 < cos.shape[-1] * form.numbers <= size:
                continue
            found = torch.empty_like(query), torch.empty_like(key)
            rotate(query, key, cos, sin, form, *found)
            if all(_steps(*pair) <= MOST_STEPS for pair in zip(expected, found, strict=True)):
                agreeing.append(form)
        return None if not agreeing else agreeing[0] if len(agreeing) == 1 else _UNDECIDED

    key = "rotation", size, cos.shape[-1], dtype, cos.dtype, cos.device
    return _once(_of_rotations.setdefault(rotation, {}), key, decide)


def _place(x: torch.Tensor) -> tuple[torch.dtype, torch.device]:
    return x.dtype, x.device


def _numbers(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """Return different numbers between -1 and 1, without a random generator, in dtype and device of `like`."""
    count = torch.Size(shape).numel()
    numbers = torch.arange(1, count + 1, dtype=torch.float32, device=like.device)
    return (numbers * numbers).sin().view(shape).to(like.dtype)


def _steps(expected: torch.Tensor, found: torch.Tensor) -> float:
    """Return the largest difference of two results in rounding steps of the largest number; infinity if not alike."""
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return torch.inf
    step = torch.finfo(expected.dtype).eps * expected.abs().max().float().clamp_min(1e-30)
    steps = ((expected.float() - found.float()).abs().max() / step).item()
    return steps if steps >= 0 else torch.inf  # nan
