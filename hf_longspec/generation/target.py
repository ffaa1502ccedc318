"""An unmodified causal language model as a target: its properties, its prefill and its verification forward."""

import inspect
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.nn.modules import module as of_torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from ..attention_backends.contexts import TreeContext
from ..attention_backends.interface import name_beside
from ..attention_backends.lengths import SeqLens
from .cache import SpeculativeCache
from .draft_tree import DraftTree
from .special_case import MODES, SPECIAL_CASES, LayerTraits, VerificationMode
from .target_modules import FORWARDS, LayerInputs, keywords_forwarded, package_of, shape_of, structure_of

ATTENTION_NAME = "hf_longspec"
# One lock per model, held while its attention implementation is switched. Re-entrant, as a criterion may call generate.
_locks: WeakKeyDictionary[PreTrainedModel, Any] = WeakKeyDictionary()
_locks_guard = threading.Lock()
# Layer types whose recurrent states transformers' caches do not hold.
RECURRENT_LAYERS = {"mamba", "mamba2", "recurrent"}
# Layer types that attend to all keys or to those in a window, or do not attend.
PLAIN_LAYERS = {"full_attention", "sliding_attention", "attention", "moe", "mlp"}
# Parts of the names of rotary embeddings whose frequencies depend on the length of the text.
CHANGING_ROTARY = ("dynamic", "longrope", "long_mscale")
ROTARY_LIMIT, TENSOR_PARALLELISM = "rotary frequencies that change", "tensor parallelism"


@dataclass(eq=False)
class Known:
    """What is known of a model as long as its structure and its text config stay the same."""

    structure: list[Any]  # of the model, and its text config
    # reasons of [`TargetView.why_not`], by what else they depend on
    reasons: dict[tuple, list[str]] = field(default_factory=dict)
    declared_mode: VerificationMode | None = None
    mode: VerificationMode | None = None
    traits: dict[VerificationMode, LayerTraits] = field(default_factory=dict)
    is_certain: bool = True  # whether no trial has failed, which is repeated in the next call
    checked: set[tuple] = field(default_factory=set)  # kinds of calls whose first verification was compared
    hooked: dict[tuple, str | None] = field(default_factory=dict)  # reasons against declared hooks


# The structures that a model had last, such as those of several adapters.
MOST_KNOWN = 8
_known: WeakKeyDictionary[PreTrainedModel, list[Known]] = WeakKeyDictionary()


def known_of(model: PreTrainedModel, config: Any) -> Known:
    """Return what is known of a model with this text config; a new object if either has changed."""
    structure, earlier = [*structure_of(model), config.to_dict()], _known.get(model, [])
    known = next((one for one in earlier if one.structure == structure and one.is_certain), None) or Known(structure)
    _known[model] = [known, *(one for one in earlier if one is not known)][:MOST_KNOWN]
    return known


def takes(model: PreTrainedModel, name: str) -> bool:
    """Return whether the forward of a model has a parameter of this name."""
    return name in _parameters_of(type(model))  # type: ignore[arg-type]


@cache
def _parameters_of(kind: Any) -> frozenset[str]:
    return frozenset(inspect.signature(kind.forward).parameters)


class TargetView:
    """Run an unmodified target model for the decoding loop.

    Args:
        runner ([`CompiledRunner`] or [`CapturedRunner`], *optional*):
            Compiles or captures steps, see [`Steps`]. Not used under tensor parallelism.
    """

    def __init__(self, model: PreTrainedModel, runner: Any = None):
        given: Any = model
        if not isinstance(given, torch.nn.Module) or not hasattr(given, "config"):
            value = repr(given) if isinstance(given, str | type | None) else f"an object of {type(given)}"
            raise ValueError(
                f"expected a loaded model, but got {value}. Load it with AutoModelForCausalLM.from_pretrained(...)."
            )
        self.model = model
        self.config = model.config.get_text_config(decoder=True)
        self._runner = runner
        # the modules decide, whose kind may differ from that of the config
        kinds = (vars(module).get("rope_type") for module in model.modules())
        rotary = str([getattr(self.config, "rope_parameters", None), *filter(None, kinds)])
        is_shared = (getattr(model, "_tp_size", None) or 1) > 1
        # names of the special cases that this model brings to every call
        self.special_cases = [ROTARY_LIMIT] * any(kind in rotary for kind in CHANGING_ROTARY)
        self.special_cases += [TENSOR_PARALLELISM] * is_shared
        self.ranks = SPECIAL_CASES[TENSOR_PARALLELISM].ranks_of(model) if is_shared else None

    @cached_property
    def known(self) -> Known:
        """What is known of the model."""
        return known_of(self.model, self.config)

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def sum_ranks(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Function that sums a tensor over the processes that hold the target; `None` if there is only one."""
        return None if self.ranks is None else self.ranks.sum

    @property
    def num_layers(self) -> int:
        return self.config.num_hidden_layers

    @property
    def declared_mode(self) -> VerificationMode:
        """The verification mode, as far as the class of the model and its config tell."""
        if self.known.declared_mode is None:
            self.known.declared_mode = next(mode for mode in MODES if mode.applies(self))
        return self.known.declared_mode

    @cached_property
    def mode(self) -> VerificationMode:
        """The verification mode. Another one takes models that do not call the attention backends in a trial."""
        if (mode := self.known.mode) is None:
            mode = self.declared_mode
            if not mode.is_reached(self):
                mode = next((other for other in MODES if other.takes_unreached), mode)
            if self.known.is_certain:
                self.known.mode = mode
        return mode

    @property
    def has_states(self) -> bool:
        """Whether layers keep recurrent states."""
        return self.declared_mode.has_states

    @property
    def traits(self) -> LayerTraits:
        """Traits of the attention layers, found by a trial forward."""
        return self.traits_by(self.mode)

    def traits_by(self, mode: VerificationMode) -> LayerTraits:
        """Return the traits that the trial of a mode finds; it runs once for a model and its text config."""
        known = self.known
        if mode not in known.traits:
            with mode.attention(self):
                traits = mode.trial(self.model, self.config)
            if not traits.windows:  # a trial that failed is repeated in the next call
                known.is_certain = False
            known.traits[mode] = traits
        return known.traits[mode]

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Sliding window of every layer; None for layers that attend to all keys."""
        return self.traits.windows

    @property
    def sliding_layers(self) -> frozenset[int]:
        """Indices of the layers that attend to a sliding window only."""
        return frozenset(layer for layer, window in enumerate(self.windows) if window is not None)

    @property
    def has_latent_cache(self) -> bool:
        """Whether the cache holds compressed latents instead of keys and values (MLA)."""
        return shape_of(self.config, "kv_lora_rank") is not None

    @property
    def rotary_limit(self) -> float:
        """First position under other rotary frequencies than those before it; infinity if they never change."""
        column: float = SPECIAL_CASES[ROTARY_LIMIT].column_of(self) if ROTARY_LIMIT in self.special_cases else math.inf
        return column

    @property
    def counts_padding(self) -> bool:
        """Whether in plain `generate` the text of a row depends on its left padding.

        `generate` creates position ids only for a forward that has this parameter. Without them padding shifts all
        positions, which changes nothing for rotary embeddings, as these depend on distances only.
        """
        takes_positions = takes(self.model, "position_ids")
        rotates = any("rotary_emb" in name for name, _ in self.model.named_modules())
        return not (takes_positions or rotates) or self.traits.counts_padding

    @property
    def has_hooks(self) -> bool:
        """Whether there are forward hooks, or forwards in the place of those of classes, which may be a user's."""
        names, values = {"_hf_hook", *FORWARDS}, map(vars, self.model.modules())
        is_hooked = any(x["_forward_hooks"] or x["_forward_pre_hooks"] or not names.isdisjoint(x) for x in values)
        return is_hooked or bool(of_torch._global_forward_hooks or of_torch._global_forward_pre_hooks)

    def why_not(self, max_length: int | None = None) -> list[str]:
        """Return the reasons why this model cannot be decoded speculatively, one line each; empty if it can."""
        prepare = vars(self.model).get("prepare_inputs_for_generation")
        if package_of(getattr(prepare, "__func__", None)) == "peft":  # the trial may fail with it
            adapter = "a prompt-learning PEFT adapter is active, which inserts hidden prefix tokens; merge or drop it"
            return [*self._why_not_kind(), adapter]
        reasons = self.known.reasons
        key = str(self.config._attn_implementation), getattr(self.model, "_use_kernels", False)
        if key not in reasons:
            reasons[key] = self._why_not_kind() or self.mode.why_not_tried(self)
        return reasons[key] or self._why_not_as_long(max_length)

    def _why_not_kind(self) -> list[str]:
        """Return the reasons that do not need a trial, which may fail with such layers."""
        reasons = []
        if self.model.config.is_encoder_decoder:
            reasons.append("it is an encoder-decoder model, and the loop runs decoder-only models")
        mode, kinds = self.declared_mode, set(getattr(self.config, "layer_types", None) or ())
        if recurrent := sorted(kinds & RECURRENT_LAYERS):
            reasons.append(f"it has {', '.join(recurrent)} layers, whose state cannot branch into a tree or roll back")
        reasons += mode.why_not(self)
        if other := sorted(kinds - PLAIN_LAYERS - RECURRENT_LAYERS - mode.kinds()):
            reasons.append(
                f"it has {', '.join(other)} layers, whose choice of keys the attention backends cannot follow"
            )
        if getattr(self.model, "_is_stateful", False) and not mode.has_states:
            reasons.append("it is stateful (its forward keeps state that a rollback cannot undo)")
        return reasons

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

    def attention(self) -> AbstractContextManager[Any]:
        """Return the context in which nodes are verified."""
        return self.mode.attention(self)

    @contextmanager
    def switched(self) -> Iterator[None]:
        """Switch the model to this package's attention, and restore its own implementation afterwards.

        The implementation is state of the model, so this waits for other threads as [`TargetView.lock`] does. A model
        that was loaded with one of the implementations of this package is left as it is.
        """
        with self.lock():  # before the implementation is read: another thread may have switched it
            if self._has_our_attention:
                with keywords_forwarded(self.model):
                    yield
                return
            configs = _attention_configs(self.model)
            try:
                self.model.set_attn_implementation(name_beside(self.config._attn_implementation))
                with keywords_forwarded(self.model):
                    yield
            finally:
                for config, implementation in configs:
                    config._attn_implementation_internal = implementation

    def keeping(self, columns: torch.Tensor) -> dict[str, Any]:
        """The argument of a forward by which logits of `columns` alone are computed, if the model takes it."""
        # A tensor: some models slice more than the logits when they get an int.
        return {"logits_to_keep": columns} if takes(self.model, "logits_to_keep") else {}

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
            inputs = {"input_ids": chunk, "position_ids": cache.position_ids(positions), **extra}
            self.declared_mode.forward(self.model, cache, positions, end, **inputs)

    def prefill_rows(self, prompts: Sequence[torch.Tensor], cache: SpeculativeCache, chunk_size: int | None) -> None:
        """Append keys and values of prompts to rows of any lengths, as chains that are verified.

        The model's own attention has one length for all rows, and its windows count slots. Call it inside of
        [`TargetView.attention`]. No forward has more tokens than `chunk_size`, or than the cache has slots for a tree.
        """
        tokens = pad_sequence(list(prompts), batch_first=True)
        size = min(chunk_size or cache.tree_slots, cache.tree_slots)
        tokens = self.mode.padded_chain(tokens, size)
        rows = zip(cache.lengths.host, prompts, strict=True)
        last = max(held + len(prompt) for held, prompt in rows) - 1
        extra = self.keeping(torch.zeros(1, dtype=torch.long, device=tokens.device))
        for begin in range(0, tokens.shape[1], size):
            tree = DraftTree.chain(tokens[:, begin : begin + size])
            positions = cache.lengths.on(tokens.device)[:, None] + tree.depths
            context = TreeContext(cache.lengths, positions, tree.mask, windows=self.windows)
            cache.stage(tree.num_nodes, tree)
            # a model with a table of positions would index beyond its end where a short row is padded
            inputs = tree.tokens, cache.position_ids(positions.clamp_max(last)), cache, tree.mask[:, None]
            self.mode.logits(context, self.model, *inputs, **extra)
            cache.commit(None, [min(max(len(prompt) - begin, 0), tree.num_nodes) for prompt in prompts])

    def verify(
        self,
        tree: DraftTree,
        cache: SpeculativeCache,
        capture: Any = None,
        limit: int | None = None,
        with_hidden: bool | tuple[int, ...] = False,
        fixed_shape: bool = False,
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
        """
        device = tree.tokens.device
        positions = cache.lengths.on(device)[:, None] + tree.depths
        context = TreeContext(cache.lengths, positions, tree.mask, capture, windows=self.windows)
        if limit is not None and cache.lengths.longest + tree.max_depth >= limit:
            positions = positions.clamp_max(limit - 1)
        positions = cache.position_ids(positions)
        cache.stage(tree.num_nodes, tree)
        mask = tree.mask[:, None]
        logits, hidden = self.step(tree.tokens, positions, cache, mask, context, fixed_shape, with_hidden)
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
    ) -> "StepResult":
        """Run the model on `(batch, N)` tokens with an attention context and a mask `(batch, 1, N, N)` between them.

        Their keys and values are written to the cache.
        """
        with LayerInputs(self.model, with_hidden) if with_hidden else nullcontext() as caught:
            inputs = tokens, positions, cache, mask, context
            if fixed_shape and (result := self.steps.verify(*inputs, with_hidden)) is not None:
                return result
            logits = self.mode.logits(context, self.model, tokens, positions, cache, mask)
        return StepResult(logits.to(tokens.device), None if caught is None else caught.hidden)

    def clock(self) -> float:
        """Return a time in seconds, without that of what serves many steps: captures, and packing of weights.

        A step that runs in one thread of a processor is timed without other programs.
        """
        is_alone = self.model.device.type == "cpu" and torch.get_num_threads() == 1
        return (time.thread_time() if is_alone else time.perf_counter()) - self.steps.seconds

    @cached_property
    def steps(self) -> "Steps":
        """How the steps of this target run."""
        # collectives inside a graph are untested
        runner, mode = self._runner, self.mode
        if runner is None or self.ranks is not None or not (mode.compiles or not runner.compiles):
            return Steps()
        steps: Steps = runner.steps_of(self.model, mode)
        return steps

    def run(self, function: Callable[..., Any], holder: Any, *inputs: torch.Tensor, **settings: Any) -> Any:
        """Return `function(*inputs, **settings)`, by a captured graph if steps are captured; see [`Function`]."""
        return self.run_step(Function(self.model, holder, function, settings), *inputs)

    def run_step(self, step: "FixedStep", *inputs: torch.Tensor) -> Any:
        """Return the result of a step, by a captured graph if steps are captured."""
        result = self.steps.run(step, *inputs) if self.steps.captures else None
        return step.run(*inputs) if result is None else result


class StepResult(NamedTuple):
    """Result of one forward over nodes."""

    logits: torch.Tensor  # `(batch, N, vocab)`
    # `(batch, N, hidden)`: input of the final norm, or of the layers that `with_hidden` names, one after another
    hidden: torch.Tensor | None


class GraphKey:
    """What tells graphs apart, beside the class of a step and the shapes of its inputs."""

    @property
    def key(self) -> tuple:
        """Hashable values."""
        return ()

    @property
    def places(self) -> tuple[int, ...]:
        """Numbers that change when a buffer is replaced."""
        return ()


@dataclass(eq=False)
class FixedStep(GraphKey):
    """A part of an iteration in which only some tensors change, so that it may be compiled, or captured as a graph.

    Subclasses hold what stays the same as fields: modules, settings, and the buffers that are read and written.
    """

    module: Any  # owner of the weights. Its graphs are dropped with it
    holder: Any  # owner of the buffers. Its graphs are dropped with it, too

    def run(self, *inputs: torch.Tensor) -> Any:
        """Compute from tensors. It may run several times with the same ones, with the same result."""
        raise NotImplementedError

    def why_not_captured(self) -> str | None:
        """Return why this step runs without a graph; `None` if it is captured."""
        return None


@dataclass(eq=False)
class Function(FixedStep):
    """A function of tensors, or a method that may read and write buffers of its object; the settings are hashable."""

    function: Callable[..., Any]
    settings: dict[str, Any]

    @property
    def key(self) -> tuple:
        return getattr(self.function, "__func__", self.function), *self.settings.items()

    def run(self, *inputs: torch.Tensor) -> Any:
        return self.function(*inputs, **self.settings)


# Runs tokens, positions, mask and context, staged in the slots from some lengths on, one for each group of layers;
# returns logits.
Forward = Callable[..., torch.Tensor]


@dataclass(eq=False)
class Forwards(GraphKey):
    """Forwards of one model over a cache, which together are a [`FixedStep`].

    Attributes:
        leaves_states (`bool`): Whether recurrent states after the last forward are those of the cache.
    """

    leaves_states: ClassVar[bool] = False

    def run(self, forward: Forward, starts: Sequence[SeqLens], *inputs: torch.Tensor) -> Any:
        """Compute from tensors.

        `starts` are the lengths of the cache: one [`SeqLens`], or two for a compact cache with dense layers, that of
        layer 0 first.
        """
        raise NotImplementedError


class Steps:
    """Run the steps of one target as they are. [`FixedSteps`] compiles or captures them.

    Every method returns `None`, with nothing done, for what runs as it is.

    Attributes:
        runner ([`CompiledRunner`] or [`CapturedRunner`], *optional*): Compiles or captures.
        captures (`bool`): Whether steps are captured as CUDA graphs.
        compiles (`bool`): Whether steps are compiled.
        seconds (`float`): Time that captures took, or the packing of weights.
        logits (`torch.Tensor`, *optional*): Logits of the last step, if a graph computed them, which the next replay
            overwrites.
        results (`Sequence[torch.Tensor]`): Likewise, the results of the last forwards.
    """

    runner: Any = None
    logits: torch.Tensor | None = None
    results: Sequence[torch.Tensor] = ()
    captures = compiles = False
    seconds = 0.0

    def run(self, step: FixedStep, *inputs: torch.Tensor) -> Any:
        """Return the result of a step."""

    def verify(self, *inputs: Any) -> "StepResult | None":
        """Return the result of [`TargetView.step`]."""

    def forwards(self, forwards: Forwards, cache: Any, room: int, *inputs: torch.Tensor, may_compile: bool) -> Any:
        """Return the result of several forwards, which use `room` slots after the prefix.

        `may_compile` tells whether all of them may be compiled together.
        """

    def workspace(self, batch_size: int, max_length: int) -> Any:
        """Return buffers that an earlier call has left."""

    def keep(self, workspace: Any, cache: SpeculativeCache) -> None:
        """Keep the buffers of a call for the next one."""


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
