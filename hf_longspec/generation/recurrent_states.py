"""Recurrent and convolution states of one layer of the loop's cache: staged, committed and dropped as keys are.

A forward of one token may change states in place, so it gets copies while a verification is staged. The states of
several staged nodes exist only as the terms of [`recurrences`][hf_longspec.generation.recurrences]: a commit computes
the accepted ones, and nothing has to be undone without it. A state cannot be shortened. The way back to fewer tokens is
a copy of the states at the start of the call.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.functional import pad
from transformers.cache_utils import LinearAttentionCacheLayerMixin, LinearAttentionLayer

try:
    from transformers.cache_utils import DummyLayer
except ImportError:  # before transformers 5.23
    DummyLayer = None

from .recurrences import Accepted, StagedNodes, Stepped, Window, hand_over

# What a layer without a cache has; before transformers 5.23, a layer for states that stays empty.
EmptyLayer: Any = DummyLayer or LinearAttentionLayer
# Types of layers with states alone, with states beside keys and values, and with neither.
STATE_LAYERS = {"linear_attention", "conv"}
HYBRID_LAYERS = {"hybrid", "hybrid_sliding"}
NO_CACHE = {"moe", "mlp"}
# Types of layers with an indexer, whose keys are cached beside those of the layer; the second one before 5.23.
INDEXED_LAYERS = {"indexed_attention", "deepseek_sparse_attention"}
# The two states of a layer, as attributes of [`StateLayer`].
STATES = ("convolution", "state")


def has_states(config: Any) -> bool:
    """Return whether layers of this text config keep states."""
    return not (STATE_LAYERS | HYBRID_LAYERS).isdisjoint(getattr(config, "layer_types", None) or ())


def layers_of(
    config: Any,
    of_keys: Callable[[], Any],
    of_states: Callable[[], Any],
    of_both: Callable[[], Any],
    of_indexers: Callable[[], Any] | None = None,
) -> list[Any]:
    """Return the layers of a cache for this text config, made by the function for what each of them keeps."""
    kinds = getattr(config, "layer_types", None) or ()
    if not has_states(config) and INDEXED_LAYERS.isdisjoint(kinds):
        return [of_keys() for _ in range(config.num_hidden_layers)]
    makers = dict.fromkeys(INDEXED_LAYERS, of_indexers or of_keys)
    makers |= dict.fromkeys(STATE_LAYERS, of_states) | dict.fromkeys(HYBRID_LAYERS, of_both)
    makers |= dict.fromkeys(NO_CACHE, EmptyLayer)
    return [makers.get(kind, of_keys)() for kind in kinds]


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

    def __init__(self, rows: Any):
        self.rows = rows
        self.convolution: torch.Tensor | None = None
        self.state: torch.Tensor | None = None
        self._staged: dict[str, Any] = {}

    @property
    def nodes(self) -> StagedNodes | None:
        """The nodes of the verification that is staged."""
        nodes: StagedNodes | None = self.rows.nodes
        return nodes

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
        if self.nodes is None:
            self.convolution = inputs[..., -size:].clone()
        else:
            self._staged["convolution"] = Window(inputs, size)
            hand_over(self)
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

    def after(self, accepted: Accepted) -> dict[str, torch.Tensor]:
        """Return the states after the accepted nodes."""
        new = {}
        for name, terms in self._staged.items():
            old = getattr(self, name)
            state = terms.after(accepted, old)
            new[name] = state if old is None else state.to(old.dtype)
        return new

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

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Reorder the rows, for beam search."""
        states = ((name, state) for name in STATES if (state := getattr(self, name)) is not None)
        self.put({name: state.index_select(0, beam_idx.to(state.device)) for name, state in states})


def take_over_states(layer: Any, own: StateLayer) -> None:
    """Copy the states of a layer of transformers."""
    if layer.has_previous_state[0]:
        states = zip(STATES, (layer.conv_states[0], layer.recurrent_states[0]), strict=True)
        own.put({name: None if state is None else state.clone() for name, state in states})


def give_back_states(own: StateLayer, layer: Any) -> None:
    """Copy the states to a layer of transformers."""
    if own.convolution is None:
        return
    layer.lazy_initialization(conv_states=own.convolution, conv_kernel_size=own.convolution.shape[-1])
    layer.conv_states[0].copy_(own.convolution)
    layer.has_previous_state[0] = True
    if own.state is not None:
        layer.lazy_initialization(recurrent_states=own.state)
        layer.recurrent_states[0].copy_(own.state)
