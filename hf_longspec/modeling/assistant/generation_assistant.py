"""Draft chains and trees with another causal language model, which has a cache of its own.

The draft keeps the keys of the accepted nodes. The deepest node of a tree was never its input, so each iteration begins
with the last committed token and the root. With a window, the cache holds the first and the last tokens of the text,
and the cost of a step does not grow with the text. This is the draft of MagicDec
(https://huggingface.co/papers/2408.11049) with StreamingLLM's selection and a model of its own.

A model that was trained with PARD (https://huggingface.co/papers/2504.18583) proposes all tokens of a chain in one
forward: `num_assistant_tokens - 1` mask tokens follow the root, and the logits after the root and each mask propose the
tokens of the chain. Keys of masks are dropped, so the next forward begins with the tokens that were accepted.

The recurrent states of a hybrid draft cannot drop a rejected token. They are kept after the root, and the next forward
begins with the tokens that were accepted, likewise. Within one proposal a chain moves them on token by token, and a
level of a tree is run together with the levels before it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad
from transformers.generation.candidate_generator import AssistantToTargetTranslator

from ...attention_backends.contexts import LevelContext, TreeContext
from ...attention_backends.lengths import SeqLens, on_device
from ...generation.cache import CACHE_NAME
from ...generation.draft_tree import Beam, DraftTree
from ...generation.drafter import Binding, Drafter, Verification, drafted_tokens, last_of, noise_of_chain
from ...generation.special_cases.recurrences import ignores_earlier_states
from ...generation.target import Forward, Forwards, TargetView
from ..shared.sparse_caches import WindowedCache

# Tokens that one forward runs to catch up with a text that grew without the draft.
CATCH_UP = 64

Shape = int | list[int]


def size_of(shape: Shape) -> tuple[int, int]:
    """Return the number of nodes of a chain or a tree, root included, and its depth.

    >>> size_of(3), size_of([4, 2])
    ((4, 3), (7, 2))
    """
    return (shape + 1, shape) if isinstance(shape, int) else (sum(shape) + 1, len(shape))


class Inputs(NamedTuple):
    """What a chain or a tree is drafted from, on the draft's device."""

    root: torch.Tensor  # `(B,)`: the last emitted tokens
    pending: torch.Tensor  # `(B, P)`: committed tokens that are no input of the draft yet
    last_position: torch.Tensor  # `(1,)`: the last position that any token may have
    counts: torch.Tensor | None = None  # `(B,)`: number of pending tokens, unless it is one in every row
    dropped: torch.Tensor | None = None  # `(B,)`: number of tokens that a windowed cache has dropped

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Those that there are, which change from one run of a graph to the next."""
        return tuple(part for part in self if part is not None)


@dataclass
class Translation:
    """The tokens of a draft model with another tokenizer.

    Source: https://huggingface.co/papers/2502.05202, algorithm 4.
    """

    tokens: torch.Tensor  # `(vocab,)`: the draft's token for each token of the target
    # `(vocab,)`: whether the two are the same. Otherwise the draft's one is the last of those that the text of the
    # target's token has, and is read, but not proposed.
    shared: torch.Tensor

    @classmethod
    def between(cls, target: Any, assistant: Any, vocab_size: int, num_embeddings: int) -> "Translation":
        """Return the translation between the tokenizers of a target and a draft.

        Args:
            vocab_size (`int`): Size of the target's vocabulary.
            num_embeddings (`int`): Number of tokens that the draft can read.

        Raises:
            ValueError: If they share no token.
        """
        pairs = AssistantToTargetTranslator(target, assistant, vocab_size).target_to_assistant_input_ids
        pairs = {own: other for own, other in pairs.items() if own < vocab_size and other < num_embeddings}
        if not pairs:
            raise ValueError(
                "the tokenizers of the draft and the target share no token. Use a draft of the target's family."
            )
        texts = target.batch_decode([[token] for token in range(min(vocab_size, len(target)))])
        pieces = assistant(texts, add_special_tokens=False)["input_ids"]
        read = [piece[-1] if piece and piece[-1] < num_embeddings else 0 for piece in pieces]
        read += [0] * (vocab_size - len(read))  # padding of the vocabulary
        tokens = torch.tensor([pairs.get(token, other) for token, other in enumerate(read)])
        return cls(tokens, torch.tensor([token in pairs for token in range(vocab_size)]))

    def to(self, device: torch.device) -> "Translation":
        return Translation(self.tokens.to(device), self.shared.to(device))


class AssistantDrafter(Drafter):
    """Draft chains or trees with a causal language model.

    Args:
        assistant ([`TargetView`]): The model that drafts.
        draft (`AssistantDraftModel`): The draft, whose settings are read.
    """

    def __init__(self, binding: Binding, assistant: TargetView, draft: Any):
        super().__init__(binding)
        self.assistant = assistant
        self.window, self.mask_token = draft.setting("window"), draft.config.pard_token
        self.translation: Translation | None = draft.translation
        self.chunk_size = draft.setting("prefill_chunk_size")
        self.is_drawn = draft.draws_tokens and (binding.rule is None or binding.rule.takes_drawn_tokens)
        self.shape: Shape = draft.shape()
        self.num_nodes, self.max_depth = size_of(self.shape)
        self.largest = [1] * self.shape if isinstance(self.shape, int) else self.shape
        embedding = assistant.model.get_input_embeddings().weight
        self.device, self.num_embeddings = assistant.model.device, embedding.shape[0]
        self.tells = isinstance(self.shape, int) and self.device.type == "cpu" and assistant.steps.runner is None
        self.coupling = binding.coupling()
        slots = max(CATCH_UP, 2 * self.num_nodes)
        shape = binding.cache.batch_size, binding.max_length, slots, self.window, draft.setting("sinks")
        self.cache: WindowedCache = binding.part(
            (WindowedCache, assistant.model, *shape), lambda: WindowedCache(assistant.config, *shape)
        )
        self.cache.reset()
        self._is_switched = False
        self._proposed_chain, self._start = True, self.cache.lengths  # the last proposal, and the lengths before it
        # Committed tokens that are no input of the draft yet, and their number: one in every row unless `_is_ragged`.
        self.pending = torch.zeros(binding.cache.batch_size, 0, dtype=torch.long, device=self.device)
        self.counts = SeqLens.equal(0, binding.cache.batch_size)
        # Its windows, found before a graph is captured.
        self._windows = assistant.windows

    @cached_property
    def level_cost(self) -> float:  # type: ignore[override]
        """Weights of the draft as a share of those of the target."""
        own, target = self.assistant.model.parameters(), self.binding.target.model.parameters()
        return sum(map(torch.numel, own)) / sum(map(torch.numel, target))

    @property
    def state_bytes(self) -> int:
        return self.cache.nbytes

    @contextmanager
    def attention(self) -> Iterator[None]:
        """Run the draft on this package's attention while the context is open."""
        if self._is_switched:
            yield
            return
        with self.assistant.attention():
            self._is_switched = True
            try:
                yield
            finally:
                self._is_switched = False

    def start(self, texts: Sequence[torch.Tensor], verification: Verification) -> None:
        """Run the tokens that were committed without the draft, or the prompts. The last one waits for the root."""
        with self.attention(), torch.no_grad():
            texts = [text.to(self.device) for text in texts]
            missing = [len(text) - length for text, length in zip(texts, self.cache.positions, strict=True)]
            if not max(self.cache.lengths.host) or max(missing) > (self.window or max(map(len, texts))):
                self._prefill(texts)
            else:
                self._catch_up(texts)
        last = torch.stack([text[-1] for text in texts])[:, None]
        # steps have one width from the first one on
        self.pending = pad(last, (0, max(self.max_depth, self.ngram_depth) - 1)) if self._is_ragged else last
        # none where states have the last token already
        pairs = zip(texts, self.cache.positions, strict=True)
        self.counts = SeqLens([max(0, len(text) - held) for text, held in pairs])

    @property
    def _is_ragged(self) -> bool:
        """Whether rows have different numbers of pending tokens: masks follow the root, or others propose nodes.

        Also with states, which are kept after the root alone.
        """
        return self.mask_token is not None or self.ngram_depth > 0 or self.assistant.has_states

    def propose(self, root: torch.Tensor) -> DraftTree:
        widths, start, rule = self.widths_now, self.cache.lengths, self.binding.rule
        self.shape = shape = len(widths) if isinstance(self.shape, int) else list(widths)
        counts = self.counts.on(self.device) if self._is_ragged else None
        dropped = None if self.window is None else self.cache.dropped.on(self.device)
        inputs = Inputs(root.to(self.device), self.pending, self._last_position, counts, dropped)
        with self.attention():
            if isinstance(shape, int):
                noise = noise_of_chain(self.binding, shape, self.is_drawn)
                with_q = self.is_drawn and noise is not None
                fits, key = rule is None or rule.fits_graphs, () if rule is None else rule.key
                changing = inputs.tensors if noise is None else (*inputs.tensors, noise)
                chain = self._captured(Chained(self, key, with_q), fits, changing)
                if chain is None:
                    after = self._chain(self._forward, start, inputs, shape)
                    chain = drafted_tokens(
                        rule, root, shape, lambda *where: after(*where).to(root.device), noise, with_q, self.asked
                    )
                    self.shape = chain[0].shape[1] - 1
                tree = DraftTree.chain(chain[0], q=chain[1])
            else:
                known = self.coupling.known(len(shape))
                grown = Grown(self, self.coupling.key)
                fields = self._captured(grown, self.coupling.fits_graphs, (*inputs.tensors, *known))
                if fields is None:
                    fields = self._beam(self._forward, start, inputs, known, shape, root)
                tree = DraftTree.of_fields(fields, len(shape))
        if self.assistant.has_states and not self.cache.rows.staged and self.cache.lengths is start:
            self.cache.set_lengths(start.plus(self.counts).plus(1))  # a graph has left the states of the root
        elif self.assistant.has_states:
            self.cache.go_back()  # to the root
        else:  # pending tokens are committed; the nodes stay after them, in their order, until the next step
            self._start, self.cache.rows.lengths = start, start.plus(self.counts if self._is_ragged else 1)
        self._proposed_chain = isinstance(shape, int)
        return tree

    def inputs_of(self, changing: Sequence[torch.Tensor]) -> tuple[Inputs, Sequence[torch.Tensor]]:
        """Return the inputs whose [`Inputs.tensors`] come first, and what follows them."""
        names = ["root", "pending", "last_position"]
        names += ["counts"] * self._is_ragged + ["dropped"] * (self.window is not None)
        return Inputs(**dict(zip(names, changing, strict=False))), changing[len(names) :]

    def _captured(self, forwards: Forwards, fits: bool, inputs: tuple[torch.Tensor, ...]) -> Any:
        """Return the result of forwards by one graph; `None` if they cannot be captured."""
        if not fits or any(x.device != self.device for x in inputs):
            return None
        room = self.pending.shape[1] + self.num_nodes
        self._make_room(room)
        return self.assistant.steps.forwards(forwards, self.cache, room, *inputs, may_compile=False)

    def row_states(self) -> Sequence[torch.Tensor]:
        return (self.pending,)

    def take(self, row: int, other: Any, of: int = 0) -> None:
        super().take(row, other, of)
        self.cache.take_row(row, other.cache, of)
        counts = list(self.counts.host)
        counts[row] = other.counts.host[of]
        self.counts = SeqLens(counts)

    def observe(self, verification: Verification) -> None:
        """Keep the keys of accepted nodes that were an input, and remember the tokens that were none."""
        (self._keep_root if self._is_ragged else self._keep_nodes)(verification)
        self.cache.trim()

    def _keep_nodes(self, verification: Verification) -> None:
        """Keep all accepted nodes. The last one, which may never have been an input, is run again."""
        assert verification.tree is not None
        counts = verification.num_nodes
        if self._proposed_chain:  # the pending token and all nodes but the last one
            self.cache.rows.lengths = self._start
            self.cache.commit(None, counts)
        else:
            self.cache.commit(verification.path.to(self.device), counts)
            self.cache.rows.lengths = self.cache.lengths.plus(-1)
        inputs = verification.tree.tokens, verification.path, counts.on(verification.path.device), self.pending
        self.pending = self.assistant.run(_last_tokens, self.cache, *(x.to(self.device) for x in inputs))

    def _keep_root(self, verification: Verification) -> None:
        """Keep the root alone: masks follow it, or nodes that others proposed are on the path."""
        assert verification.tree is not None
        counts = verification.num_nodes
        inputs = (x.to(self.device) for x in (verification.tree.tokens, verification.path, counts.on(self.device)))
        width = self.pending.shape[1]
        self.pending, after, root = self.assistant.run(_after_root, self.cache, *inputs, width=width)
        self.counts = SeqLens([max(count - 1, 0) for count in counts.host], after)
        if not self.assistant.has_states:
            self.cache.commit(None, SeqLens([int(count > 0) for count in counts.host], root))

    def _chain(
        self, forward: Forward, start: SeqLens, inputs: Inputs, count: int
    ) -> Callable[[int, torch.Tensor], torch.Tensor]:
        """Return the function of a depth and of the tokens `(B,)` there to the logits `(B, vocab)` that follow.

        It runs one forward for each token, or one for all with PARD.
        """
        masks = 0 if self.mask_token is None else count - 1
        first, prefix = self._first(forward, start, inputs, masks)

        def logits_after(depth: int, token: torch.Tensor) -> torch.Tensor:
            if masks or not depth:
                return first[:, depth]
            here = prefix.plus(depth)  # all tokens before the newest one are its prefix
            logits = self._run_chain(forward, here, inputs, token.to(self.device)[:, None])
            if self.assistant.has_states and here.host:  # a graph keeps a lone node at once
                self.cache.commit(None, SeqLens.equal(1, len(token)))
            return self._of_target(logits)[:, 0]

        return logits_after

    def _beam(
        self,
        forward: Forward,
        start: SeqLens,
        inputs: Inputs,
        known: Sequence[torch.Tensor],
        widths: Sequence[int],
        root: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Return the [`DraftTree.fields`] of a beam after `root` on its device, one forward for each level."""
        beam = Beam(root, 1 + sum(widths))
        logits, prefix = self._first(forward, start, inputs, 0)
        for depth, width in enumerate(widths):
            if depth:
                logits = self._level(forward, prefix.plus(1), inputs, beam)
            beam.grow(self.coupling.scores(logits.to(root.device), known, depth, beam.paths), width)
        return beam.fields()

    def _first(self, forward: Any, start: SeqLens, inputs: Inputs, masks: int) -> tuple[torch.Tensor, SeqLens]:
        """Run pending tokens, root and masks; return logits `(B, 1 + masks, V)` from the root on, and its slots."""
        root, pending, counts = inputs.root[:, None], inputs.pending, inputs.counts
        mask_token = self.mask_token or 0
        if counts is None:
            logits = self._run_chain(forward, start, inputs, torch.cat([pending, root], 1))
            return self._of_target(logits[:, -1:]), start.plus(1)
        padded = pad(pending, (0, 1 + masks), value=mask_token)
        first, places = counts[:, None], torch.arange(padded.shape[1], device=self.device)
        tokens = torch.where(places < first, padded, torch.where(places == first, root, mask_token))
        logits = self._run_chain(forward, start, inputs, tokens)
        if self.assistant.has_states:
            if start.host:
                self.cache.commit(None, self.counts.plus(1))
                self.cache.remember()
            else:  # inside a graph
                forward.keep_root(counts + 1)
        root_and_masks = first + torch.arange(1 + masks, device=self.device)
        prefix = start.plus(self.counts) if start.host else _grown(start, counts, pending.shape[1])
        return self._of_target(logits.gather(1, root_and_masks[..., None].expand(-1, -1, logits.shape[-1]))), prefix

    def _run_chain(self, forward: Forward, start: SeqLens, inputs: Inputs, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits `(B, N, V)` of a chain that is staged from `start` on. Padding comes last in a row."""
        places = torch.arange(tokens.shape[1], device=self.device)
        mask = (places[:, None] >= places).expand(len(tokens), -1, -1)
        slots = start.on(self.device)[:, None] + places
        context = TreeContext(start, slots, mask, windows=self._windows)
        return forward(self._known(tokens), self._positions(slots, inputs), mask[:, None], context, start)

    def _level(self, forward: Forward, prefix: SeqLens, inputs: Inputs, beam: Beam) -> torch.Tensor:
        """Run the newest level of a tree after `prefix`, root included; return its logits `(B, n, V)`."""
        tokens, mask = beam.tokens.to(self.device), beam.ancestor_mask[:, :, 1:].to(self.device)
        more: dict[str, Any] = {}
        if self.assistant.has_states:  # those after earlier levels are not kept
            tokens, parents, *fields, mask = (x[:, 1:].to(self.device) for x in beam.fields())
            mask = mask[:, :, 1:]
            more = {"tree": DraftTree.of_fields((tokens, parents - 1, *fields, mask), len(beam.levels))}
        depths = torch.cat([torch.full_like(level, depth) for depth, level in enumerate(beam.levels[1:])], 1)
        node_slots = prefix.on(self.device)[:, None] + depths.to(self.device)
        slots = node_slots[:, -mask.shape[1] :]
        context = LevelContext(prefix, slots, mask, windows=self._windows, node_positions=node_slots)
        start = prefix.plus(mask.shape[2] - mask.shape[1])
        positions = self._positions(slots, inputs)
        logits = forward(self._known(tokens), positions, mask[:, None], context, start, **more)
        return self._of_target(logits[:, -beam.tokens.shape[1] :])

    def _positions(self, slots: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        """Return the positions of nodes that would lie in `slots` if the cache were the text so far."""
        if inputs.dropped is not None:
            slots = slots + inputs.dropped[:, None]
        return torch.minimum(slots, inputs.last_position)

    def _forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor,
        context: Any,
        start: SeqLens,
        is_fixed: bool = True,
        tree: DraftTree | None = None,
    ) -> torch.Tensor:
        """Run one step of the draft by itself, a chain by default; a [`Forward`]."""
        self.cache.rows.lengths = start
        self._make_room(tokens.shape[1])
        if tree is None and self.assistant.has_states:
            tree = DraftTree.chain(tokens)
        self.cache.stage(tokens.shape[1], tree)
        return self.assistant.step(tokens, positions, self.cache, mask, context, is_fixed)[0]

    def _make_room(self, nodes: int) -> None:
        if nodes > self.cache.tree_slots:
            self.cache.reserve(self.cache.most, nodes)

    @cached_property
    def _last_position(self) -> torch.Tensor:
        """The last position that any token may have; a model with a table of positions has none beyond its end."""
        last = self.binding.max_length - 1
        if not any("rotary_emb" in name for name, _ in self.assistant.model.named_modules()):
            last = min(last, (getattr(self.assistant.config, "max_position_embeddings", None) or last + 1) - 1)
        return on_device([last], self.device)

    def _known(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the draft's tokens; those beyond its vocabulary, which are padding of the target's, are replaced."""
        if self.translation is not None:
            return self.translation.tokens[tokens]
        if self.num_embeddings >= self.binding.target.vocab_size:
            return tokens
        return tokens.clamp_max(self.num_embeddings - 1)

    def _of_target(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits over the target's vocabulary; with one tokenizer, the two differ by padding."""
        if self.translation is not None:
            return logits[..., self.translation.tokens].masked_fill(~self.translation.shared, -torch.inf)
        missing = self.binding.target.vocab_size - logits.shape[-1]
        if not missing:
            return logits
        return pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits[..., :missing]

    def _prefill(self, texts: Sequence[torch.Tensor]) -> None:
        """Run whole texts but for their last tokens, or their sinks and last windows, under the draft's own masks."""
        self.cache.rollback()
        self.cache.reset()
        positions = [self.cache.kept_of(len(text) - 1) for text in texts]
        has_states = self.assistant.has_states
        width = min(map(len, positions)) if has_states else max(map(len, positions))  # states have no padding
        places = on_device([row[:width] + [0] * (width - len(row)) for row in positions], self.device)
        tokens = torch.stack([text[row] for text, row in zip(texts, places, strict=True)])
        extra = self.assistant.keeping(torch.zeros(1, dtype=torch.long, device=self.device))
        places = torch.minimum(places, self._last_position)
        is_whole = has_states and ignores_earlier_states(self.assistant.model)
        size = max(1, width) if is_whole else self.chunk_size
        for begin in range(0, width, size):
            chunk = slice(begin, begin + size)
            self.assistant.model(
                input_ids=self._known(tokens[:, chunk]),
                position_ids=places[:, chunk],
                **{CACHE_NAME: self.cache},
                use_cache=True,
                **extra,
            )
        self.cache.dropped = SeqLens([len(text) - 1 - len(row) for text, row in zip(texts, positions, strict=True)])
        self.cache.set_lengths([min(width, len(row)) for row in positions])
        if has_states:
            self._catch_up(texts)

    def _catch_up(self, texts: Sequence[torch.Tensor]) -> None:
        """Run the tokens that are missing but for the last one, a chain of at most `CATCH_UP` at a time."""
        if not self.assistant.has_states:
            pairs = zip(self.cache.lengths.host, texts, self.cache.positions, strict=True)
            # the last one is run again
            self.cache.set_lengths([held + min(0, len(text) - 1 - place) for held, text, place in pairs])
        while True:
            begun = zip(texts, self.cache.positions, strict=True)
            rows = [text[start : max(start, min(start + CATCH_UP, len(text) - 1))] for text, start in begun]
            if not any(counts := list(map(len, rows))):
                return
            tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
            dropped = self.cache.dropped.on(self.device)
            inputs = Inputs(tokens[:, 0], tokens, self._last_position, dropped=dropped)
            self._run_chain(partial(self._forward, is_fixed=False), self.cache.lengths, inputs, tokens)
            self.cache.commit(None, counts)
            self.cache.trim()


@dataclass(eq=False)
class Grown(Forwards):
    """A tree in one graph, from [`Inputs.tensors`] and what the coupling knows."""

    drafter: AssistantDrafter
    of_rule: tuple  # key of the rule

    @property
    def key(self) -> tuple:
        drafter = self.drafter
        shape = drafter.shape if isinstance(drafter.shape, int) else tuple(drafter.shape)
        return shape, drafter._is_ragged, drafter.mask_token, drafter.window is None, drafter._windows, self.of_rule

    def run(self, forward: Forward, starts: Sequence[SeqLens], *inputs: torch.Tensor) -> Any:
        drafter, (known, more) = self.drafter, self.drafter.inputs_of(inputs)
        assert not isinstance(drafter.shape, int)
        return drafter._beam(forward, starts[0], known, more, drafter.shape, known.root)


@dataclass(eq=False)
class Chained(Grown):
    """A chain in one graph, from [`Inputs.tensors`] and noise."""

    with_q: bool

    @property
    def key(self) -> tuple:
        return *super().key, self.with_q

    def run(self, forward: Forward, starts: Sequence[SeqLens], *inputs: torch.Tensor) -> Any:
        drafter, (known, more) = self.drafter, self.drafter.inputs_of(inputs)
        assert isinstance(drafter.shape, int)
        after, noise = drafter._chain(forward, starts[0], known, drafter.shape), more[0] if more else None
        return drafted_tokens(drafter.binding.rule, known.root, drafter.shape, after, noise, self.with_q)


def _last_tokens(tokens: torch.Tensor, path: torch.Tensor, counts: torch.Tensor, pending: torch.Tensor) -> torch.Tensor:
    """Return the last committed token of every row, and the pending one of rows that have ended."""
    last = tokens.gather(1, last_of(path, counts)[:, None])
    return torch.where(counts[:, None] > 0, last, pending[:, :1])


def _after_root(
    tokens: torch.Tensor, path: torch.Tensor, counts: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the committed tokens after the root, padded to `width`, their number, and that of the root."""
    on_path = tokens.gather(1, path)[:, 1 : 1 + width]
    return pad(on_path, (0, width - on_path.shape[1])), (counts - 1).clamp_min(0), counts.clamp_max(1)


def _grown(lengths: SeqLens, counts: torch.Tensor, most: int) -> SeqLens:
    """Return the sums of lengths and counts, which are at most `most`, inside a graph."""
    grown = SeqLens(None, lengths.on(counts.device) + counts)
    grown.longest = lengths.longest + most
    return grown
