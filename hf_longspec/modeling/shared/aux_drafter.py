"""The drafter of drafts that read auxiliary hidden states: it keeps the entries of the committed text.

An entry holds the target's auxiliary hidden states at a position p, its rotary position is p, and its token that of
position p + 1, for drafts that read one. The states of the last verification wait until the next draft stores them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple

import torch

from ...generation.draft_tree import Beam
from ...generation.drafter import Binding, Verification
from ...generation.target_modules import LayerInputs, TargetEnds
from .beams import BeamDrafter, Tensors, WindowRing
from .vocabulary import part_of_head


class Entries(NamedTuple):
    """Entries that the next draft stores."""

    aux_hidden_states: torch.Tensor  # `(B, T, layers * hidden)`
    tokens: torch.Tensor  # `(B, T)`: the token after each of the states
    positions: torch.Tensor  # `(B, T)`: their positions; -1 for padding
    last: torch.Tensor  # `(B, 1)`: place of the last entry of each row


class PromptAuxHiddenStates(LayerInputs):
    """Keep auxiliary hidden states of the first and last tokens of prompts, which may be prefilled in chunks.

    Rows are padded on the right. Each forward continues where the one before ended.

    Args:
        model (`PreTrainedModel`): The target.
        layers (`Sequence[int]`): Layers whose inputs are kept.
        lengths (`Sequence[int]`): Number of tokens of every row.
        starts (`Sequence[int]`): Position of the first token that is read, of every row.
        places (`Sequence[int]`): Row of the forwards that reads the prompt of every row.
        sinks (`int`): Number of first tokens that are kept.
        window (`int`): Number of last tokens that are kept.
    """

    def __init__(
        self,
        model: Any,
        layers: Sequence[int],
        lengths: Sequence[int],
        starts: Sequence[int],
        places: Sequence[int],
        sinks: int,
        window: int,
    ):
        super().__init__(model, layers)
        self.spans = [[(0, min(sinks, size)), (max(min(sinks, size), size - window), size)] for size in lengths]
        self._starts, self._places = starts, places
        self._read = [0] * len(layers)
        self._pieces: list[list[list[tuple[int, torch.Tensor]]]] = [[[] for _ in lengths] for _ in layers]

    def _keep(self, place: int, states: torch.Tensor) -> None:
        read = self._read[place]
        self._read[place] += states.shape[1]
        for row, spans in enumerate(self.spans):
            first = self._starts[row] + read
            end = first + states.shape[1]
            for begin, stop in ((max(begin, first), min(stop, end)) for begin, stop in spans):
                if begin < stop:
                    # a copy, as a view would keep the states of the whole chunk
                    piece = states[self._places[row], begin - first : stop - first].clone()
                    self._pieces[place][row].append((begin, piece))

    def of_row(self, row: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the kept positions `(n,)` of a row and states `(n, layers * hidden)`; `None` if there are none."""
        places = [pieces[row] for pieces in self._pieces]
        if not places[0]:
            return None
        device = places[-1][0][1].device
        ranges = [torch.arange(begin, begin + len(piece), device=device) for begin, piece in places[0]]
        states = [torch.cat([piece for _, piece in pieces]).to(device) for pieces in places]
        return torch.cat(ranges), torch.cat(states, -1)


class Angles:
    """Rotary embedding of a draft, as a part of a workspace.

    Args:
        rotary (`torch.nn.Module`): Function of a tensor, for its dtype, and of positions.
    """

    def __init__(self, rotary: Any):
        self.rotary = rotary

    @property
    def nbytes(self) -> int:
        return sum(buffer.numel() * buffer.element_size() for buffer in self.rotary.buffers())

    def __call__(self, like: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines `(B, N, D)` of `positions` `(B, N)`, with the dtype of `like`."""
        cos, sin = self.rotary(like, positions)
        return cos, sin


class AuxDrafter(BeamDrafter):
    """Base of their drafters, which keeps the entries of the committed text.

    Subclasses implement `level_inputs`, `level` and `remember`.
    """

    def __init__(self, binding: Binding, draft: Any):
        super().__init__(binding, draft)
        self.wants_hidden = draft.layers_of(binding.target.config)
        self.window = min(draft.prompt_tokens, binding.max_length)
        self.sinks = min(draft.setting("sinks"), binding.max_length)
        self.rotary = self.make_rotary()
        reads_part = getattr(self.draft, "d2t", None) is not None and self.draft.lm_head is None
        ends = TargetEnds(binding.target.model)
        self.part_of_head = part_of_head(self.draft, ends, binding) if reads_part else None
        self._prompts: PromptAuxHiddenStates | None = None
        self.pending: Entries | None = None

    def make_rotary(self) -> Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
        """Return the function of a tensor, for its dtype, and of positions `(B, N)`, to cosines and sines `(B, N, D)`.

        It is kept for later calls, as graphs read its tensors.
        """
        key = Angles, self.draft.effective("rope_theta"), self.device
        return self.binding.part(key, lambda: Angles(self.draft.rotary_embedding(self.device)))

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return embeddings `(B, T, hidden)` of tokens, on the draft's device."""
        embedded = self.draft.embed(tokens.to(self.device), self.binding.target.model)
        return embedded.to(self.device, self.dtype)

    def head(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return logits `(B, n, draft vocabulary)` of normalised outputs `(B, n, hidden)`."""
        return self.draft.logits(outputs, self.binding.target.model, self.part_of_head)

    @property
    def tree_slots(self) -> int:
        """Most drafted entries that are staged in a ring at a time."""
        return self.num_nodes

    def remember(self, aux_hidden_states: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor) -> None:
        """Store entries in the rings.

        Args:
            aux_hidden_states (`torch.Tensor` of shape `(B, T, layers * hidden)`): The target's states.
            tokens (`torch.LongTensor` of shape `(B, T)`): The token after each of them.
            positions (`torch.LongTensor` of shape `(B, T)`): Their positions; a negative one marks padding.
        """
        raise NotImplementedError

    @property
    def most_new(self) -> int:
        """Most tokens that a verification commits per row."""
        return max(self.max_depth, self.ngram_depth) + 1

    @cached_property
    def rings(self) -> list[WindowRing]:  # type: ignore[override]
        """Entries of the committed text, for each layer. Layers trained with a window saw no sinks besides."""
        config, rings = self.draft.config, []
        sizes = self.binding.cache.batch_size, config.num_key_value_heads, config.head_dim, self.dtype, self.device
        for index, layer_window in enumerate(config.window_of_layers):
            window, sinks = (self.window, self.sinks) if layer_window is None else (min(layer_window, self.window), 0)
            rings.append(self.make_ring(index, window, self.tree_slots, *sizes, sinks, self.most_new))
        return rings

    @property
    def state_bytes(self) -> int:
        pending = () if self.pending is None else self.pending
        return super().state_bytes + sum(x.numel() * x.element_size() for x in pending)

    @contextmanager
    def watch_prefill(self, lengths: Sequence[int], starts: Sequence[int], places: Sequence[int]) -> Iterator[None]:
        layers = self.wants_hidden
        assert isinstance(layers, tuple)
        if self._prompts is None:  # else the next chunk of these prompts
            self._prompts = PromptAuxHiddenStates(
                self.binding.target.model, layers, lengths, starts, places, self.sinks, self.window
            )
        with self._prompts:
            yield

    def start(self, texts: Sequence[torch.Tensor], verification: Verification) -> None:
        if self._prompts is not None:
            self._read(self._prompts, texts)
            self._prompts = None
        self.observe(verification)

    def resume(self, texts: Sequence[torch.Tensor], verification: Verification) -> None:
        """Continue after plain steps. Their tokens have no entries, as the target's states are gone."""
        self.observe(verification)

    def row_states(self) -> Sequence[torch.Tensor]:
        return *(part for ring in self.rings for part in ring.row_states), *(self.pending or ())

    def observe(self, verification: Verification) -> None:
        """Keep states, tokens and positions of the committed nodes, whose entries the next draft stores first."""
        assert verification.hidden is not None and verification.tree is not None
        device, width = verification.path.device, self.most_new
        if self.pending is None:
            shape = len(verification.path), width
            none = torch.full(shape, -1, device=self.device)
            aux_hidden_states = torch.zeros(*shape, verification.hidden.shape[2], dtype=self.dtype, device=self.device)
            self.pending = Entries(aux_hidden_states, none.clone(), none, none[:, :1] + 1)
        nodes = verification.hidden, verification.path, verification.tree.tokens
        counts = verification.num_nodes.on(device), verification.prefix_lengths.on(device)
        self.pending = Entries(*self.run(self.newest, *nodes, *counts, *self.pending))

    def newest(
        self,
        hidden: torch.Tensor,
        path: torch.Tensor,
        nodes: torch.Tensor,
        counts: torch.Tensor,
        lengths: torch.Tensor,
        *before: torch.Tensor,
    ) -> Tensors:
        """Return the [`Entries`] of the kept nodes. The token of the last one is the next root, and not part of them.

        Rows that kept none keep those `before`.

        Args:
            hidden (`torch.Tensor` of shape `(B, N, layers * hidden)`): The target's states at the nodes.
            path (`torch.LongTensor` of shape `(B, M)`): Kept nodes.
            nodes (`torch.LongTensor` of shape `(B, N)`): Tokens of the nodes.
            counts (`torch.LongTensor` of shape `(B,)`): Number of kept nodes.
            lengths (`torch.LongTensor` of shape `(B,)`): Position of the root.
        """
        path = torch.nn.functional.pad(path, (0, self.most_new - path.shape[1]))
        tokens = nodes.gather(1, path).roll(-1, 1).to(self.device)
        path, counts, lengths = (
            path.to(hidden.device),
            counts[:, None].to(self.device),
            lengths[:, None].to(self.device),
        )
        aux_hidden_states = hidden.gather(1, path[..., None].expand(-1, -1, hidden.shape[2])).to(
            self.device, self.dtype
        )
        places = torch.arange(self.most_new, device=self.device)
        positions = torch.where(places < counts, lengths + places, -1)
        newest, grew = (aux_hidden_states, tokens, positions, (counts - 1).clamp_min(0)), counts > 0
        masks = grew[..., None], grew, grew, grew
        return tuple(torch.where(*three) for three in zip(masks, newest, before, strict=True))

    def inputs(self, root: torch.Tensor) -> Tensors:
        """Return the roots `(B,)`, and the entries that the draft stores first."""
        assert self.pending is not None
        return root, *self.pending

    def begin(self, inputs: Tensors, prefix: None) -> Tensors:
        """Return the entries with the root as the last token; cosines and sines of the levels after the last entry."""
        root, aux_hidden_states, tokens, positions, last = inputs
        tokens = tokens.scatter(1, last, root[:, None].to(tokens.device))
        positions_of_levels = positions.gather(1, last) + torch.arange(len(self.widths), device=self.device)
        angles = self.rotary(aux_hidden_states, positions_of_levels)
        return aux_hidden_states, tokens, positions, last, positions_of_levels, *angles

    @property
    def key(self) -> tuple:
        return *super().key, self.most_new, *(ring.size for ring in self.rings)

    def _read(self, prompts: PromptAuxHiddenStates, texts: Sequence[torch.Tensor]) -> None:
        rows = [(row, entries) for row in range(len(texts)) if (entries := prompts.of_row(row)) is not None]
        if not rows:
            return
        width = max(len(positions) for _, (positions, _) in rows)
        first = rows[0][1][1]
        aux_hidden_states = first.new_zeros(len(texts), width, first.shape[-1])
        tokens = torch.zeros(len(texts), width, dtype=torch.long, device=first.device)
        places = torch.full_like(tokens, -1)
        for row, (positions, states) in rows:
            text = texts[row].to(first.device)
            usable = int((positions < len(text) - 1).sum())  # the token after the last one is not part of the text
            positions = positions[:usable]
            aux_hidden_states[row, :usable], places[row, :usable] = states[:usable], positions
            tokens[row, :usable] = text[positions + 1]
        self.remember(aux_hidden_states, tokens.to(self.device), places.to(self.device))


class Nodes(NamedTuple):
    """The newest level of a beam, of `n` nodes among the `N` so far."""

    states: torch.Tensor  # `(B, n, hidden)`: state of each node's parent
    tokens: torch.Tensor  # `(B, n)`
    ancestor_mask: torch.Tensor  # `(B, n, N)`
    position: torch.Tensor  # `(B, 1)`: position of the level
    cos: torch.Tensor  # `(B, 1, D)`: cosines of it
    sin: torch.Tensor  # `(B, 1, D)`: sines of it
    seen: Tensors  # `(B, 1, slots + 1)` each: what nodes see of every ring, and of the root


class StepwiseAuxDrafter(AuxDrafter):
    """Base of drafters whose layers run once for each level, on the states of the level above.

    Subclasses implement `enter` and `next_level`.
    """

    def level_inputs(self, beam: Beam, depth: int, shared: Tensors, states: Sequence[torch.Tensor]) -> Tensors:
        if not depth:
            return shared[:4]
        of_level = (part[:, depth : depth + 1] for part in shared[4:])
        return self.of_parents(beam, states[0]), beam.tokens, beam.ancestor_mask, *of_level, *states[1:]

    def level(self, changing: Tensors, depth: int, prefix: None) -> Tensors:
        """Return logits `(B, n, draft vocabulary)` and states `(B, n, hidden)` after the newest level of a beam.

        The first level also returns what nodes see of every ring.
        """
        if not depth:
            return self.first_level(*changing)
        states, tokens, ancestor_mask, position, cos, sin, *seen = changing
        return self.next_level(Nodes(states, tokens, ancestor_mask, position, cos, sin, tuple(seen)))

    def remember(self, aux_hidden_states: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor) -> None:
        self.enter(aux_hidden_states, tokens, positions, positions[:, :0])

    def first_level(
        self, aux_hidden_states: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, last: torch.Tensor
    ) -> Tensors:
        """Store entries; return logits `(B, 1, draft vocabulary)` and state `(B, 1, hidden)` after the last one.

        What the nodes of the tree see of every ring follows.
        """
        outputs, states = self.enter(aux_hidden_states, tokens, positions, last)
        end = positions.gather(1, last)
        # The window does not move while drafting. The root's entry is a committed one, so its node is not seen.
        seen = (torch.nn.functional.pad(ring.visible(end), (0, 1)) for ring in self.rings)
        return self.head(outputs), states, *seen

    def enter(
        self, aux_hidden_states: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, query_places: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store entries in the rings; return outputs and states `(B, n, hidden)` at `query_places` `(B, n)`."""
        raise NotImplementedError

    def next_level(self, nodes: Nodes) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits `(B, n, draft vocabulary)` and states `(B, n, hidden)` after the newest level of a beam."""
        raise NotImplementedError

    def stage(self, index: int, nodes: Nodes, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Store keys and values of nodes in a ring, and return the mask `(B, n, slots + N)` of what they see of it."""
        mask = nodes.ancestor_mask
        self.rings[index].stage(keys, values, mask.shape[2] - mask.shape[1])
        return self.with_ancestors(nodes.seen[index], mask[:, :, 1:])  # the root is in `seen`
