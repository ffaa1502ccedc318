"""The loop over slots: rows of one batch that requests take and leave, each with its own sequences and token rule.

A request begins as a [`RowSession`], a call of one row with a cache of its own: its prompt is read in chunks, and its
first token emitted. Then [`SlotSession`], the loop of all rows, takes its keys, its drafter's state and its root into a
slot. Sequences and token rules stay those of the request, so that its text does not depend on the rows beside it: each
row is stopped, streamed and sampled as a batch of one. Rows whose tokens are chosen alike are processed together.

A slot without a request holds a text of one token, whose row emits nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch

from ..attention_backends.lengths import SeqLens
from ..generation.cache import SpeculativeCache
from ..generation.call import PACKED, Call, CallCache
from ..generation.decoding import Session
from ..generation.draft_tree import DraftTree
from ..generation.drafter import Binding, Drafter, Verification
from ..generation.sampling import NoiseRows, TokenRule, warped
from ..generation.sequences import SpeculationStats
from ..generation.special_case import GATE, SPECIAL_CASES
from ..generation.special_cases.grammar import ForcedDrafter, HostTree, is_grammar, make_room
from ..generation.target import TargetView
from ..generation.verification import Acceptance
from ..prefix_cache import PrefixCache, copied_states


class LentCache(CallCache):
    """The cache of a call that is lent to it, and holds what earlier texts have of its prompt `(1, P)`."""

    is_users = True

    def __init__(self, cache: SpeculativeCache, tokens: torch.Tensor, prefixes: PrefixCache | None):
        self.cache, self.tokens, self.prefixes = cache, tokens, prefixes

    def past_lengths(self, mask: torch.Tensor) -> list[int]:
        """Fill the cache, and return the number of its tokens."""
        self.cache.reset()
        if self.prefixes is not None:
            self.prefixes.take(self.tokens, self.cache)
        return self.cache.counts

    def open(self, call: Call, nodes: int, earlier: SpeculativeCache | None) -> SpeculativeCache:
        """Return the cache."""
        return self.cache


class RowSession(Session):
    """The call of one request, up to the slot that it takes.

    Args:
        call ([`Call`]): A call of one row, which can use the draft, with a [`LentCache`].
        max_length (`int`): Most tokens of a row of the loop, which may be more than those of the request.
        source (`torch.Generator`, *optional*): From which the noise of the request is seeded; by default torch's own.
        on_logits (`Callable`, *optional*): See [`Batcher.submit`].

    Attributes:
        error (`BaseException`, *optional*): What ended the request.
        states (`dict[int, dict[str, torch.Tensor]]`): Recurrent states after some numbers of tokens of the prompt.
    """

    joined_at = 0.0, 0.0  # times of the loop when the request took its slot

    def __init__(self, call: Call, max_length: int, source: torch.Generator | None = None, on_logits: Any = None):
        self.error: BaseException | None = None
        self.states: dict[int, dict[str, torch.Tensor]] = {}
        self._source, self._limit = source, call.max_length
        call.max_length = max_length
        super().__init__(call)
        self.on_logits = on_logits
        self.outputs: Any = SlotOutputs([self])
        self.coupling = self.rule.coupling()
        self.grammar = next(filter(is_grammar, self.rule.processors), None)

    def make_drafter(self, binding: Binding) -> Drafter:
        """Return a drafter whose state fits that of the loop, which appends forced tokens itself and has the gate."""
        drafter: Drafter = self.draft.drafter(binding)
        make_room(drafter, self.call.more_nodes)
        return drafter

    def make_rows(self, input_ids: torch.Tensor) -> tuple[Any, Any]:
        """Return sequences with the limit of the request, and a token rule with its seed."""
        self.max_length = self._limit
        sequences, rule = super().make_rows(input_ids)
        self.max_length = self.call.max_length
        if self._source is not None and rule.noise is not None:
            rule.noise = NoiseRows(1, self.target.vocab_size, input_ids.device, source=self._source)
        return sequences, rule

    def read(self, chunk_size: int) -> Iterator[list[torch.Tensor]]:
        """Run the prompt, a chunk for each item, which is what is left: its last tokens, after the last chunk.

        Prompts of targets with recurrent states are one chunk, as chunks would change their states, unless these are
        stored after each.
        """
        (text,), (start,), prompts = self.prompts.texts, self.past_lengths, self.prompts
        stop = len(text) - prompts.tails(self.seed_tokens)[0]
        prefixes = cast(LentCache, self.call.store).prefixes
        ends: Sequence[int] = range(start + chunk_size, stop, chunk_size)
        if self.target.has_states:
            ends = [] if prefixes is None else prefixes.ends(start, stop, chunk_size)
        for end in (*ends, stop):
            with self.drafter.watch_prefill([len(text)], self.past_lengths, [0]):
                prompts.run(self.cache, [text[start:end]])
            self.cache.set_lengths([end])
            start = end
            if end < stop:
                if self.target.has_states:
                    self.states[end] = copied_states(self.cache)
                yield []
        self.check_once()
        yield [text[stop:]]

    @contextmanager
    def alone(self) -> Iterator[None]:
        """End this request, and no other one, by an error in the context."""
        try:
            yield
        except BaseException as error:  # of processors, criteria and streamers, which may raise anything
            self.error, self.sequences.done = error, [True]

    def append(self, tokens: Sequence[int]) -> int:
        """Emit tokens up to the stop of the row, and return their number."""
        count = 0
        with self.alone():
            count = self.sequences.append([tokens])[0]
        return count

    def result(self) -> torch.Tensor:
        """End the stream, complete the statistics, and return prompt and continuation `(1, length)`."""
        self.sequences.end()
        self.complete_stats()
        return self.sequences.output()


# `None` in a free slot.
Slots = list[Any]


class SlotSequences:
    """The sequences of all slots, as the loop uses [`Sequences`]."""

    def __init__(self, slots: Slots, device: torch.device):
        self.slots, self.device = slots, device

    @property
    def done(self) -> list[bool]:
        return [slot is None or slot.sequences.finished for slot in self.slots]

    @property
    def finished(self) -> bool:
        return all(self.done)

    @property
    def generated(self) -> list[Any]:
        """Generated tokens of each row; none of a free slot."""
        return [() if slot is None else slot.sequences.generated[0] for slot in self.slots]

    def append(self, accepted: Sequence[Sequence[int]], scores: Any = None) -> list[int]:
        """Emit the tokens of each row up to its stop, and return how many each row emitted."""
        rows = zip(self.slots, accepted, strict=True)
        return [slot.append(tokens) if slot is not None and tokens else 0 for slot, tokens in rows]


class SlotOutputs:
    """What is told of the tokens of requests beside the tokens, as the loop uses [`Outputs`]."""

    wants_scores = False

    def __init__(self, slots: Slots):
        self.slots = slots

    def keep(self, scores: Any, logits: torch.Tensor, path: torch.Tensor, counts: list[int]) -> None:
        """Tell each request that wants them the logits of the tokens that a step has accepted."""
        for row, (slot, count) in enumerate(zip(self.slots, counts, strict=True)):
            if count and slot is not None and slot.on_logits is not None:
                with slot.alone():
                    slot.on_logits(logits[row].index_select(0, path[row, :count].to(logits.device)))


class SlotRule:
    """The token rules of all slots, as the loop and drafters use a [`TokenRule`], its noise and its [`Coupling`].

    What differs between rows is computed row by row, and nothing of it is part of a graph.
    """

    fits_graphs = is_made_of_tensors = is_plain = False
    takes_drawn_tokens = True
    key: tuple = ()

    def __init__(self, slots: Slots, sequences: SlotSequences, vocab_size: int):
        self.slots, self.sequences, self.vocab_size = slots, sequences, vocab_size
        # the last tree of the drafter, as it was read for grammars
        self.host_tree: tuple[DraftTree | None, HostTree] = None, []

    @property
    def live(self) -> list[tuple[int, RowSession]]:
        """The rows that grow, and their requests."""
        return [(row, slot) for row, slot in enumerate(self.slots) if slot is not None and not slot.sequences.finished]

    @property
    def shared(self) -> TokenRule | None:
        """The rule of one row, if those of all rows that grow process every node of a tree alike.

        Processors that may raise anything are called row by row, so that a row fails alone.
        """
        rules = [slot.rule for _, slot in self.live]
        if not rules or any(not rule.fits_graphs or rule.key != rules[0].key for rule in rules):
            return None
        return rules[0]

    @property
    def history_free(self) -> bool:
        return self.shared is not None

    @property
    def processors(self) -> Any:
        """The processors of all rows, if they are the same."""
        return () if (shared := self.shared) is None else shared.processors

    @property
    def do_sample(self) -> bool:
        return any(slot.rule.do_sample for _, slot in self.live)

    @property
    def noise(self) -> "SlotRule":
        return self

    @property
    def device(self) -> torch.device:
        return self.sequences.device

    def rows(self, count: int) -> torch.Tensor:
        """Return the noise `(batch, count, vocab)` of the next `count` tokens; 1, which changes no score, if greedy."""
        return self._noise(lambda noise: noise.rows(count), 0, (1, count, self.vocab_size))

    def draw(self, count: int) -> torch.Tensor:
        """Return noise `(count, batch, vocab)` that is not tied to a position, likewise."""
        return self._noise(lambda noise: noise.draw(count), 1, (count, 1, self.vocab_size))

    def _noise(self, of: Callable[[Any], torch.Tensor], dim: int, shape: tuple[int, ...]) -> torch.Tensor:
        live, none = dict(self.live), torch.ones(shape, device=self.device)
        rows = range(len(self.slots))
        sampled = (live[row].rule.noise if row in live else None for row in rows)
        return torch.cat([none if noise is None else of(noise) for noise in sampled], dim)

    def coupling(self) -> "SlotRule":
        """Return what ranks candidates by the rules of the rows."""
        return self

    def known(self, depths: int) -> tuple[torch.Tensor, ...]:
        """Return the noise `(B, depths, V)`, if the rows share their rule and sample."""
        return (self.rows(depths),) if (shared := self.shared) is not None and shared.do_sample else ()

    def scores(self, logits: torch.Tensor, known: Sequence[torch.Tensor], depth: int, paths: Any) -> torch.Tensor:
        """Return the scores of [`Coupling.scores`], `(B, n, V)`, of each row by its own rule."""
        live = self.live
        if not live:
            return logits
        logits = logits.to(self.device)
        if self.shared is not None:
            return live[0][1].coupling.scores(logits, known, depth, paths)
        tokens = paths() if callable(paths) else paths
        scores = logits.float().expand(-1, tokens.shape[1], -1).clone()
        for row, slot in live:
            one = slice(row, row + 1)
            with slot.alone():
                scores[one] = slot.coupling.scores(logits[one], slot.coupling.known(depth + 1), depth, tokens[one])
        return scores

    def try_out(self, depth: int, tokens: torch.Tensor) -> None:
        """Write candidates `(batch,)` after the texts; see [`TokenRule.try_out`]."""
        for row, slot in self.live:
            with slot.alone():
                slot.rule.try_out(depth, tokens[row : row + 1])

    def scores_at(self, raw: torch.Tensor, depth: int) -> torch.Tensor:
        """Return processed scores `(batch, vocab)`; see [`TokenRule.scores_at`]."""
        scores = raw.float().clone()
        for row, slot in self.live:
            with slot.alone():
                scores[row] = slot.rule.scores_at(raw[row : row + 1], depth)[0]
        return scores

    def accept(
        self, tree: DraftTree, logits: torch.Tensor, with_scores: bool = False
    ) -> tuple[Acceptance, torch.Tensor | None]:
        """Accept the nodes of each row by its own rule. A row that does not grow, or fails, keeps node 0."""
        shared = self.shared
        if shared is not None and (tree.q is None or not shared.do_sample):
            draws = (self.rows(tree.max_depth + 1),) if shared.do_sample else ()
            return shared.accept_scored(tree, warped(shared.processors, logits), *draws), None
        path = torch.zeros(len(logits), tree.max_depth + 1, dtype=torch.long, device=logits.device)
        whole = Acceptance(path, path[:, 0] + 1, path.clone())
        for row, slot in self.live:
            one = slice(row, row + 1)
            with slot.alone():
                q = None if tree.q is None else tree.q[one]
                of_row = replace(tree, tokens=tree.tokens[one], parents=tree.parents[one], valid=tree.valid[one], q=q)
                if self.host_tree[0] is tree:
                    slot.rule.host_tree = of_row, [field[one] for field in self.host_tree[1]]
                found = slot.rule.accept(of_row, logits[one])[0]
                for name in ("path", "num_nodes", "tokens"):
                    getattr(whole, name)[one] = getattr(found, name)
        return whole, None

    def advance(self, counts: Sequence[int]) -> None:
        """Advance the noise of each row by the number of tokens that it emitted."""
        for slot, count in zip(self.slots, counts, strict=True):
            if slot is not None:
                with slot.alone():
                    slot.rule.advance([count])


class SlotDrafter(ForcedDrafter):
    """Append the tokens that the grammar of each request forces."""

    def __init__(self, inner: Drafter, slots: Slots, rule: SlotRule, count: int):
        super().__init__(inner, rule, None, count)
        self._slots = slots

    def grammar_of(self, row: int) -> tuple[Any, Any, int] | None:
        """Return the rule of a request, its grammar, and 0, its only row."""
        slot = self._slots[row]
        return None if slot is None or slot.grammar is None else (slot.rule, slot.grammar, 0)

    def _forced(self, row: int, *fields: list[int]) -> tuple[list[list[int]], int]:
        if self._slots[row] is not None:
            with self._slots[row].alone():
                return super()._forced(row, *fields)
        return [[], [], []], 0


class SlotStats(SpeculationStats):
    """Statistics of the loop: steps are counted for the requests that took part in them."""

    slots: Slots

    def record(self, emitted: Sequence[int], drafted: Sequence[int] | None, ngrams: Sequence[int]) -> None:
        """Count one verification; see [`SpeculationStats.record`]."""
        for row, slot in enumerate(self.slots):
            if slot is not None and emitted[row]:
                one = slice(row, row + 1)
                slot.stats.record(emitted[one], None if drafted is None else drafted[one], ngrams[one])


class SlotSession(Session):
    """The loop over slots.

    Args:
        call ([`Call`]): A call with a text of one token for each slot.
        empty ([`Call`]): A call with one such text, which free slots hold.

    Attributes:
        slots (`list[RowSession | None]`): The request in each slot; `None` in a free one.
        lent ([`SpeculativeCache`]): The cache of the request whose prompt is read.
    """

    gated: Any = None  # the drafter, if it has a gate

    def __init__(self, call: Call, empty: Call):
        super().__init__(call)
        self.outputs: Any = SlotOutputs(self.slots)
        tails = self.prefill()
        with self.attention():
            self.seed(tails)
        config = self.target.config
        empty.store = LentCache(SpeculativeCache(config, 1, 1, self.cache.tree_slots), empty.tokens, None)
        self.free = RowSession(empty, self.max_length)
        (tails,) = self.free.read(1)
        with self.attention(), self.free.drafter.attention():
            self.free.seed(tails)
            for row in range(len(self.slots)):
                self.put(row, None)
        self.lent = SpeculativeCache(config, 1, self.max_length, self.cache.tree_slots)
        self._made_for = self._present(TargetView(self.target.model))  # which the first steps may have changed

    def _present(self, target: TargetView) -> tuple:
        """Return the target as it is now, and the types of what the caches hold, which steps in wider types widen."""
        model, held = target.model, (self.cache.entries(), self.lent.entries())
        types = {entry.dtype for entries in held for entry in entries.values()}
        return target.known, model.dtype, model.device, types

    def fits(self, target: TargetView, forced: int) -> bool:
        """Return whether a request may join: trees have room for `forced` tokens, and the target has not changed."""
        return forced <= self.call.more_nodes and self._present(target) == self._made_for

    def make_drafter(self, binding: Binding) -> Any:
        """Return a gated drafter that appends forced tokens, if there is room for them."""
        drafter, count = self.draft.drafter(binding), self.call.more_nodes
        drafter = SlotDrafter(drafter, self.slots, self.rule, count) if count else drafter
        if PACKED in self.call.special_cases:
            drafter = SPECIAL_CASES[PACKED].drafter(drafter, self)
        if not self.draft.setting("gate"):
            return drafter
        gated = SPECIAL_CASES[GATE].drafter(drafter, self)
        self.gated = None if gated is drafter else gated
        return gated

    def make_rows(self, input_ids: torch.Tensor) -> tuple[Any, Any]:
        """Return the sequences and the token rules of slots that are free."""
        self.slots: Slots = [None] * len(input_ids)
        self.stats = SlotStats(method=self.stats.method)
        self.stats.slots = self.slots
        sequences = SlotSequences(self.slots, input_ids.device)
        return sequences, SlotRule(self.slots, sequences, self.target.vocab_size)

    @contextmanager
    def attention(self) -> Iterator[None]:
        """Return the context of all steps, and of the first token of a request."""
        with self.target.attention(), self.drafter.attention():
            yield

    def put(self, row: int, one: RowSession | None, source: Any = None, of: int = 0) -> None:
        """Let a request take a slot, or nothing. Its state is that of its session, or in slot `of` of another loop."""
        source = source or one or self.free
        self.cache.take_row(row, source.cache, of)
        self.drafter.take(row, source.drafter, of)
        root = source.root[of : of + 1].to(self.root.device)
        self.root = self.root.index_copy(0, torch.tensor([row], device=root.device), root)
        self.slots[row] = one
        if one is not None:
            one.joined_at = self.stats.draft_seconds, self.stats.verify_seconds
            if source is one:
                one.stats.draft_state_bytes = one.drafter.state_bytes
                one.drafter = None  # its state was copied

    def num_committed(self, tree: DraftTree, verification: Verification) -> SeqLens:
        """Return how many nodes each row commits; none where a request has ended, whose text may be stored."""
        return verification.num_nodes

    def settle(self) -> None:
        """Let the drafter know all that was emitted, so that its state is that of the texts."""
        if self.gated is not None and not self.gated.is_ready and not self.sequences.finished:
            self.gated.is_awaited = True
            self.iterate()
            self.gated.is_awaited = False

    def hand_over(self, row: int, other: "SlotSession", place: int) -> None:
        """Let the request of a slot go on in a slot of another loop, after [`SlotSession.settle`]. This one ends."""
        other.put(place, self.timed(row), self, row)

    def cache_of(self, row: int) -> SpeculativeCache:
        """Return a cache of one row, which shares the tensors of the loop's until it is written to."""
        entries = {name: entry[row : row + 1] for name, entry in self.cache.entries().items()}
        return self.cache.holding(self.target.config, entries, [self.cache.counts[row]])

    def timed(self, row: int) -> Any:
        """Return the request in a slot, with its part of the times."""
        one = self.slots[row]
        drafted, verified = one.joined_at
        one.stats.draft_seconds += self.stats.draft_seconds - drafted
        one.stats.verify_seconds += self.stats.verify_seconds - verified
        return one
