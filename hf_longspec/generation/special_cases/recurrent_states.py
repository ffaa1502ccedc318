"""Recurrent and convolution states of one layer of the loop's cache: staged, committed and dropped as keys are.

A forward of one token may change states in place, so it gets copies while a verification is staged. The states of
several staged nodes exist only as the terms of [`recurrences`][hf_longspec.generation.special_cases.recurrences]: a
commit computes the accepted ones, and nothing has to be undone without it. A state cannot be shortened. The way back
to fewer tokens is a copy of the states at the start of the call.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import PreTrainedModel, cache_utils
from transformers.cache_utils import LinearAttentionCacheLayerMixin, LinearAttentionLayer

from ...attention_backends.lengths import SeqLens, on_device
from ..cache import CACHE_NAME, Rows, SpeculativeLayer
from ..call import Call
from ..draft_tree import DraftTree
from ..target_modules import plain_forward, shape_of
from .fixed_states import CommitStates, FixedStates
from .recurrences import (
    Kept,
    StagedNodes,
    Stepped,
    Terms,
    Window,
    expect_tokens_of,
    has_input_bias,
    ignores_earlier_states,
    limits_steps,
    mixers,
    recurrences_replaced,
    why_not_replaceable,
)
from .stock_forwards import PromptsOfForwards
from .trial import HybridMode

# What a layer without a cache has; before transformers 5.23, a layer for states that stays empty.
EmptyLayer: Any = getattr(cache_utils, "DummyLayer", LinearAttentionLayer)
# Types of layers with states alone, with states beside keys and values, and with neither.
STATE_LAYERS = {"linear_attention", "conv"}
HYBRID_LAYERS = {"hybrid", "hybrid_sliding"}
NO_CACHE = {"moe", "mlp"}
# The two states of a layer, as attributes of [`StateLayer`].
STATES = ("convolution", "state")


def has_states(config: Any) -> bool:
    """Return whether layers of this text config keep states."""
    return not (STATE_LAYERS | HYBRID_LAYERS).isdisjoint(getattr(config, "layer_types", None) or ())


class RecurrentStates:
    """The states of all layers of a cache: a part of it beside keys and values.

    Attributes:
        nodes ([`StagedNodes`], *optional*): The nodes of the verification that is staged.
        is_text (`torch.BoolTensor` of shape `(batch, N)`, *optional*):
            Which tokens of a forward of prompts are not padding; `None` if all are text.
    """

    def __init__(self, cache: Any):
        self.cache = cache
        self.layers = [layer for layer in cache.layers if isinstance(layer, StateLayer)]
        self.nodes: StagedNodes | None = None
        self.is_text: torch.Tensor | None = None
        self._copies: list[dict[str, torch.Tensor | None]] | None = None
        # lengths to which a commit or padded prompts have taken the states, if nothing else has changed them since
        self._reached: tuple[int, ...] | None = None
        self._fixed: Any = None
        # joined terms of the last verification, if a graph computed them, and what runs a step
        self._terms: list[Any] = []
        self._run: Callable[..., Any] | None = None
        for layer in self.layers:
            layer.part = self

    def stage(self, tree: DraftTree | None, lengths: SeqLens) -> None:
        """Prepare for a forward over the nodes of a tree after committed tokens."""
        if tree is None:
            raise ValueError("nodes without a tree cannot be staged in a cache with recurrent states.")
        self._reached = None
        self.nodes = StagedNodes(tree, lengths, self.cache.rows.plain)

    def commit(self, path: torch.Tensor | None, counts: SeqLens) -> None:
        """Keep the accepted nodes; see [`SpeculativeCache.commit`], which sets the lengths afterwards."""
        assert self.nodes is not None
        if self._terms:
            self._commit_together(path, counts)
            return
        on_device = counts.on(self.nodes.tree.tokens.device)
        kept = Kept(path, on_device, min(counts.host, default=0) > 0)
        states = [layer.after(kept) for layer in self.layers]
        self._reached = self.cache.lengths.plus(counts).host  # before the first state is replaced
        for layer, new in zip(self.layers, states, strict=True):
            layer.put(new)
        self.nodes = None

    def _commit_together(self, path: torch.Tensor | None, counts: SeqLens) -> None:
        """Commit what a graph has verified, by another graph for all layers if possible."""
        assert self._fixed is not None and self.nodes is not None and self._run is not None
        device = self.nodes.tree.tokens.device
        self._reached = self.cache.lengths.plus(counts).host
        step = CommitStates(None, self.cache, self._fixed, self._terms)
        self._run(step, counts.on(device), *([] if path is None else [path]))
        self.nodes, self._terms, self._run = None, [], None

    def new_layer(self, batch_size: int) -> "StateLayer":
        """Return an empty layer for this many rows."""
        return StateLayer(Rows(batch_size))

    def fixed(self) -> Any:
        """Return what steps of fixed shapes read of the states; `None` if they cannot."""
        return self._fixed if self._has_places() and self._fixed.place(self.layers) else None

    def _has_places(self) -> bool:
        """Return whether there are places for all states, which are made if there are states."""
        if self._fixed is None and all(layer.has_previous_state[0] for layer in self.layers):
            self._fixed = FixedStates.of(self)
        return self._fixed is not None

    def take(self, found: Any, run: Callable[..., Any]) -> None:
        """Take what a graph returned of the states, see [`StatesInGraph.result`]; `run` runs a [`FixedStep`]."""
        if self.nodes is not None:
            self._terms, self._run = [kind(*tensors) for kind, tensors in found], run
        elif found:
            for layer, states in zip(self.layers, found, strict=True):
                layer.put(dict(zip(STATES, states, strict=False)))  # some have one
            self._reached = None

    @contextmanager
    def padded(self, ends: Sequence[int], positions: torch.Tensor) -> Iterator[None]:
        """Let a forward at `positions` `(B, N)` leave the states of each row after its first `ends[b]` tokens."""
        self.is_text = positions < on_device(ends, positions.device)[:, None]
        try:
            yield
        finally:
            self.is_text = None
        self._reached = tuple(ends)

    def drop(self) -> None:
        """Drop what is staged."""
        self.nodes, self._terms, self._run = None, [], None
        for layer in self.layers:
            layer.drop()

    def remember(self) -> None:
        """Keep a copy for `go_back`."""
        self._reached, self._copies = None, [layer.copied() for layer in self.layers]

    def go_back(self) -> None:
        """Return to the copy."""
        for layer, states in zip(self.layers, self._copies or (), strict=True):
            layer.put(dict(states))
        self._reached = None

    def reset(self) -> None:
        """Forget all tokens."""
        self._reached = None
        for layer in self.layers:
            StateLayer.reset(layer)

    def why_not_lengths(self, lengths: SeqLens) -> str | None:
        """Return why the rows cannot have these lengths; `None` if they can."""
        if lengths.host == self._reached or not any(layer.has_previous_state[0] for layer in self.layers):
            return None
        # forwards of plain `generate` count in the layers alone
        read = max((layer.length for layer in self.cache.key_layers), default=0)
        of_rows = self.cache.lengths
        held = (read,) * len(of_rows.host) if read > of_rows.longest else of_rows.host
        if all(new >= old for new, old in zip(lengths.host, held, strict=True)):
            return None
        return (
            f"the rows hold {held} tokens, and their recurrent states cannot be shortened to {lengths.host}. Call "
            "reset(), or start a new cache."
        )

    def can_shorten(self, lengths: Sequence[int]) -> bool:
        """Return whether rows can be cut to these lengths."""
        is_torn = self._reached is not None and self._reached != self.cache.lengths.host
        return not is_torn and tuple(lengths) == self.cache.lengths.host

    def copy_from(self, other: "RecurrentStates") -> None:
        """Copy the states of another cache of the same target."""
        source = None if other._fixed is None else other.fixed()
        if source is not None and self._has_places():
            self._fixed.copy(source, self.layers)
            return
        for own, layer in zip(self.layers, other.layers, strict=True):
            own.put(layer.copied())

    def entries(self) -> dict[str, torch.Tensor]:
        """Return views of what is committed, see [`SpeculativeCache.entries`]."""
        states = {f"{i}.{name}": getattr(layer, name) for i, layer in enumerate(self.layers) for name in STATES}
        return {name: state for name, state in states.items() if state is not None}

    def hold(self, entries: dict[str, torch.Tensor]) -> None:
        """Hold what `entries` of such a part has returned."""
        self._reached = self._copies = None
        for index, layer in enumerate(self.layers):
            layer.put({name: entries.get(f"{index}.{name}") for name in STATES})

    def take_row(self, row: int, other: "RecurrentStates", of: int = 0) -> None:
        """Replace the states of a row by those that another cache keeps of its row `of`."""
        for own, layer in zip(self.layers, other.layers, strict=True):
            states: dict[str, torch.Tensor | None] = {}
            for name in STATES:
                state, taken = getattr(own, name), getattr(layer, name)
                if state is None and taken is not None:
                    state = taken.new_zeros(self.cache.batch_size, *taken.shape[1:])
                if state is not None:  # before the first token, states are zeros
                    state = state.clone()
                    state[row] = 0 if taken is None else taken[of]
                states[name] = state
            own.put(states)

    @property
    def nbytes(self) -> int:
        """Bytes of what is committed."""
        return sum(layer.nbytes for layer in self.layers) if self._fixed is None else self._fixed.nbytes


class StateLayer(LinearAttentionCacheLayerMixin):
    """States of one layer. Tensors are replaced and never written to, except by forwards that are not staged.

    Attributes:
        convolution (`torch.Tensor` of shape `(batch, C, K)`, *optional*): Last inputs of the convolution.
        state (`torch.Tensor` of shape `(batch, ...)`, *optional*): State of the recurrence, if there is one.
    """

    is_compileable = False
    is_croppable = False
    record_past = False
    number_of_states = 1
    part_class = RecurrentStates

    def __init__(self, rows: Rows, capacity: int = 0):
        self.rows = rows
        self.part: RecurrentStates | None = None  # of the cache of this layer
        self.convolution: torch.Tensor | None = None
        self.state: torch.Tensor | None = None
        self._staged: dict[str, Any] = {}

    def like(self, rows: Rows) -> Any:
        """Return an empty layer of this kind for a cache with rows of its own."""
        return type(self)(rows)

    @property
    def nodes(self) -> StagedNodes | None:
        """The nodes of the verification that is staged."""
        return None if self.part is None else self.part.nodes

    @property
    def conv_states(self) -> dict[int, torch.Tensor | None]:
        """Last inputs of the convolution, as the mixers of transformers read them."""
        return {0: self._lent("convolution")}

    @property
    def recurrent_states(self) -> dict[int, torch.Tensor | None]:
        """State of the recurrence, as the mixers of transformers read it."""
        return {0: self._lent("state")}

    @property
    def has_previous_state(self) -> dict[int, bool]:
        """Whether there are committed tokens."""
        return {0: self.convolution is not None}

    def _lent(self, name: str) -> torch.Tensor | None:
        state: torch.Tensor | None = getattr(self, name)
        if state is None or self.nodes is None or self.nodes.tree.num_nodes > 1:
            return state
        if name not in self._staged:
            self._staged[name] = Stepped(state.clone())
        return self._staged[name].state

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the first update brings the shapes."""

    def update_conv_state(
        self, conv_states: torch.Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """Append inputs `(batch, C, N)`, and return them after the last ones before, `(batch, C, K + N)`."""
        size = conv_kernel_size or conv_states.shape[-1]
        if self.convolution is None:
            inputs = pad(conv_states, (size, 0))
        else:
            size = self.convolution.shape[-1]
            inputs = torch.cat([self.convolution, conv_states], -1)
        is_text = None if self.part is None else self.part.is_text
        if self.nodes is not None:
            self._staged["convolution"] = Window(inputs, self.nodes.windows(size).to(inputs.device))
        elif is_text is not None:
            places = is_text.sum(1, keepdim=True) + torch.arange(size, device=is_text.device)
            index = places.to(inputs.device)[:, None].expand(-1, inputs.shape[1], -1)
            self.convolution = inputs.gather(2, index)
        else:
            self.convolution = inputs[..., -size:].clone()
            return inputs
        expect_tokens_of(self)
        return inputs

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        """Store the state after the tokens of this forward; that of staged nodes is in the [`keep`] of the layer."""
        if self.nodes is None:
            self.state = recurrent_states.clone()
        elif self.nodes.tree.num_nodes == 1 and type(self._staged.get("state")) in (Stepped, type(None)):
            self._staged["state"] = Stepped(recurrent_states)
        elif "state" not in self._staged:
            raise ValueError(
                "the recurrence of a layer did not go through the functions of transformers that the loop replaces; "
                "nothing was generated. Load the model without other kernels, or call generate() without a draft."
            )
        return recurrent_states

    def keep(self, terms: Any) -> None:
        """Keep the terms of the states after all staged nodes until the commit."""
        self._staged["state"] = terms

    def after(self, kept: Kept) -> dict[str, torch.Tensor]:
        """Return the states after the accepted nodes."""
        new = {}
        for name, terms in self._staged.items():
            old = getattr(self, name)
            state = terms.after(kept.to(terms.tensors[0].device), old)
            new[name] = state if old is None else state.to(old.dtype)
        return new

    def newest(self) -> dict[str, torch.Tensor]:
        """Return the states after the only node, which every row keeps."""
        return {name: terms.newest for name, terms in self._staged.items()}

    def states(self) -> dict[str, torch.Tensor]:
        """Return the states that there are."""
        return {name: state for name in STATES if (state := getattr(self, name)) is not None}

    def terms(self, name: str) -> Terms:
        """Return the terms of a state after the staged nodes."""
        terms: Terms = self._staged[name]
        return terms

    def put(self, states: Mapping[str, torch.Tensor | None]) -> None:
        """Replace states, and drop what is staged."""
        for name, state in states.items():
            setattr(self, name, state)
        self._staged = {}

    def drop(self) -> None:
        """Drop the states of staged nodes."""
        self._staged = {}

    def copied(self, row: int | None = None) -> dict[str, torch.Tensor | None]:
        """Return a copy of the states of one row, or of all rows."""
        rows = slice(None) if row is None else slice(row, row + 1)
        states = ((name, getattr(self, name)) for name in STATES)
        return {name: None if state is None else state[rows].clone() for name, state in states}

    def adopt(self, layer: Any, past_lengths: Sequence[int], padding: torch.Tensor | None) -> None:
        """Copy the states of a layer of a user's cache."""
        if layer.has_previous_state[0]:
            states = zip(STATES, (layer.conv_states[0], layer.recurrent_states[0]), strict=True)
            self.put({name: None if state is None else state.clone() for name, state in states})

    def give_back(self, layer: Any, length: int, padding: torch.Tensor | None) -> None:
        """Copy the states to a layer of a user's cache."""
        if self.convolution is None:
            return
        if not layer.is_conv_states_initialized[0]:
            layer.lazy_initialization(conv_states=self.convolution, conv_kernel_size=self.convolution.shape[-1])
        layer.conv_states[0].copy_(self.convolution)
        layer.has_previous_state[0] = True
        if self.state is not None:
            if not layer.is_recurrent_states_initialized[0]:
                layer.lazy_initialization(recurrent_states=self.state)
            layer.recurrent_states[0].copy_(self.state)

    @property
    def nbytes(self) -> int:
        """Bytes of the committed states."""
        states = (getattr(self, name) for name in STATES)
        return sum(state.nbytes for state in states if state is not None)

    def reset(self) -> None:
        """Forget all tokens."""
        self.put(dict.fromkeys(STATES))

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse to remove tokens, since a state cannot be shortened."""
        if tokens_to_remove:
            raise ValueError(
                f"crop({tokens_to_remove}): the recurrent states of this cache cannot be shortened. Start a new cache."
            )


class HybridLayer(SpeculativeLayer, StateLayer):
    """Keys, values and states of one layer."""

    is_croppable = False

    def __init__(self, rows: Rows, capacity: int):
        SpeculativeLayer.__init__(self, rows, capacity)
        StateLayer.__init__(self, rows)

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse to remove tokens, since a state cannot be shortened."""
        StateLayer.crop(self, tokens_to_remove)

    def reset(self) -> None:
        """Remove all tokens, and keep the buffers."""
        SpeculativeLayer.reset(self)
        StateLayer.reset(self)


class PromptsOfStates(PromptsOfForwards):
    """Prompts of targets with recurrent states, whose last tokens run once."""

    def __init__(self, call: Call):
        super().__init__(call)
        # limits of step sizes depend on the number of tokens of a forward
        self.by_chains |= len(set(map(len, self.texts))) > 1 and limits_steps(self.target.model)

    def why_not(self) -> Iterator[str]:
        """Yield reasons why recurrent states would differ from those of plain `generate`."""
        model, plain = self.target.model, self.plain
        if self.padding is not None and has_input_bias(model):
            yield (
                f"attention_mask has padding, which the biases of the recurrent layers of {type(model).__name__} turn "
                "into inputs. Pass prompts of equal length, or one at a time."
            )
        if plain.chunk == 1 and max(plain.lags) > plain.stored:
            yield (
                "prefill_chunk_size=1 with padding: recurrent layers of plain generate read the padding in forwards of "
                "one token. Set prefill_chunk_size to 2 or more, or pass prompts of equal length."
            )
        if not ignores_earlier_states(model):
            return
        if self.chunk_size is not None and self.chunk_size < self.input_ids.shape[1]:
            yield (
                f"prefill_chunk_size={self.chunk_size}: transformers' Mamba-1 layers begin anew with each chunk, so "
                "plain generate gives another text. Drop prefill_chunk_size."
            )
        if stored := max(self.past_lengths):
            yield (
                f"{CACHE_NAME} holds {stored} tokens, whose states transformers' Mamba-1 layers ignore with several "
                f"new tokens. Drop {CACHE_NAME}."
            )

    def tree_slots(self, nodes: int) -> int:
        return super().tree_slots(max(nodes, self.target.mode.seed_tokens) + 1)  # see `tails` for one more

    def tails(self, seed_tokens: int) -> list[int]:
        """Return the sizes, one more if a lone token would remain: functions for one token may differ."""
        sizes = super().tails(seed_tokens)
        if self.by_chains:
            return sizes
        new = list(map(len, self.new))
        count = max(new) - sizes[new.index(max(new))]
        is_alone = count % (self.chunk_size or max(count, 2)) == 1
        sizes = [min(size + is_alone, most) for size, most in zip(sizes, new, strict=True)]
        if len(set(new)) > 1:
            heads = [held + most - size for held, most, size in zip(self.past_lengths, new, sizes, strict=True)]
            self.plain.padded = heads
        return sizes


def forward_of_texts(model: PreTrainedModel, cache: Any, positions: torch.Tensor, num_keys: int, **inputs: Any) -> Any:
    """Return the result of a forward of prompts, whose padding changes no state; see [`plain_forward`]."""
    ends = [min(end, num_keys) for end in getattr(cache.rows.plain, "padded", None) or [num_keys]]
    if min(ends) == num_keys:
        return plain_forward(model, cache, positions, num_keys, **inputs)
    states = next(part for part in cache.parts if isinstance(part, RecurrentStates))
    with recurrences_replaced(model), states.padded(ends, positions):
        return plain_forward(model, cache, positions, num_keys, **inputs)


class RecurrentMode(HybridMode):
    """Verify nodes by hybrid tree attention in layers with keys, and by the recurrences of the others."""

    name = "hybrid tree attention and recurrences"
    compiles = False
    has_states = counts_columns = True  # states decay at padding
    forward = staticmethod(forward_of_texts)
    prompts_class = PromptsOfStates
    # one token alone may be computed by other rules than several
    seed_tokens = 2
    tells_single_tokens = True
    # recurrences compare all pairs of tokens of a forward
    chain_tokens = 64

    def applies(self, target: Any) -> bool:
        return has_states(target.config)

    def is_reached(self, target: Any) -> bool:
        return True

    @contextmanager
    def attention(self, target: Any) -> Iterator[None]:
        with target.lock(), recurrences_replaced(target.model), target.switched():
            yield

    def kinds(self) -> set[str]:
        return STATE_LAYERS | HYBRID_LAYERS

    def why_not_fixed(self, name: str) -> str | None:
        return f"recurrent states, which {name} has"

    def why_not(self, target: Any) -> list[str]:
        reasons, config = why_not_replaceable(target.model, target.config), target.config
        kinds = set(config.layer_types)
        if kinds <= STATE_LAYERS | NO_CACHE:
            reasons.append("it has no attention layers, and the loop runs recurrent layers beside attention only")
        if shape_of(config, "attention_chunk_size"):
            reasons.append("it has chunked attention, which the attention backends do not support")
        return reasons + super().why_not(target)

    def replaced_layers(self, target: Any) -> list[Any]:
        return mixers(target.model)

    def continues_texts(self, target: Any) -> bool:
        """Return whether no layer limits its step sizes, or ignores its state, in forwards of several tokens alone."""
        return not limits_steps(target.model) and not ignores_earlier_states(target.model)

    def padded_chain(self, tokens: torch.Tensor, size: int) -> torch.Tensor:
        return pad(tokens, (0, 1)) if tokens.shape[1] % size == 1 else tokens


RECURRENT = RecurrentMode()
LAYERS_OF_STATES: dict[str, Callable[[Rows, int], Any]] = {
    **dict.fromkeys(STATE_LAYERS, StateLayer),
    **dict.fromkeys(HYBRID_LAYERS, HybridLayer),
    **dict.fromkeys(NO_CACHE, lambda rows, capacity: EmptyLayer()),
}
