"""Checks of the forwards of a target: tree verification against plain forwards over the same tokens.

[`check_target`] verifies a tree with two branches: the last tokens of the prompt, and before them the same tokens in
reverse. The logits of the former must equal those of plain forwards of one token each under the model's own attention.
They do not if the tree is verified without `position_ids`, the tree mask, a softcap, sinks, or a window that is shorter
than the prefix, or if the model treats forwards of one token otherwise.

Recurrent layers are compared one by one, too, since rounding hides less there: a verification replaces functions that
may be kernels of other packages, and reads the states that these have left.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from transformers.utils import logging

from ..cache import CACHE_NAME, SpeculativeCache
from ..call import HOOKS, Call
from ..draft_tree import DraftTree
from ..special_case import FIRST_CHECKS, SpecialCase
from ..target import TargetView
from ..target_modules import attention_functions, plain_logits, weakly
from .hooks import bare, hooks_of, is_declared
from .trial import TRIAL_TOLERANCE, largest_gap, named, rotary_state_kept, spread_of

logger = logging.get_logger(__name__)

# Number of tokens that are compared. The tree has one node less than twice this number.
NUM_TOKENS = 4

# Difference of two logits that needs no explanation, relative to their standard deviation. Measured on the tiny targets
# of the tests: at most 4e-6 in float32; at least 0.6 without the window, the softcap, the sinks, the positions or the
# mask. In half precision, rounding changes logits (0.07 in bfloat16) and the choice of experts in near-ties (0.8).
TOLERANCE, HALF_TOLERANCE = 2e-4, 0.5
# A larger difference in float32 is rounding if it is at most so many times that by noise of so many units in the last
# place of the embeddings. On the tiny targets, rounding is 0.5 to 1.6 times that.
MOST_TIMES, UNITS = 8, 4
# Largest gap of outputs and states of a recurrent layer, relative to their norm. Measured on tiny targets, in the layer
# of each where it is smallest: at most 1e-6 in float32 and 0.006 in bfloat16; after states in a wrong layout or without
# an update, at least 0.29 of outputs and 1 of states.
LAYER_TOLERANCE = 1e-3
HALF_LAYER_TOLERANCE = 0.1


def check_target(
    target: TargetView,
    cache: SpeculativeCache,
    texts: Sequence[torch.Tensor],
    limit: int,
    logits: torch.Tensor | None = None,
) -> None:
    """Compare verification and plain forwards after the longest row of `cache`, once for a structure of a model.

    Dtype of the weights and attention implementation belong to it. The check runs the last few tokens of one of the
    `texts`, at positions below `limit`, and writes only to free slots of the cache. Call it outside of
    [`TargetView.attention`].

    With `logits` `(batch, vocab)` of the last token of every text, from one forward over the text with images and the
    like, it also verifies the end of a text that is not in the cache, which must run without these inputs.

    Raises:
        ValueError: If the logits disagree in float32. In other precisions a warning is logged. In any precision, if
            outputs or states of all recurrent layers disagree.
    """
    row = max(range(cache.batch_size), key=cache.lengths.host.__getitem__)
    start = cache.lengths.host[row]
    # A draft that only verifies roots pays for few more.
    slots = min(max(cache.tree_slots, 3), cache.max_length + cache.tree_slots - start)
    count = max(1, min(NUM_TOKENS, len(texts[row]), limit - start, (slots + 1) // 2))
    dtype = target.model.dtype, torch.is_autocast_enabled(texts[row].device.type)
    kind = *dtype, *attention_functions(target.config), logits is not None, count > 1
    if kind in target.known.checked:
        return
    chain = texts[row][-count:].expand(cache.batch_size, -1)
    tree, nodes = _two_branches(chain)
    positions = torch.arange(start, start + count, device=chain.device).expand_as(chain)

    # single tokens, as plain `generate` runs them, unless rotary frequencies may change between these positions
    single = 1 if target.rotary_limit == math.inf else count

    def run_plainly(size: int = single) -> tuple[torch.Tensor, SpeculativeCache]:
        view, parts = _after(cache, start, target, room=tree.num_nodes), []
        for ids, places in zip(chain.split(size, 1), positions.split(size, 1), strict=True):
            inputs = {"input_ids": ids, "position_ids": view.position_ids(places), CACHE_NAME: view}
            parts.append(target.model(**inputs, use_cache=True).logits)
        return torch.cat(parts, 1)[row].float(), view

    def rounding() -> float:
        with _noise_in_embeddings(target.model):
            return largest_gap(run_plainly()[0], plain)

    layers = target.mode.replaced_layers(target)
    with _outputs_of(layers) as own:
        plain, view = run_plainly()
    left, view = _left(view, row, own, slice(None)), _after(cache, start, target, room=tree.num_nodes)
    try:
        with _outputs_of(layers) as replaced, target.attention():
            verified = target.verify(tree, view).logits[:, nodes]
    except RuntimeError as error:
        if not layers or isinstance(error, torch.OutOfMemoryError):
            raise
        raise _refusal(target, f"its recurrent layers fail after their own functions: {error}") from error
    # the other rows read slots that may hold anything
    if layers:
        view.commit(torch.tensor(nodes, device=chain.device).expand_as(chain), [count] * cache.batch_size)
        _compare_layers(target, left, _left(view, row, replaced, nodes))
    # also as it runs prompts
    ways = [plain] if single == count or target.mode.tells_single_tokens else [plain, run_plainly(count)[0]]
    _compare(target, verified[row].float(), torch.stack(ways).to(verified.device), rounding)
    if logits is not None:
        end = texts[row][start:].expand(cache.batch_size, -1)
        view = _after(cache, start, target, room=end.shape[1])
        with target.attention():
            verified = target.verify(DraftTree.chain(end), view).logits[:, -1]
        _compare(target, verified[row].float(), logits[row].to(verified.device).float(), rounding)
    target.known.checked.add(kind)


@contextmanager
def _noise_in_embeddings(model: torch.nn.Module) -> Iterator[None]:
    """Add noise of some units in the last place to the embeddings of tokens, the same in every context."""
    generator = torch.Generator().manual_seed(0)

    def add(_module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
        signs = torch.rand(output.shape, generator=generator).to(output) - 0.5
        return output * (1 + 2 * UNITS * torch.finfo(output.dtype).eps * signs)

    handle = model.get_input_embeddings().register_forward_hook(add)  # type: ignore[operator]
    try:
        yield
    finally:
        handle.remove()


def _two_branches(chain: torch.Tensor) -> tuple[DraftTree, list[int]]:
    """Return a tree of `chain` `(B, n)` and a wrong branch, whose nodes come first, and the indices of the chain."""
    drafted = chain.shape[1] - 1
    tokens = torch.cat([chain[:, :1], chain[:, 1:].flip(1), chain[:, 1:]], dim=1)
    branch = list(range(1, drafted))
    parents = [-1, *[0, *branch][:drafted], *[0, *(node + drafted for node in branch)][:drafted]]
    return _tree(tokens, parents, drafted), [0, *range(drafted + 1, 2 * drafted + 1)]


def _tree(tokens: torch.Tensor, parents: list[int], max_depth: int) -> DraftTree:
    rows = torch.tensor(parents, device=tokens.device).expand_as(tokens)
    return DraftTree(tokens, rows, torch.ones_like(tokens, dtype=torch.bool), max_depth=max_depth)


def _after(cache: SpeculativeCache, start: int, target: TargetView, room: int) -> SpeculativeCache:
    """Return a cache over the same buffers in which all rows hold `start` tokens, as many as the longest."""
    rows = cache.batch_size
    view = SpeculativeCache(target.config, rows, start + room, tree_slots=room)
    for view_part, part in zip(view.parts, cache.parts, strict=True):
        view_part.copy_from(part)
    for view_layer, layer in zip(view.key_layers, cache.key_layers, strict=True):
        if layer.is_initialized:
            view_layer.keys, view_layer.values = layer.keys, layer.values
            view_layer.device, view_layer.is_initialized = layer.keys.device, True
    view.set_lengths([start] * rows)
    view.rows.offsets = cache.rows.offsets
    return view


@contextmanager
def _outputs_of(layers: Sequence[torch.nn.Module]) -> Iterator[list[list[torch.Tensor]]]:
    """Yield a list for each layer, to which it appends the outputs `(B, N, hidden)` of its forwards."""
    outputs: list[list[torch.Tensor]] = [[] for _ in layers]
    kept = zip(layers, outputs, strict=True)
    hooks = [layer.register_forward_hook(lambda *call, into=into: into.append(call[-1])) for layer, into in kept]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


def _left(cache: SpeculativeCache, row: int, outputs: list[list[torch.Tensor]], places: Any) -> dict[str, Any]:
    """Return what recurrent layers leave of a row, lists by names: their outputs at some places, and their states."""
    layers = [layer.copied(row) for layer in cache.layers if hasattr(layer, "copied")]
    states = {name: [layer[name] for layer in layers if layer[name] is not None] for name in (layers or [{}])[0]}
    return states | {"output": [torch.cat(parts, 1)[row, places] for parts in outputs if parts]}


def _compare_layers(target: TargetView, plain: dict[str, Any], verified: dict[str, Any]) -> None:
    """Compare what the recurrent layers leave after their own functions and after ours.

    A choice of experts that rounding changes has an effect on later layers alone, so the smallest gap decides.
    """
    device = plain["output"][0].device
    tolerance = LAYER_TOLERANCE if _is_exact(target, device) else HALF_LAYER_TOLERANCE
    for name, tensors in plain.items():
        pairs = [(one.float(), other.to(one.device)) for one, other in zip(tensors, verified[name], strict=True)]
        gaps = [float((a - b).norm() / a.norm()) if a.shape == b.shape else math.inf for a, b in pairs]
        if (gap := min(gaps, default=0)) > tolerance:
            which = f"the {name} of its recurrent layers differs from that of their own functions"
            raise _refusal(target, f"{which} by {gap:.3g} of its norm or more; the tolerance is {tolerance:.3g}")


OF_KERNELS = "These are kernels of fla, mamba-ssm and causal-conv1d where those are installed: try other versions"


def _refusal(target: TargetView, reason: str, remedy: str = OF_KERNELS) -> ValueError:
    return ValueError(
        f"{type(target.model).__name__} cannot be verified: {reason}. {remedy}, or call generate() without "
        "assistant_model. draft.generation_config.check_target = False skips this check, and the text may then be "
        "wrong."
    )


def _is_exact(target: TargetView, device: torch.device) -> bool:
    """Return whether a target computes in float32: no half precision, no quantised weights or activations, no TF32."""
    if torch.is_autocast_enabled(device.type) or torch.get_float32_matmul_precision() != "highest":
        return False
    is_full = all(weight.dtype in (torch.float32, torch.float64) for weight in target.model.parameters())
    return is_full and not is_quantized(target.model)


def _compare(
    target: TargetView, verified: torch.Tensor, plain: torch.Tensor, rounding: Callable[[], float] = lambda: 0.0
) -> None:
    """Compare logits `(n, vocab)` with those of each plain way. `rounding` may explain a difference."""
    if (gap := largest_gap(verified, plain)) == 0:
        return
    spread, is_exact = spread_of(plain), _is_exact(target, plain.device)
    tolerance = (TOLERANCE if is_exact else HALF_TOLERANCE) * spread
    if gap > tolerance and is_exact:
        tolerance = max(tolerance, MOST_TIMES * rounding())
    if gap <= tolerance:
        return
    difference = (
        f"the logits of a verified tree and of plain forwards of the same tokens differ by up to {gap:.3g}; the "
        f"tolerance is {tolerance:.3g} ({tolerance / spread if spread else math.nan:.3g} of their standard deviation)"
    )
    if is_exact:
        cause = "It may ignore position_ids, the tree mask or its own window, or treat forwards of one token otherwise"
        raise _refusal(target, difference, f"{cause}: report the model")
    logger.warning(
        "%s: %s. In this precision, rounding or another choice of experts can be the cause. Compare in float32, or "
        "check the text with hf_longspec.audit.",
        type(target.model).__name__,
        difference,
    )


def is_quantized(model: torch.nn.Module) -> bool:
    """Return whether some weights of a model are in fewer bits, as its tensors show.

    Flags of loading do not: transformers leaves them on a model whose weights it has unpacked.
    """
    if any(hasattr(module, "_packed_params") for module in model.modules()):  # torch's dynamic int8
        return True
    return any(map(_is_packed, chain(model.parameters(), model.buffers())))


def _is_packed(tensor: Any) -> bool:
    """Return whether a tensor holds packed integers or small floats, or is of a class that makes floats of them."""
    tensor = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
    if hasattr(tensor, "__tensor_flatten__"):
        return True
    if tensor.dtype.is_floating_point:
        return bool(tensor.dtype.itemsize < 2)
    return tensor.dim() > 1 and tensor.dtype not in (torch.bool, torch.int64)  # masks and indices


# Most tokens of a prompt that a comparison of hooks runs. Hooks that distinguish forwards of more tokens are not found.
HOOKED_TOKENS = 256
# Most last tokens of a prompt that a verification mode runs as a chain.
MOST_SEED_TOKENS = 2
# A difference may be this many times as large as that of the model without its hooks.
MARGIN = 4


def why_not_hooked(call: Call, num_nodes: int) -> str | None:
    """Return why a user's hooks would have another effect with trees of `num_nodes` nodes; `None` if they would not.

    If all of them declare that they treat tokens alike, the end of the prompts runs as plain `generate` runs it, and as
    prefill, chain and tree, once for a structure of the model.
    """
    target = call.target
    if not (hooks := hooks_of(target.model)):
        return None
    if undeclared := list(dict.fromkeys(name for name, hook in hooks if not is_declared(hook))):
        return (
            f"forward hook or patched forward {', '.join(undeclared)}: a draft changes the number and the size of "
            "forwards, and only its owner knows whether it treats all tokens alike and keeps no state. Set its "
            "attribute stateless = True if so, or remove it."
        )
    hooked, key = target.known.hooked, (num_nodes, target.model.dtype, *(weakly(hook) for _, hook in hooks))
    if key not in hooked:
        names = ", ".join(dict.fromkeys(name for name, _ in hooks))
        hooked[key] = _why_not_alike(call, num_nodes, f"forward hook or patched forward {names}: declares stateless")
    return hooked[key]


def _why_not_alike(call: Call, num_nodes: int, what: str) -> str | None:
    target = call.target
    devices = {call.tokens.device} - {torch.device("cpu")}
    try:  # a comparison changes no later text
        with target.lock(), rotary_state_kept(target.model), torch.random.fork_rng(devices):
            gap, tolerance = _gap(call, num_nodes)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a hook may raise anything
        return f"{what}, and fails in a verification: {named(error)}. Make it take any number of tokens, or remove it."
    if not gap <= tolerance:
        return (
            f"{what}, and does not treat all tokens alike: logits of a tree differ by up to {gap:.3g} from those of "
            f"plain generate; the tolerance is {tolerance:.3g}. Make its result at a token depend on that token alone, "
            "or remove it."
        )
    return None


def _gap(call: Call, num_nodes: int) -> tuple[float, float]:
    """Return the largest difference of two logits with a user's hooks, and the largest one that rounding explains."""
    target = call.target
    plain, drafted = _both_ways(target, call, num_nodes)
    unhooked = copy.copy(target)
    unhooked.model = bare(target.model)
    alone = largest_gap(*_both_ways(unhooked, call, num_nodes))
    return largest_gap(drafted, plain), max(TRIAL_TOLERANCE * spread_of(plain), MARGIN * alone)


def _both_ways(target: TargetView, call: Call, num_nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits `(B, n, vocab)` of the last tokens of prompts and some more, by plain and by drafted forwards.

    The latter have one more dimension, for the number of last tokens that a verification begins with.
    """
    sizes = call.prompts.text_sizes
    longest = min(sizes) if call.inputs else max(sizes)  # without the places of images
    tokens = call.tokens[:, -min(HOOKED_TOKENS, longest) :]
    count, (rows, length) = min(NUM_TOKENS, num_nodes), tokens.shape
    chain = tokens[:, -1:].expand(-1, count)
    cache = SpeculativeCache(target.config, rows, length + count)
    last = target.keeping(torch.tensor([length - 1], device=tokens.device))
    run = target.mode.forward, target.model, cache
    plain = [plain_logits(*run, tokens, **last)[:, -1:], *(plain_logits(*run, token) for token in chain.split(1, 1))]

    drafted = []
    for seed in range(1, 1 + min(length, MOST_SEED_TOKENS)):
        head, end = tokens.split([length - seed, seed], dim=1)
        cache = SpeculativeCache(target.config, rows, length, tree_slots=max(num_nodes, seed))
        target.prefill(head, cache, None)
        cache.set_lengths([head.shape[1]] * rows)
        wrong = num_nodes - count  # nodes before the chain, all of them children of the root
        parents = [-1, *[0] * wrong, 0, *range(wrong + 1, num_nodes - 1)][:num_nodes]
        with target.attention():
            first = target.verify(DraftTree.chain(end), cache).logits[:, -1:]
            cache.commit(None, [end.shape[1]] * rows)
            tree = _tree(tokens[:, -1:].expand(-1, num_nodes), parents, count - 1)
            after = target.verify(tree, cache).logits[:, [0, *range(wrong + 1, num_nodes)]]
        drafted.append(torch.cat([first, after], 1))
    return torch.cat(plain, 1).float(), torch.stack(drafted).float()


class FirstChecks(SpecialCase):
    """The comparison of the first verification of a kind of target with a plain forward."""

    case = FIRST_CHECKS

    def check(self, session: Any) -> None:
        """Compare them after the prompts of a [`Session`], once."""
        prompts = session.prompts
        check_target(session.target, session.cache, prompts.texts, session.max_length, prompts.logits)


class Hooks(SpecialCase):
    """Targets with forward hooks or patched forwards, which may be a user's."""

    case = HOOKS

    def why_not(self, call: Call) -> Iterator[str]:
        if reason := why_not_hooked(call, call.draft.num_tree_nodes(call.target)):
            yield reason
