"""Forwards of the target in fixed shapes: what is compiled or captured once and then only run.

The functions at the end are what a graph consists of. They see the cache as buffers and lengths, and build around them
the few objects that the model's forward expects.
"""

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ..attention_backends.contexts import CallCounter, SparseContext, TreeContext
from ..attention_backends.scores import ScoreRows
from .captured import CapturedRunner
from .compiled import CompiledRunner, end_of_prefixes, known_lengths
from .final_norm import with_final_norm_input
from .row_lengths import RowLengths

COMPILE_MODES = ("auto", "graph", "compile", "off")
COMPILE_DEFAULTS = {"compile": "auto"}
Runner = CompiledRunner | CapturedRunner


def runner_of(mode: str, device: torch.device) -> Runner | None:
    """Who runs the steps on a device: None for "off", or where "auto" means it.

    On a GPU, "auto" captures graphs: launching the kernels of a step takes longer than they do. On a CPU it compiles
    nothing: that takes half a minute or more before the first token, which only long outputs win back.

    Raises:
        ValueError: If there is no such mode, or it needs a GPU.
    """
    if mode not in COMPILE_MODES:
        raise ValueError(f"compile={mode!r}: expected one of {', '.join(COMPILE_MODES)}.")
    if mode == "graph" and device.type != "cuda":
        raise ValueError(f"compile='graph' captures CUDA graphs, and the model is on {device}. Choose 'compile'.")
    if mode == "off" or (mode == "auto" and device.type != "cuda"):
        return None
    if device.type != "cuda":
        return CompiledRunner()
    return CapturedRunner(CompiledRunner() if mode == "compile" else None)


class FixedSteps:
    """Runs the steps of one target through a runner.

    Args:
        model (`PreTrainedModel`): A causal language model, used as it is.
        runner ([`CompiledRunner`] or [`CapturedRunner`]): Compiles or captures.
    """

    def __init__(self, model: PreTrainedModel, runner: Runner):
        self.model = model
        self.runner = runner

    def run(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        cache: Any,
        mask: torch.Tensor,
        context: Any,
        with_hidden: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Logits `(B, N, vocab)` of `(B, N)` tokens, or None if this step has to run as it is.

        Args:
            cache ([`SpeculativeCache`] or [`CompactCache`]): Written to like by the model itself.
            context ([`TreeContext`] or [`SparseContext`]): Its capture is filled.
            with_hidden (`bool`, *optional*, defaults to `False`): Whether the final norm's input `(B, N, hidden)` is to
                come with the logits; a [`FinalNormInput`] is open then.
        """
        groups = _groups(cache)
        if not all(map(self.runner.takes, groups)) or not all(layer.is_initialized for layer in cache.layers):
            return None
        nodes, capacity = tokens.shape[1], min(layer.keys.shape[2] for layer in cache.layers)
        members = tuple(groups.index(layer.rows) for layer in cache.layers)
        known = tuple(map(self.runner.knows, groups))
        sizes = [self.runner.sizes(rows, nodes, capacity) for rows in groups]
        buffers = [(self.runner.buffer(layer.keys), self.runner.buffer(layer.values)) for layer in cache.layers]
        lengths = [rows.on(tokens.device) for rows in groups]
        capture: Any = getattr(context, "capture", None)
        kind: tuple
        if type(context) is TreeContext:
            score_rows = getattr(capture, "score_rows", None)
            function, kind = _tree_step, (capture is not None, score_rows, context.windows)
            scored_nodes = () if score_rows is None else (capture.last_node,)
            changing = (tokens, positions, mask, context.depths, *lengths, *scored_nodes)
        else:
            function, kind = _sparse_step, (context.dense_layers, context.windows)
            changing = (tokens, positions, mask, *lengths)
        shape = *tokens.shape, known, members, kind, with_hidden
        fixed = self.model, members, known, kind, with_hidden, sizes, buffers
        result = self.runner(function, shape, changing, fixed, self.model, cache)
        if result is None:
            return None
        logits, hidden, collected, scored = result
        for layer_idx, scores in scored:
            context.capture.keep_scores(layer_idx, scores, context.host_lengths)
        for layer_idx, query, lse, options in collected:
            stored = buffers[layer_idx][0][:, :, : groups[members[layer_idx]].longest + nodes]
            where = {"lengths": context.lengths, "host_lengths": context.host_lengths}
            context.capture.collect(layer_idx, query, stored, lse, **options, **where)
        return logits, hidden


class StepCache(Cache):
    """What the model sees as its cache inside a step: buffers, and where this step writes.

    Args:
        buffers (`list[tuple[torch.Tensor, torch.Tensor]]`): Keys and values of every layer, `(B, K, capacity, D)`.
        places (`list[tuple]`): Of every layer: whether all rows write to the same slots, the slots `(N,)` or `(B, N)`,
            and the end of what is read; None for the whole buffer.
    """

    def __init__(self, buffers: list[tuple[torch.Tensor, torch.Tensor]], places: list[tuple]):
        self.buffers = buffers
        self.places = places
        self.layers: list[Any] = []

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the nodes' entries; return the used part of both buffers."""
        keys, values = self.buffers[layer_idx]
        same, slots, end = self.places[layer_idx]
        if same:
            keys.index_copy_(2, slots, key_states)
            values.index_copy_(2, slots, value_states)
        else:
            row = torch.arange(len(slots), device=slots.device)[:, None]
            keys[row, :, slots] = key_states.transpose(1, 2)
            values[row, :, slots] = value_states.transpose(1, 2)
        return keys[:, :, :end], values[:, :, :end]

    @property
    def is_sliding(self) -> list[bool]:
        """No layer drops entries."""
        return [False] * len(self.buffers)


class Collected:
    """Keeps what a capture would be shown, to be shown after the step.

    Args:
        score_rows ([`ScoreRows`], *optional*): What the capture lets a backend write itself.
        last_node (`torch.LongTensor` of shape `(B,)`): With them, the index of every row's last node.
    """

    def __init__(self, score_rows: ScoreRows | None, last_node: torch.Tensor | None):
        self.score_rows = score_rows
        self.last_node = last_node
        self.layers: list[tuple] = []
        self.scored: list[tuple[int, torch.Tensor]] = []

    def keep_scores(self, layer_idx: int, scores: torch.Tensor, host_lengths: Any) -> None:
        """Keep one layer's scores, one per entry."""
        self.scored.append((layer_idx, scores))

    def collect(
        self, layer_idx: int, query: torch.Tensor, key: torch.Tensor, lse: torch.Tensor, *, scaling, softcap, **where
    ) -> None:
        """Keep one layer's queries and log-sum-exp."""
        self.layers.append((layer_idx, query, lse, {"scaling": scaling, "softcap": softcap}))


def _tree_step(changing, model, members, known, kind, with_hidden, sizes, buffers):
    """A verification: logits, what the final norm was given, and what its capture is to be shown."""
    tokens, positions, mask, depths, *lengths = changing
    captures, score_rows, windows = kind
    capture = Collected(score_rows, None if score_rows is None else lengths.pop())
    # A new counter: a number that grows with every step would be compiled into each
    host = known_lengths(sizes[0], known[0], tokens.shape[0])
    shown = capture if captures else None
    context = TreeContext(lengths[0], host, depths, mask[:, 0], shown, CallCounter(), windows=windows)
    cache = StepCache(buffers, _places(members, known, lengths, sizes, tokens.shape[1]))
    return *_forward(model, tokens, positions, cache, mask, context, with_hidden), capture.layers, capture.scored


def _sparse_step(changing, model, members, known, kind, with_hidden, sizes, buffers):
    """A drafting step over a compact cache: logits, what the final norm was given, and nothing for a capture."""
    tokens, positions, mask, *lengths = changing
    dense_layers, windows = kind
    rows = tokens.shape[0]
    sparse = next((members[layer] for layer in range(len(members)) if layer not in dense_layers), 0)
    dense = next((members[layer] for layer in dense_layers), sparse)
    own, whole = (
        (lengths[group] + 1, known_lengths(sizes[group], known[group], rows, ahead=1)) for group in (sparse, dense)
    )
    context = SparseContext(*own, positions, *whole, dense_layers, CallCounter(), windows=windows)
    cache = StepCache(buffers, _places(members, known, lengths, sizes, 1))
    return *_forward(model, tokens, positions, cache, mask, context, with_hidden), (), ()


def _forward(model, tokens, positions, cache, mask, context, with_hidden):
    def forward():
        return logits_under(context, model, tokens, positions, cache, mask)

    return with_final_norm_input(model, forward) if with_hidden else (forward(), None)


def logits_under(
    context: Any,
    model: PreTrainedModel,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    cache: Any,
    mask: torch.Tensor,
) -> torch.Tensor:
    """Logits `(B, N, vocab)` of `(B, N)` tokens in one forward whose attention layers are handed `context`."""
    logits: torch.Tensor = model(
        input_ids=tokens,
        position_ids=positions,
        past_key_values=cache,
        attention_mask=mask,
        tree=context,
        use_cache=True,
    ).logits
    return logits


def _places(members, known, lengths, sizes, nodes: int) -> list[tuple]:
    offsets = torch.arange(nodes, device=lengths[0].device)
    of_group = []
    for group, carriers in enumerate(sizes):
        same, end = known[group] == 1, end_of_prefixes(carriers, known[group])
        slots = offsets + (carriers[0].shape[0] if same else lengths[group][:, None])
        of_group.append((same, slots, None if end is None else end + nodes))
    return [of_group[group] for group in members]


def _groups(cache: Any) -> list[RowLengths]:
    """The different lengths that layers of the cache have: one, or those of a compact cache and of the whole one."""
    groups: list[RowLengths] = []
    for layer in cache.layers:
        if not any(layer.rows is rows for rows in groups):
            groups.append(layer.rows)
    return groups
