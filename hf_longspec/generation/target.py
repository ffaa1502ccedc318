"""An unmodified causal language model as a target: its properties, its prefill and its verification forward."""

import inspect
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from ..attention_backends.gapped import tree_context
from ..attention_backends.interface import name_beside
from ..attention_backends.lengths import on_device
from .cache import CACHE_NAME, SpeculativeCache
from .draft_tree import DraftTree
from .masked import CHUNKED_LAYER, HYBRID, MASKED, Way, choices_of, way_of, why_not_masked
from .recurrences import reached
from .recurrences import why_not as why_not_reached
from .recurrent_states import HYBRID_LAYERS, INDEXED_LAYERS, NO_CACHE, STATE_LAYERS, has_states
from .target_modules import LayerInputs, passed_on, shape_of
from .traits import LayerTraits, changes_of, ignores, known_traits, layer_traits

try:
    from .compiled_steps import FixedSteps
    from .parallel import Ranks
except ImportError:  # a published draft runs every step as it is, in one process
    FixedSteps = Ranks = None  # type: ignore[assignment,misc]

ATTENTION_NAME = "hf_longspec"
# One lock per model, held while its attention implementation is switched. Re-entrant, as a criterion may call generate.
_locks: WeakKeyDictionary[PreTrainedModel, Any] = WeakKeyDictionary()
_locks_guard = threading.Lock()
# Tokens per forward of prompts that run as chains.
PREFILL_CHAIN = 256
# Likewise with recurrent states, whose recurrences compare all pairs of tokens of a forward.
PREFILL_CHAIN_OF_STATES = 64
# Last tokens of a prompt that run as a verification there: one alone may be computed by other rules than several.
SEED_TOKENS_OF_STATES = 2
# Layer types with recurrent states that transformers' caches do not hold.
RECURRENT_LAYERS = {"mamba", "mamba2", "recurrent"}
# Layer types that attend to all keys or to those in a window, or do not attend.
PLAIN_LAYERS = {"full_attention", "sliding_attention", "attention", "moe", "mlp"}


class TargetView:
    """Run an unmodified target model for the decoding loop.

    Args:
        runner ([`CompiledRunner`] or [`CapturedRunner`], *optional*):
            Compiles or captures steps of fixed shapes. Not used under tensor parallelism.
    """

    def __init__(self, model: PreTrainedModel, runner: Any = None):
        _refuse_other_objects(model)
        self.model = model
        self.ranks = None if Ranks is None else Ranks.of(model)
        self.config = model.config.get_text_config(decoder=True)
        self.has_states = has_states(self.config)
        # collectives inside a graph are untested, and states and masks are made anew in each step
        is_fixed = self.ranks is None and not self.has_states and way_of(model, self.config) is HYBRID
        self.runner: Any = runner if is_fixed else None
        self._fixed = None if self.runner is None else FixedSteps(model, self.runner)
        parameters = inspect.signature(type(model).forward).parameters
        self._takes_logits_to_keep = "logits_to_keep" in parameters
        self._takes_positions = "position_ids" in parameters

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def sum_ranks(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Function that sums a tensor over the processes that hold the target; `None` if there is only one."""
        return None if self.ranks is None else self.ranks.sum

    @property
    def counts_padding(self) -> bool:
        """Whether in plain `generate` the text of a row depends on its left padding.

        `generate` creates position ids only for a forward that has this parameter. Without them padding shifts all
        positions, which changes nothing for rotary embeddings, as these depend on distances only.
        """
        rotates = any("rotary_emb" in name for name, _ in self.model.named_modules())
        return not (self._takes_positions or rotates) or self.traits.counts_padding

    @property
    def num_layers(self) -> int:
        return self.config.num_hidden_layers

    @cached_property
    def way(self) -> Way:
        """How nodes are verified: by hybrid tree attention, or by masks if the attention backends are not reached."""
        way = way_of(self.model, self.config)
        if way is HYBRID and not self.has_states and not self._traits_by(HYBRID).is_reached:
            self.runner = self._fixed = None
            way = MASKED
        return way

    @cached_property
    def traits(self) -> LayerTraits:
        """Traits of the attention layers, found by a trial forward."""
        return self._traits_by(self.way)

    def _traits_by(self, way: Way) -> LayerTraits:
        traits = known_traits(self.model, self.config, way.trial)  # without waiting for a call in another thread
        if traits is None:
            with self._switched() if way is HYBRID else nullcontext():
                traits = layer_traits(self.model, self.config, way.trial)
        return traits

    def ignores_zeros(self, name: str) -> bool:
        """Return whether an input of this name that holds only zeros changes nothing."""
        with self.attention():
            return self.way.ignores_zeros(self.model, self.config, name)

    def ignores(self, name: str, value: Any) -> bool:
        """Whether this input changes nothing of text after a prefix."""
        with self.attention():
            return ignores(self.model, self.config, name, value)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Sliding window of every layer; None for layers that attend to all keys."""
        return self.traits.windows

    def hides_keys_within(self, length: int) -> bool:
        """Return whether a window of a layer is shorter than a text of `length` tokens."""
        return any(window is not None and window < length for window in self.windows)

    @property
    def sliding_layers(self) -> frozenset[int]:
        """Indices of the layers that attend to a sliding window only."""
        return frozenset(layer for layer, window in enumerate(self.windows) if window is not None)

    @property
    def has_latent_cache(self) -> bool:
        """Whether the cache holds compressed latents instead of keys and values (MLA)."""
        return shape_of(self.config, "kv_lora_rank") is not None

    def why_not(self, max_length: int | None = None) -> list[str]:
        """Return the reasons why this model cannot be decoded speculatively, one line each; empty if it can."""
        reasons = []
        if self.model.config.is_encoder_decoder:
            reasons.append("it is an encoder-decoder model, and the loop runs decoder-only models")
        kinds = set(getattr(self.config, "layer_types", None) or ())
        if recurrent := sorted(kinds & RECURRENT_LAYERS):
            reasons.append(f"it has {', '.join(recurrent)} layers, whose state cannot branch into a tree or roll back")
        if self.has_states:
            reasons += why_not_reached(self.model, self.config)
            if kinds <= STATE_LAYERS | NO_CACHE:
                reasons.append("it has no attention layers, and the loop runs recurrent layers beside attention only")
        is_masked = way_of(self.model, self.config) is MASKED
        by_masks = {*INDEXED_LAYERS, CHUNKED_LAYER} if is_masked else {CHUNKED_LAYER}
        if other := sorted(kinds - PLAIN_LAYERS - RECURRENT_LAYERS - STATE_LAYERS - HYBRID_LAYERS - by_masks):
            reasons.append(
                f"it has {', '.join(other)} layers, whose choice of keys the attention backends cannot follow"
            )
        if not is_masked and (CHUNKED_LAYER in kinds or shape_of(self.config, "attention_chunk_size")):
            reasons.append("it has chunked attention, which the attention backends do not support")
        if Ranks is None and (getattr(self.model, "_tp_size", None) or 1) > 1:
            reasons.append("it uses tensor parallelism, which is not in this copy (install the package hf_longspec)")
        if len(changes := changes_of(self.config)) > 1:
            columns = [change.column for change in changes]
            reasons.append(f"its rotary frequencies change at different positions, {columns}, not at one")
        if getattr(self.model, "_is_stateful", False) and not self.has_states:
            reasons.append("it is stateful (its forward keeps state that a rollback cannot undo)")
        if "prepare_inputs_for_generation" in vars(self.model):
            reasons.append(
                "a prompt-learning PEFT adapter is active, which inserts hidden prefix tokens; merge or drop it"
            )
        if not is_masked and not self.model._can_set_attn_implementation():
            reasons.append("its attention does not go through transformers' AttentionInterface")
        if reasons:  # the trial below may fail with such layers
            return reasons
        if self.way is MASKED:
            reasons = why_not_masked(self.model, self.config) or self.traits.reasons
            return [*self._why_masked(), *reasons] if reasons else self._why_not_as_long(max_length)
        return reasons + self.traits.reasons + self._why_not_as_long(max_length)

    def _why_masked(self) -> list[str]:
        """Return the reasons why the attention backends cannot compute layers that do not call them."""
        if not self.model._can_set_attn_implementation():
            return ["its attention does not go through transformers' AttentionInterface"]
        return [] if way_of(self.model, self.config) is MASKED else self._traits_by(HYBRID).reasons

    def _why_not_as_long(self, max_length: int | None) -> list[str]:
        """Return the reasons why texts of this length cannot be decoded speculatively."""
        window = self.traits.forgotten_window
        if window is None or max_length is None or max_length <= window:
            return []
        return [
            f"its config has sliding_window={window}, which its attention does not apply and transformers' cache "
            f"does, so texts of more than {window} tokens depend on where the prompt ended; set "
            "config.sliding_window to None or to the length of the longest text"
        ]

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Wait until no other thread decodes with a draft on this model, as decoding switches its attention.

        A model that was loaded with one of the implementations of this package is not switched, so its threads do not
        wait.
        """
        with _locks_guard:
            lock = _locks.setdefault(self.model, threading.RLock())
        with lock:
            if not self._has_our_attention:
                yield
                return
        yield

    @property
    def _has_our_attention(self) -> bool:
        return str(self.config._attn_implementation).startswith(ATTENTION_NAME)

    def attention(self) -> AbstractContextManager[None]:
        """Return the context in which nodes are verified: the model's attention is switched unless masks are used."""
        return nullcontext() if self.way is MASKED else self._switched()

    @contextmanager
    def _switched(self) -> Iterator[None]:
        """Switch the model to this package's attention, and restore its own implementation afterwards.

        The implementation is state of the model, so this waits for other threads as [`TargetView.lock`] does. A model
        that was loaded with one of the implementations of this package is left as it is.
        """
        # the lock comes before the implementation is read: another thread may have switched it
        with self.lock(), reached(self.model) if self.has_states else nullcontext():
            if self._has_our_attention:
                with passed_on(self.model):
                    yield
                return
            configs = _attention_configs(self.model)
            try:
                self.model.set_attn_implementation(name_beside(self.config._attn_implementation))
                with passed_on(self.model):
                    yield
            finally:
                for config, implementation in configs:
                    config._attn_implementation_internal = implementation

    def keeping(self, columns: torch.Tensor) -> dict[str, Any]:
        """The argument of a forward by which logits of `columns` alone are computed, if the model takes it."""
        # A tensor: some models slice more than the logits when they get an int.
        return {"logits_to_keep": columns} if self._takes_logits_to_keep else {}

    def prefill(self, input_ids: torch.Tensor, cache: SpeculativeCache, chunk_size: int | None) -> None:
        """Append keys and values of right-padded prompts to `cache`, under the model's own attention.

        The tokens `(batch, T)` are not in the cache yet, whose rows all have the same length. A forward has
        `chunk_size` tokens; by default, all of them.
        """
        start, total = cache.get_seq_length(), input_ids.shape[1]
        extra = self.keeping(torch.zeros(1, dtype=torch.long, device=input_ids.device))
        for begin in range(0, total, chunk_size or max(total, 1)):
            chunk = input_ids[:, begin : begin + (chunk_size or total)]
            end = start + begin + chunk.shape[1]
            positions = torch.arange(start + begin, end, device=chunk.device).repeat(chunk.shape[0], 1)
            with choices_of(cache, positions, end):
                self.model(
                    input_ids=chunk,
                    position_ids=cache.position_ids(positions),
                    **{CACHE_NAME: cache},
                    use_cache=True,
                    **extra,
                )

    def prefill_rows(
        self,
        prompts: Sequence[torch.Tensor],
        cache: SpeculativeCache,
        chunk_size: int | None,
        columns: torch.Tensor | None = None,
    ) -> None:
        """Append keys and values of prompts to rows of any lengths, as chains that are verified.

        The model's own attention has one length for all rows, and its windows count slots. Call it inside of
        [`TargetView.attention`]. No forward has more tokens than `chunk_size`, or than the cache has slots for a tree.
        See [`GappedContext`] for `columns`.
        """
        tokens = pad_sequence(list(prompts), batch_first=True)
        size = min(chunk_size or cache.tree_slots, cache.tree_slots)
        if self.has_states and tokens.shape[1] % size == 1:
            tokens = pad(tokens, (0, 1))  # as one token alone may be computed by other rules than several
        rows = zip(cache.lengths.host, prompts, strict=True)
        last = max(held + len(prompt) for held, prompt in rows) - 1
        extra = self.keeping(torch.zeros(1, dtype=torch.long, device=tokens.device))
        for begin in range(0, tokens.shape[1], size):
            tree = DraftTree.chain(tokens[:, begin : begin + size])
            positions = cache.lengths.on(tokens.device)[:, None] + tree.depths
            context = tree_context(cache.lengths, positions, tree.mask, windows=self.windows, columns=columns)
            cache.stage(tree.num_nodes, tree)
            # a model with a table of positions would index beyond its end where a short row is padded
            inputs = tree.tokens, cache.position_ids(positions.clamp_max(last)), cache, tree.mask[:, None]
            self.way.logits(context, self.model, *inputs, **extra)
            cache.commit(None, [min(max(len(prompt) - begin, 0), tree.num_nodes) for prompt in prompts])

    def verify(
        self,
        tree: DraftTree,
        cache: SpeculativeCache,
        capture: Any = None,
        limit: int | None = None,
        with_hidden: bool | tuple[int, ...] = False,
        fixed_shape: bool = False,
        lowest: Sequence[int] | None = None,
        columns: torch.Tensor | None = None,
    ) -> "Step":
        """Run all nodes of the tree in one forward, and stage their keys and values in `cache`.

        Args:
            capture (*optional*): Collects scores or queries of the attention layers, see
                `attention_backends/scores.py`.
            limit (`int`, *optional*): Positions are clamped below it. Nodes there are never emitted, but models with a
                position table would index beyond its end.
            with_hidden (`bool` or `tuple[int, ...]`, *optional*, defaults to `False`): Whether to return the input of
                the final norm, or of which layers to return the inputs.
            fixed_shape (`bool`, *optional*, defaults to `False`): Whether more steps with this number of nodes will
                follow, so that compiling one is worth it.
            lowest (`Sequence[int]`, *optional*): Lower bound on the positions of each row, see [`RotaryLimit.lowest`].
            columns (`torch.LongTensor` of shape `(batch, T)`, *optional*): See [`GappedContext`]. Such a step runs as
                it is.
        """
        device = tree.tokens.device
        positions = cache.lengths.on(device)[:, None] + tree.depths
        context = tree_context(cache.lengths, positions, tree.mask, capture, windows=self.windows, columns=columns)
        fixed_shape = fixed_shape and columns is None
        if lowest is not None:
            positions = torch.maximum(positions, on_device(lowest, device)[:, None])
        if limit is not None and cache.lengths.longest + tree.max_depth >= limit:
            positions = positions.clamp_max(limit - 1)
        positions = cache.position_ids(positions)
        cache.stage(tree.num_nodes, tree)
        mask = tree.mask[:, None]
        logits, hidden = self.step(tree.tokens, positions, cache, mask, context, fixed_shape, with_hidden)
        if not context.calls and not fixed_shape:
            cache.rollback()
            raise ValueError(
                f"{type(self.model).__name__} never called the attention backend, so it would ignore the draft tree. "
                "Its attention must go through transformers' AttentionInterface; nothing was generated."
            )
        return Step(logits, context, hidden)

    def step(
        self,
        tokens,
        positions,
        cache,
        mask,
        context,
        fixed_shape: bool = False,
        with_hidden: bool | tuple[int, ...] = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the model on `(batch, N)` tokens with an attention context and a mask `(batch, 1, N, N)` between them.

        Their keys and values are written to the cache.

        Returns:
            `tuple`: Logits `(batch, N, vocab)`, and the input of the final norm `(batch, N, hidden)`, or those of the
            layers that `with_hidden` names, one after another, or `None`.
        """
        with LayerInputs(self.model, with_hidden) if with_hidden else nullcontext() as caught:
            if fixed_shape and self._fixed is not None:
                result = self._fixed.run(tokens, positions, cache, mask, context, with_hidden)
                if result is not None:
                    return result
            logits = self.way.logits(context, self.model, tokens, positions, cache, mask)
        return logits.to(tokens.device), None if caught is None else caught.hidden

    def clock(self) -> float:
        """Return a time in seconds, without the time that captures took, which serve many steps."""
        return time.perf_counter() - getattr(self.runner, "seconds", 0.0)

    @property
    def captures(self) -> bool:
        """Whether steps are captured as CUDA graphs."""
        return self.runner is not None and self.runner.captures

    def replayed(
        self, function: Any, changing: tuple[torch.Tensor, ...], fixed: tuple, holder: Any, settings: tuple = ()
    ) -> Any:
        """Return `function(changing, *fixed, *settings)`, by a captured graph if steps are captured.

        See [`CapturedRunner`] for the arguments. `settings` are hashable.
        """
        if self.runner is not None and self.runner.captures:
            shape = *(x.shape for x in changing), settings
            result = self.runner(function, shape, changing, (*fixed, *settings), self.model, holder)
            if result is not None:
                return result
        return function(changing, *fixed, *settings)

    def forwards_replayed(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of several forwards by one graph; `None`, with nothing done, if they are not captured.

        See [`FixedSteps.forwards`] for the arguments.
        """
        return None if self._fixed is None else self._fixed.forwards(*args, **kwargs)

    def accept(self, tree: DraftTree, logits: torch.Tensor, rule: Any, cache: SpeculativeCache) -> Any:
        """Return acceptance and [`packed`] result by a captured graph; `None` if the acceptance is not captured."""
        return None if self._fixed is None else self._fixed.accept(tree, logits, rule, cache)


@dataclass
class Step:
    """One forward of the target over a tree: its attention context, and the results of [`TargetView.step`]."""

    logits: torch.Tensor
    context: Any = field(repr=False)
    hidden: torch.Tensor | None = None


def chain_of_last_tokens(prompts: Sequence[torch.Tensor], count: int) -> tuple[DraftTree, list[int]]:
    """Return the last `count` tokens of every prompt as a chain, and how many of them each row has."""
    tails = [prompt[-count:] for prompt in prompts]
    sizes, tokens = [len(tail) for tail in tails], pad_sequence(tails, batch_first=True)
    if min(sizes) == tokens.shape[1]:
        return DraftTree.chain(tokens), sizes
    places = torch.arange(tokens.shape[1], device=tokens.device)
    return DraftTree.chain(tokens, places < torch.tensor(sizes, device=tokens.device)[:, None]), sizes


def _refuse_other_objects(model: Any) -> None:
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "config"):
        value = repr(model) if isinstance(model, str | type | None) else f"an object of {type(model)}"
        raise ValueError(
            f"expected a loaded model, but got {value}. Load it with AutoModelForCausalLM.from_pretrained(...)."
        )


def _attention_configs(model: PreTrainedModel) -> list[tuple[Any, str]]:
    """Return every configuration in `model` that holds an attention implementation, with its name."""
    configs: dict[int, tuple[Any, str]] = {}
    pending = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    while pending:
        config = pending.pop()
        if id(config) not in configs:
            configs[id(config)] = config, config._attn_implementation_internal
            pending += [sub for name in config.sub_configs if (sub := getattr(config, name, None)) is not None]
    return list(configs.values())
