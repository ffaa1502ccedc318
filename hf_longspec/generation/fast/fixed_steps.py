"""Steps of one target in fixed shapes, which a runner compiles or captures.

`_forwards` is the content of a graph. It gets the cache as buffers and lengths, and builds around them the few objects
that the model's forward expects; the attention context of a step is made again by its own class.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from ...attention_backends.contexts import GraphStep
from ...attention_backends.lengths import SeqLens
from ..draft_tree import DraftTree
from ..sampling import TokenRule, warped
from ..target_modules import logits_under, with_final_norm_input
from ..verification import Acceptance, packed
from .step_cache import StepCache


class Layout:
    """Where the entries of a cache lie, which is the same in all steps until a buffer is replaced.

    Attributes:
        number (`tuple[int, ...]`): `layout` of the cache.
        groups (`list[Rows]`): The different rows of its layers: one, or two for a compact cache with dense layers.
        members (`tuple[int, ...]`): For every layer, the index of its rows.
        capacity (`int`): Slots of the smallest buffer.
        buffers (`list[tuple[torch.Tensor, torch.Tensor]]`): Keys and values of every layer.
    """

    def __init__(self, cache: Any, buffer: Callable[[torch.Tensor], torch.Tensor]):
        self.number = cache.layout
        self.groups = list({id(layer.rows): layer.rows for layer in cache.layers}.values())
        self.members = tuple(map(self.groups.index, (layer.rows for layer in cache.layers)))
        self.capacity = min(layer.keys.shape[2] for layer in cache.layers)
        self.buffers = [(buffer(layer.keys), buffer(layer.values)) for layer in cache.layers]


class FixedSteps:
    """Run the steps of one target through a runner, which compiles or captures them."""

    def __init__(self, model: PreTrainedModel, runner: Any):
        self.model = model
        self.runner = runner
        self._layouts: dict[int, Layout] = {}
        # Logits of the last step and results of the last forwards, which the next replay overwrites.
        self._logits: torch.Tensor | None = None
        self._results: Any = None

    def run(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        cache: Any,
        mask: torch.Tensor,
        context: Any,
        with_hidden: bool | tuple[int, ...] = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Run one step as [`TargetView.step`] does, or return `None`, with nothing done, if that is not possible.

        The capture of the context is filled. `with_hidden` needs the open context of [`LayerInputs`].
        """
        layout, nodes = self._layout(cache), tokens.shape[1]
        if layout is None:
            return None
        more, settings = context.of_step()
        # The context's positions are the same tensor until the last steps of a call, in which the model's are clamped.
        # torch.compile makes another graph when inputs are no longer one tensor.
        positions = positions.view_as(positions)
        step = layout.members, type(context), settings, with_hidden
        result = self._call(_step, (tokens, positions, mask, *more), (self.model, *step), step, cache, nodes)
        if result is None:
            return None
        logits, hidden, collected, scored = result
        if scored and self.runner.captures:
            context.capture.is_replayed = True
        for layer_idx, scores in scored:
            context.capture.keep_scores(layer_idx, scores)
        for layer_idx, query, lse, options in collected:
            prefix = layout.groups[layout.members[layer_idx]].lengths
            stored = layout.buffers[layer_idx][0][:, :, : prefix.longest + nodes]
            context.capture.collect(layer_idx, query, stored, lse, lengths=context.lengths, **options)
        self._logits = logits if self.runner.captures else None
        return logits, hidden

    def _layout(self, cache: Any) -> Layout | None:
        """Return the layout of a cache; `None` if a layer has no buffer yet."""
        layout = self._layouts.get(id(cache))
        if layout is None or layout.number != cache.layout:
            if not all(layer.is_initialized for layer in cache.layers):
                return None
            layout = self._layouts[id(cache)] = Layout(cache, self.runner.buffer)
        return layout

    def forwards(
        self,
        function: Callable[..., Any],
        changing: tuple[torch.Tensor, ...],
        fixed: tuple,
        settings: tuple,
        cache: Any,
        room: int,
        is_compiled: bool = False,
    ) -> Any:
        """Run a function of several forwards in one graph.

        Args:
            function (`Callable`): A function of `forward`, the lengths of the cache, `changing` and `fixed`, without a
                closure. The lengths are one [`SeqLens`], or two for a compact cache with dense layers, that of layer 0
                first. `forward(tokens, positions, mask, context, *starts)` stages tokens `(B, N)` in the slots from
                such lengths on and returns their logits.
            room (`int`): Slots after the prefix that the forwards use.
            is_compiled (`bool`, *optional*, defaults to `False`): Whether all forwards may be compiled together.

        Returns:
            Result of `function`; `None`, with nothing done, if it cannot be captured.
        """
        if not self.runner.captures or (self.runner.compiles and not is_compiled):
            return None
        self._results = self._call(function, changing, fixed, settings, cache, room)
        return self._results

    def _call(self, function, changing, fixed, settings, cache, room) -> Any:
        """Run [`FixedSteps.forwards`], compiled or captured."""
        layout = self._layout(cache)
        prefixes = [] if layout is None else [rows.lengths for rows in layout.groups]
        if layout is None or not all(map(self.runner.takes, prefixes)):
            return None
        counts = tuple(map(self.runner.knows, prefixes))
        sizes = [self.runner.sizes(prefix, room, layout.capacity) for prefix in prefixes]
        inputs = *(prefix.on(changing[0].device) for prefix in prefixes), *changing
        graph = self.runner.key_of([size for group in sizes for size in group], *layout.number)
        shape = function, *(x.shape for x in inputs), *settings, room, counts, graph
        fixed = function, self.model, layout.members, counts, sizes, layout.buffers, fixed
        return self.runner(_forwards, shape, inputs, fixed, self.model, cache)

    def accept(
        self, tree: DraftTree, logits: torch.Tensor, rule: TokenRule, cache: Any
    ) -> tuple[Acceptance, torch.Tensor] | None:
        """Accept the nodes of a tree in one graph, as [`TokenRule.accept`] does. It is dropped with `cache`.

        Returns:
            `tuple`, *optional*: [`Acceptance`], and the result of [`packed`]; `None`, with nothing done, if the logits
            are not those of the last captured step, or this acceptance cannot be captured.
        """
        if logits is not self._logits or not rule.fits_graphs:
            return None
        # the result of another target's graph is copied
        q = tree.q if any(tree.q is result for result in self._results or ()) else None
        copied = () if tree.q is q else (tree.q,)
        changing = (tree.tokens, tree.parents, tree.valid, *copied, *rule.draws_for(tree))
        places = logits.data_ptr(), None if q is None else q.data_ptr()
        shape = *logits.shape, *places, len(copied), tree.max_depth, tree.is_chain, rule.key
        fixed = logits, q, bool(copied), rule, tree.max_depth, tree.is_chain
        result = self.runner(_accept, shape, changing, fixed, self.model, cache)
        if result is None:
            return None
        *fields, next_root, whole = result
        acceptance = Acceptance(*fields)
        acceptance.__dict__["next_root"] = next_root  # fills the cached property
        return acceptance, whole


def _forwards(changing, function, model, members, counts, sizes, buffers, fixed):
    """Run [`FixedSteps.forwards`] inside a graph."""
    lengths, inputs = changing[: len(sizes)], changing[len(sizes) :]

    def forward(tokens, positions, mask, context, *starts):
        cache = StepCache.of_step(buffers, members, starts, tokens)
        return logits_under(context, model, tokens, positions, cache, mask)

    starts = [SeqLens.in_graph(*one) for one in zip(lengths, sizes, counts, strict=True)]
    return function(forward, starts, inputs, *fixed)


def _step(forward, starts, inputs, model, members, kind, settings, with_hidden):
    """Run the model under a context of this kind; return logits, input of the final norm, and data for a capture."""
    tokens, positions, mask, *more = inputs
    collected = Collected()
    context = kind.in_graph(GraphStep(more, settings, mask, [starts[group] for group in members], collected))

    def step():
        return forward(tokens, positions, mask, context, *starts)

    logits, hidden = with_final_norm_input(model, step, with_hidden) if with_hidden else (step(), None)
    return logits, hidden, collected.layers, collected.scored


def _accept(changing, logits, q, is_copied, rule, max_depth, is_chain):
    """Run [`FixedSteps.accept`] inside a graph."""
    tokens, parents, valid, *draws = changing
    if is_copied:
        q, *draws = draws
    tree = DraftTree(tokens, parents, valid, q, is_chain=is_chain, max_depth=max_depth)
    acceptance = rule.accept_scored(tree, warped(rule.processors, logits), *draws)
    fields = acceptance.path, acceptance.num_nodes, acceptance.tokens
    return *fields, acceptance.next_root, packed(acceptance, valid)


class Collected:
    """Keep the data for a capture inside a graph, and pass them on to the capture after the step."""

    score_rows: Any = None
    last_node: Any = None

    def __init__(self) -> None:
        self.layers: list[tuple] = []
        self.scored: list[tuple[int, torch.Tensor]] = []

    def keep_scores(self, layer_idx: int, scores: torch.Tensor) -> None:
        """Keep the scores of one layer, one per entry."""
        self.scored.append((layer_idx, scores))

    def collect(
        self, layer_idx: int, query: torch.Tensor, key: torch.Tensor, lse: torch.Tensor, *, scaling, softcap, **where
    ) -> None:
        """Keep queries and log-sum-exp of one layer."""
        self.layers.append((layer_idx, query, lse, {"scaling": scaling, "softcap": softcap}))
