"""Recurrences and short convolutions of hybrid targets, over the nodes of a draft tree.

The mixers of transformers call few functions of their module. While a call decodes, [`recurrences_replaced`] replaces
these names of the modules of a target by wrappers. A wrapper calls the function of transformers unless a layer of the
cache has just got inputs of staged nodes. It then computes the outputs of all nodes from the committed state, and
leaves with the layer what a commit needs: [`RECURRENCES`] names the function for each function of transformers. Where
fla, mamba-ssm or causal-conv1d are installed, these functions call their kernels, so prompts run them.

A delta rule or Mamba-2 state after node i of a tree is a sum over the path to i. With the decays `g` added up along the
path, `G_i`, the state is `exp(G_i) S + sum_j exp(G_i - G_j) left_j right_j^T` for the ancestors j of i and i itself. S
is the committed state. Mamba-2 has `left_j = dt_j x_j` and `right_j = B_j` (https://huggingface.co/papers/2405.21060).
The gated delta rule (https://huggingface.co/papers/2412.06464) has `left_j = k_j`, and the `right_j` solve a triangular
system. KDA (https://huggingface.co/papers/2510.26692) has a decay for each channel of k. No state is computed before
the commit, and chunks are not padded. Mamba-1 (https://huggingface.co/papers/2312.00752) decays each entry of the state
by itself: its states are computed for each node.

Symbols: B rows, N nodes, H heads, K size of the window of a convolution.
"""

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, rms_norm, softplus
from torch.overrides import handle_torch_function, has_torch_function_unary

from ...attention_backends.lengths import SeqLens
from ..draft_tree import DraftTree

# Added to squared norms by all functions of transformers that normalise queries and keys.
NORM_EPSILON = 1e-6
# Bounds of Mamba-2's step sizes, which are positive, that change nothing.
NO_LIMIT = (0.0, float("inf"))

_expected = threading.local()


class StagedNodes:
    """Nodes that a forward runs after the committed states.

    Args:
        tree ([`DraftTree`]): Their tree.
        lengths ([`SeqLens`], *optional*): Committed tokens of each row. `None` if all nodes are of generated tokens.
        plain ([`PlainForwards`], *optional*):
            The forwards of plain `generate`. By default, it runs each token in a forward of its own.
    """

    def __init__(self, tree: DraftTree, lengths: SeqLens | None = None, plain: Any = None):
        self.tree, self.lengths, self.plain = tree, lengths, plain
        self._windows: dict[int, Tensor] = {}

    @cached_property
    def are_steps(self) -> Tensor:
        """Which nodes `(B, N)` plain `generate` runs in forwards of one token after a state."""
        if self.lengths is None:
            return torch.ones_like(self.tree.tokens, dtype=torch.bool)
        places = self.lengths.on(self.tree.tokens.device)[:, None] + self.tree.depths
        are_steps: Tensor = places > 0 if self.plain is None else self.plain.are_steps(places)
        return are_steps

    @cached_property
    def unseen(self) -> Tensor:
        """Which nodes are not in the state after each node, `(B, N + 1, N + 1)`.

        The last place, also as number -1, is that of the committed state.
        """
        unseen = pad(~self.tree.mask, (0, 1, 0, 1), value=True)
        unseen[:, :, -1] = False
        return unseen

    def windows(self, size: int) -> Tensor:
        """Return the windows of `size` inputs that end with each node, `(B or 1, N + 1, size)`.

        The numbers are places in the `size` committed inputs followed by the nodes. The last window is the committed
        one.
        """
        if size not in self._windows:
            tree = self.tree
            ends = torch.arange(tree.num_nodes + 1, device=tree.tokens.device).add(1).remainder(tree.num_nodes + 1)
            if tree.is_chain:
                window = (ends[:, None] + torch.arange(size, device=ends.device))[None]
            else:
                committed = torch.arange(-1, size - 1, device=ends.device).clamp_min(0).expand(len(tree.parents), -1)
                parents = torch.where(tree.parents < 0, size - 1, tree.parents + size)
                before = torch.cat([committed, parents], 1)  # the place before each place
                places = [(ends + size - 1).expand(len(tree.parents), -1)]
                while len(places) < size:
                    places.append(before.gather(1, places[-1]))
                window = torch.stack(places[::-1], -1)
            self._windows[size] = window
        return self._windows[size]


class Kept:
    """The last node that a commit keeps of each row; -1 for none.

    Args:
        path (`torch.LongTensor` of shape `(B, M)`, *optional*): Accepted nodes; a chain from node 0 by default.
        counts (`torch.LongTensor` of shape `(B,)`): How many of them are kept.
        keeps_all (`bool`, *optional*, defaults to `False`): Whether each row is known to keep some.
        rows (`torch.LongTensor` of shape `(B,)`, *optional*): Numbers of the rows.
    """

    def __init__(self, path: Tensor | None, counts: Tensor, keeps_all: bool = False, rows: Tensor | None = None):
        self.last = counts - 1 if path is None else pad(path, (1, 0), value=-1).gather(1, counts[:, None]).squeeze(1)
        self.rows = torch.arange(len(counts), device=counts.device) if rows is None else rows
        self.keeps_all = keeps_all

    def to(self, device: torch.device) -> "Kept":
        """Return the same on another device."""
        if device == self.last.device:
            return self
        moved = copy(self)
        moved.last, moved.rows = self.last.to(device), self.rows.to(device)
        return moved

    def choose(self, new: Tensor, old: Tensor | None, out: Tensor | None) -> Tensor:
        """Return the new state `(B, ...)` of rows that keep nodes, and the old one of the others, zeros by default."""
        if self.keeps_all:
            return new
        old = torch.zeros_like(new) if old is None else old
        return torch.where((self.last >= 0).view(-1, *[1] * (new.ndim - 1)), new, old.to(new.dtype), out=out)


class Terms:
    """What a state after some of the staged nodes is computed from. Layers can be joined, as one with all heads."""

    @property
    def tensors(self) -> list[Any]:
        """The fields, in their order."""
        return list(vars(self).values())

    @property
    def newest(self) -> Tensor:
        """The state after the only node."""
        only = self.tensors[0]
        return self.after(Kept(None, torch.ones(len(only), dtype=torch.long, device=only.device), True), None)

    @classmethod
    def joined(cls, terms: "Sequence[Any]") -> Any:
        """Return the terms of several layers of equal shapes as those of one layer."""
        raise NotImplementedError

    def after(self, kept: Kept, before: Tensor | None, out: Tensor | None = None) -> Tensor:
        """Return the state after the accepted nodes, in `out` if it is given."""
        raise NotImplementedError


@dataclass
class Stepped(Terms):
    """State `(B, ...)` after the root, which is the only node."""

    state: Tensor

    @property
    def newest(self) -> Tensor:
        return self.state

    @classmethod
    def joined(cls, terms: "Sequence[Stepped]") -> "Stepped":
        return cls(torch.cat([one.state for one in terms], 1))

    def after(self, kept: Kept, before: Tensor | None, out: Tensor | None = None) -> Tensor:
        return kept.choose(self.state, before, out)


@dataclass
class Window(Terms):
    """Inputs `(B, C, K + N)` of a convolution: the committed window, and the nodes. See [`StagedNodes.windows`]."""

    inputs: Tensor
    windows: Tensor

    @property
    def newest(self) -> Tensor:
        return self.inputs[..., 1:]

    @classmethod
    def joined(cls, terms: "Sequence[Window]") -> "Window":
        return cls(torch.cat([one.inputs for one in terms], 1), terms[0].windows)

    def after(self, kept: Kept, before: Tensor | None, out: Tensor | None = None) -> Tensor:
        window = self.windows[kept.rows if len(self.windows) > 1 else 0, kept.last]
        return torch.gather(self.inputs, 2, window[:, None].expand(-1, self.inputs.shape[1], -1), out=out)


@dataclass
class ClosedForm(Terms):
    """Terms of a state `(B, H, a, b)`: `left` `(B, H, N, a)`, `right` `(B, H, N, b)`, decays `(B, H, N + 1, a or 1)`.

    The state before the nodes is a term, too. See [`StagedNodes.unseen`].
    """

    left: Tensor
    right: Tensor
    decays: Tensor
    unseen: Tensor
    before: Tensor | None

    @classmethod
    def joined(cls, terms: "Sequence[ClosedForm]") -> "ClosedForm":
        fields = zip(*((one.left, one.right, one.decays, one.before) for one in terms), strict=True)
        left, right, decays, before = (torch.cat(parts, 1) for parts in fields)
        return cls(left, right, decays, terms[0].unseen, before)

    def after(self, kept: Kept, before: Tensor | None, out: Tensor | None = None) -> Tensor:
        total = self.decays[kept.rows, :, kept.last][..., None, :]
        unseen = self.unseen[kept.rows, kept.last][:, None, :, None]
        weights = (total - self.decays).masked_fill(unseen, -torch.inf).exp()
        state = (self.left * weights[:, :, :-1]).mT @ self.right
        if self.before is None:
            return state
        return torch.addcmul(state, self.before.float(), weights[:, :, -1:].mT, out=out)


@dataclass
class PerNode(Terms):
    """States `(B, N, ...)` after each node."""

    states: Tensor

    @property
    def newest(self) -> Tensor:
        return self.states[:, 0]

    @classmethod
    def joined(cls, terms: "Sequence[PerNode]") -> "PerNode":
        return cls(torch.cat([one.states for one in terms], 2))

    def after(self, kept: Kept, before: Tensor | None, out: Tensor | None = None) -> Tensor:
        return kept.choose(self.states[kept.rows, kept.last], before, out)


def expect_tokens_of(layer: Any) -> None:
    """Let the next convolution of this thread, and the recurrence after it, be those of a layer.

    Its tokens are staged nodes, or right-padded rows of prompts.
    """
    _expected.convolution, _expected.recurrence = layer, None


def _convolution(
    layer: Any, original: Callable, hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any
) -> Tensor:
    """Return outputs `(B, C, N)` of a causal convolution of inputs `(B, C, K + N)`, see [`Window`]."""
    rows, channels, places = hidden_states.shape
    nodes = layer.nodes
    count = nodes.tree.num_nodes
    if nodes.tree.is_chain:
        return original(hidden_states, weight, bias, **options)[..., -count:]
    size = places - count
    index = nodes.windows(size)[:, :-1].to(hidden_states.device).reshape(rows, 1, count * size).expand(-1, channels, -1)
    windows = hidden_states.gather(2, index).view(rows, channels, count, size).transpose(1, 2)
    last = original(windows.reshape(rows * count, channels, size), weight, bias, **options)[..., -1]
    return last.view(rows, count, channels).transpose(1, 2)


def _delta_rule(
    layer: Any,
    _: Callable,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Return outputs `(B, N, H, Dv)` of the gated delta rule, with decays `(B, N, H)`, or `(B, N, H, Dk)` in KDA."""
    dtype, heads = query.dtype, value.shape[2]
    if value.shape[1] == 1 and layer.state is not None:
        epsilon = NORM_EPSILON if use_qk_l2norm_in_kernel else None
        out, last = delta_step(layer.state.float(), query, key, value, g, beta, epsilon)
        layer.keep(Stepped(last))
        return out, last
    query, key = (x.repeat_interleave(heads // x.shape[2], 2) if x.shape[2] < heads else x for x in (query, key))
    query, key, value, beta, g = (x.transpose(1, 2).float() for x in (query, key, value, beta, g))
    if use_qk_l2norm_in_kernel:
        query, key = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPSILON) for x in (query, key))
    query, beta = query * query.shape[-1] ** -0.5, beta[..., None]
    state = layer.state
    unseen, decays = _decays(layer, g if g.ndim == 4 else g[..., None])
    gaps, fading = _gaps(unseen, decays)
    system = _products(beta * key, key, gaps)
    right = beta * value
    if state is not None:
        right = right - beta * ((key * fading) @ state.float())
    right = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    out = _products(query, key, gaps) @ right
    if state is not None:
        out = out + (query * fading) @ state.float()
    layer.keep(ClosedForm(key, right, decays, unseen, state))
    return out.transpose(1, 2).to(dtype), _last(state, key, value)


def delta_step(
    state: Tensor, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, epsilon: float | None
) -> tuple[Tensor, Tensor]:
    """Return the output `(B, 1, H, Dv)` and the state after one node, in few operations in the dtype of `state`.

    A mode of torch functions may replace it.
    """
    if has_torch_function_unary(query):
        return handle_torch_function(delta_step, (query,), state, query, key, value, g, beta, epsilon)
    (rows, heads, size, width), scale, dtype = state.shape, 1.0, query.dtype
    pair = torch.stack([query, key]).to(state.dtype)
    if epsilon is not None:  # this norm divides by the root of the mean, not of the sum
        pair, scale = rms_norm(pair, (size,), eps=epsilon / size), size**-0.5
    if pair.shape[3] < heads:
        pair = pair.repeat_interleave(heads // pair.shape[3], 3)
    query, key = pair.view(2, rows * heads, 1, size)
    value, g, beta = (x.to(state.dtype) for x in (value, g, beta))
    state = (state * g.exp().view(rows, heads, -1, 1)).flatten(0, 1)
    right = torch.baddbmm(value.reshape(-1, 1, width), key, state, alpha=-scale)
    right = right * beta.view(-1, 1, 1)
    state = torch.addcmul(state, key.mT, right, value=scale)
    out = torch.baddbmm(right, query, state, beta=0, alpha=scale * size**-0.5)
    return out.view(rows, 1, heads, width).to(dtype), state.view(rows, heads, size, width)


def _mamba2(
    layer: Any,
    _: Callable,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int | None = None,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: Sequence[float] = NO_LIMIT,
    return_final_states: bool = False,
    **options: Any,
) -> Any:
    """Return outputs `(B, N, H, P)` of the Mamba-2 recurrence.

    The function of transformers for one token after a state does not apply `dt_limit`.
    """
    dt = _step_sizes(dt, None if dt_bias is None else dt_bias.to(dt.dtype), dt_softplus)
    if tuple(dt_limit) != NO_LIMIT:
        dt = torch.where(layer.nodes.are_steps[..., None].to(dt.device), dt, dt.clamp(*dt_limit))
    heads = hidden_states.shape[2]
    x, step = hidden_states.transpose(1, 2).float(), dt.transpose(1, 2).float()[..., None]
    B, C = (y.float().repeat_interleave(heads // y.shape[2], 2).transpose(1, 2) for y in (B, C))
    unseen, decays = _decays(layer, step * A.float()[:, None, None])
    gaps, fading = _gaps(unseen, decays)
    left, state = x * step, layer.state
    out = _products(C, B, gaps) @ left
    if state is not None:
        out = out + (C * fading) @ state.float().mT
    if D is not None:
        out = out + x * D.float()[:, None, None]
    layer.keep(ClosedForm(left, B, decays, unseen, state))
    out = out.transpose(1, 2).to(hidden_states.dtype).contiguous()
    return (out, _last(state, x, B)) if return_final_states else out


def _mamba1(
    layer: Any,
    _: Callable,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **options: Any,
) -> Any:
    """Return outputs `(B, D, N)` of the Mamba-1 recurrence, node after node.

    The function of transformers gets no state of earlier tokens, so it is not what `generate` computes after a prompt.
    """
    tree, state = layer.nodes.tree, layer.state
    step = _step_sizes(dt, None if delta_bias is None else delta_bias.to(dt.dtype)[:, None], delta_softplus).float()
    keeps = torch.exp(step[..., None] * A.float()[:, None])  # [B, D, N, n]
    adds = step[..., None] * B.float().transpose(1, 2)[:, None] * hidden_states.float()[..., None]
    state = torch.zeros_like(adds[:, :, 0]) if state is None else state.float()
    states, rows = [state], torch.arange(len(state), device=state.device)
    # padding may name any node as its parent
    nodes = torch.arange(tree.num_nodes, device=state.device)
    parents = None if tree.is_chain else torch.minimum(tree.parents.to(state.device), nodes - 1)
    for node in range(tree.num_nodes):
        before = states[-1] if parents is None else torch.stack(states, 1)[rows, parents[:, node] + 1]
        states.append(before * keeps[:, :, node] + adds[:, :, node])
    after = torch.stack(states[1:], 1)
    out = torch.einsum("bidn,bni->bdi", after.to(C.dtype), C)
    if D is not None:
        out = out + hidden_states * D[:, None]
    if z is not None:
        out = out * nn.functional.silu(z)
    layer.keep(PerNode(after))
    out = out.to(hidden_states.dtype)
    return (out, state) if return_last_state else out


def _step_sizes(dt: Tensor, bias: Tensor | None, is_soft: bool) -> Tensor:
    dt = dt if bias is None else dt + bias
    return softplus(dt) if is_soft else dt


def _decays(layer: Any, steps: Tensor) -> tuple[Tensor, Tensor]:
    """Return [`StagedNodes.unseen`], and decays `(B, H, N + 1, a or 1)` added up along the path to each node."""
    nodes = layer.nodes
    decays = steps.cumsum(2) if nodes.tree.is_chain else nodes.tree.mask.to(steps)[:, None] @ steps
    return nodes.unseen.to(steps.device), pad(decays, (0, 0, 0, 1))


def _gaps(unseen: Tensor, decays: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors `(B, H, N, N, a or 1)` by which states fade from node j to node i; 0 if j is not before i.

    Also those by which the committed state fades, `(B, H, N, a or 1)`.
    """
    gaps = decays[:, :, :-1, None] - decays[:, :, None]
    gaps = gaps.masked_fill(unseen[:, None, :-1, :, None], -torch.inf).exp()
    return gaps[:, :, :, :-1], gaps[:, :, :, -1]


def _last(state: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """Return a state, which callers pass to the cache; it stays as it is until a commit."""
    return left.new_zeros(*left.shape[:2], left.shape[-1], right.shape[-1]) if state is None else state


def _products(left: Tensor, right: Tensor, gaps: Tensor) -> Tensor:
    """Return products `(B, H, N, N)` of two vectors `(B, H, N, a)` of each pair of nodes under the factors between."""
    if gaps.shape[-1] == 1:
        return (left @ right.mT) * gaps[..., 0]
    return torch.einsum("bhia,bhja,bhija->bhij", left, right, gaps)


# Functions of transformers' modules, and what runs in their place while nodes are staged.
RECURRENCES: dict[str, Callable] = {
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _mamba2,
    "mamba_selective_scan": _mamba1,
}
CONVOLUTION = "causal_conv1d_fn"
# Names or places of their arguments, and values with which a token leaves a state as it is.
_UNCHANGED: dict[Callable, dict[Any, float]] = {
    _delta_rule: {"g": 0.0, "beta": 0.0},
    _mamba2: {1: -torch.inf},
    _mamba1: {1: -torch.inf},
}

_guard = threading.Lock()
# Calls in which the functions of a module are replaced, and the functions of transformers.
_replaced: dict[str, tuple[int, dict[str, Callable]]] = {}


@contextmanager
def recurrences_replaced(model: nn.Module) -> Iterator[None]:
    """Replace the functions of the modules of a target while the context is open, in any number of threads."""
    names = sorted({kind.__module__ for kind in map(type, model.modules()) if _functions(kind.__module__)})
    with _guard:
        for name in names:
            calls, originals = _replaced.get(name) or (0, _functions(name))
            _replaced[name] = calls + 1, originals
            if not calls:
                vars(sys.modules[name]).update({key: _wrapped(key, value) for key, value in originals.items()})
    try:
        yield
    finally:
        with _guard:
            for name in names:
                calls, originals = _replaced.pop(name)
                if calls > 1:
                    _replaced[name] = calls - 1, originals
                else:
                    vars(sys.modules[name]).update(originals)


def why_not_replaceable(model: nn.Module, config: Any) -> list[str]:
    """Return why the states of a model cannot be verified and rolled back; empty if they can."""
    reasons = []
    if not any(CONVOLUTION in _functions(type(module).__module__) for module in model.modules()):
        reasons.append("its recurrent layers do not call the functions of transformers that keep states in a cache")
    if (states := getattr(config, "number_of_conv_states", 1)) > 1:
        reasons.append(f"its layers keep {states} convolution states each, and the loop keeps one")
    if getattr(model, "_use_kernels", False):
        reasons.append("use_kernels=True replaces the recurrence of its layers; load it without use_kernels")
    return reasons


def limits_steps(model: nn.Module) -> bool:
    """Return whether Mamba-2 layers of a model limit their step sizes, as they do in forwards of several tokens."""
    return any(tuple(getattr(module, "time_step_limit", NO_LIMIT)) != NO_LIMIT for module in model.modules())


def ignores_earlier_states(model: nn.Module) -> bool:
    """Return whether transformers' forward of several tokens after a prefix ignores its state, as Mamba-1 does."""
    return any("mamba_selective_scan" in _functions(type(module).__module__) for module in model.modules())


def mixers(model: nn.Module) -> list[nn.Module]:
    """Return the modules that call the functions which are replaced."""
    return [part for part in model.modules() if any(isinstance(child, nn.Conv1d) for child in part.children())]


def has_input_bias(model: nn.Module) -> bool:
    """Return whether the inputs of a convolution have a bias, which gives padding before a prompt a value."""
    inputs = (child for part in mixers(model) for name, child in part.named_children() if "in_proj" in name)
    return any(getattr(layer, "bias", None) is not None for layer in inputs)


def _functions(module: str) -> dict[str, Callable]:
    known = vars(sys.modules[module])
    return {name: known[name] for name in (*RECURRENCES, CONVOLUTION) if name in known}


def _wrapped(name: str, original: Callable) -> Callable:
    ours = RECURRENCES.get(name, _convolution)
    kind = "recurrence" if name in RECURRENCES else "convolution"

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        layer = None
        if not torch.compiler.is_compiling():
            layer = vars(_expected).pop(kind, None)
        if kind == "convolution":
            _expected.recurrence = layer
        if layer is not None and layer.nodes is not None:
            return ours(layer, original, *args, **kwargs)
        inputs = list(args)
        if layer is not None and kind == "recurrence":
            _neutralise(ours, layer.part.is_text, inputs, kwargs)
        return original(*inputs, **kwargs)

    return wrapper


def _neutralise(ours: Callable, is_text: Tensor, args: list[Any], kwargs: dict[str, Any]) -> None:
    """Replace inputs of a recurrence so that a state passes padding, where `is_text` `(B, N)` is false, unchanged."""
    for key, value in _UNCHANGED[ours].items():
        values: Any = kwargs if key in kwargs else args
        tokens = is_text.to(values[key].device)
        tokens = tokens[:, None] if ours is _mamba1 else tokens.view(*tokens.shape, *[1] * (values[key].ndim - 2))
        values[key] = values[key].masked_fill(~tokens, value)
