"""Logits processors that keep state between calls, or whose result depends on more than the scores.

A verification calls them as plain `generate` does: once for every token, with the text before it, in order, and for all
rows of a batch at once. So no state is ever put back there, whatever a processor keeps, and wherever. Drafting asks
about further texts. A processor with state is copied for each drafted node there, from the copy of the node's parent.
If copies are not independent of it, tokens are drafted without it.

[`examined`] tries processors out before the first token, and finds those with state. What changes its state for the
first time later is found while the call runs ([`StatefulRule`]).
"""

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    PrefixConstrainedLogitsProcessor,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from ...attention_backends.lengths import on_device
from ..call import PROCESSORS, Call
from ..draft_tree import DraftTree
from ..sampling import TokenRule, is_history_free
from ..target import ROTARY_LIMIT
from ..target_modules import before_forward
from ..verification import Acceptance, accept_rejection
from ..wing import Wing
from .user_state import UserState, copied, random_generators

# Attributes by which a processor says that its calls do not depend on one another. `stateless=False` says the contrary.
DECLARED = ("stateless", "history_free", "history_window")
# Objects up to which the state of a processor without any is compared in every step. Of more, it is compared after
# 1, 2, 4, 8, ... steps and at the end.
MOST_WATCHED = 500


@dataclass
class Examined:
    """A processor of a call, and what is known of its state."""

    processor: Any
    has_state: bool = False
    has_copies: bool = False  # whether copies have a state of their own
    is_watched: bool = False  # whether a later call may show state
    reason: str | None = None  # why a draft cannot be used


def examined(processors: LogitsProcessorList, call: Any) -> list[Examined]:
    """Return what is known of each processor.

    A copy is called with the prompts of a [`Call`], as plain `generate` calls the processor first, once more, and with
    a token more. It has state if the first two results differ, or if the longer text changes what it holds, or random
    states. What the first call alone changes is made for all calls, such as the tensors of `sequence_bias`. What cannot
    be compared counts as state. A processor that cannot be copied is called itself, and put back; if that is not
    possible either, a draft cannot be used.
    """
    return [_examined(processor, call) for processor in processors]


def _examined(processor: Any, call: Any) -> Examined:
    found = Examined(processor)
    is_declared = is_history_free(processor) or any(getattr(processor, mark, False) for mark in DECLARED)
    if is_declared or call.max_length <= call.tokens.shape[1] + 1:  # then it is called once
        return found
    own_thread, error, runs_target = threading.get_ident(), None, False

    def refuse(*_: Any) -> None:
        nonlocal runs_target
        if threading.get_ident() == own_thread:
            runs_target = True
            raise RuntimeError("it runs the target. Drop it, or the setting that adds it")

    name, generators = type(processor).__name__, random_generators()
    state = UserState({name: processor, "random states": generators})
    tried = copied(processor)
    if tried is None and (state.unknown or state.forks):
        part = state.unknown or type(state.forks[0]).__name__
        found.reason = f"{name} reaches a {part}, whose state can neither be copied nor be compared. Keep it out of it."
        return found
    subject = {name: processor if tried is None else tried, "random states": generators}
    before = made = UserState(subject)
    ids, vocab_size = call.input_ids.long(), call.target.vocab_size
    scores = torch.linspace(-4, 4, vocab_size, device=ids.device).repeat(len(ids), 1)
    handle, differ, calls, has_copies = before_forward(call.target.model, refuse), False, 0, False
    try:
        first, calls = subject[name](ids.clone(), scores.clone()), 1
        made, has_copies = UserState(subject), tried is not None and copied(tried, is_often=True) is not None
        if not (made.forks or made.unknown):  # a matcher takes no text twice
            differ = not torch.equal(first, subject[name](ids.clone(), scores.clone()))
            made = UserState(subject)
            if (longer := _longer(ids, first, call)) is not None:
                subject[name](longer, scores.clone())
    except Exception as caught:  # a processor may raise anything
        error = caught
    finally:
        handle.remove()
        is_shared, changed = state.changed() is not None, made.restore()
        before.restore()
        state.restore()
    if error is not None and (runs_target or not calls):
        found.reason = f"{name} cannot be tried out with the prompts ({type(error).__name__}: {error})."
    is_told = getattr(processor, "stateless", None) is False
    found.has_state = bool(is_told or differ or changed or error or made.forks or made.unknown)
    found.has_copies = has_copies and error is None and not is_shared
    of_library = type(processor).__module__.startswith("transformers.")
    is_constraint = type(processor) is PrefixConstrainedLogitsProcessor
    found.is_watched = not found.has_state and (is_constraint or not of_library)
    return found


def _longer(ids: torch.Tensor, scores: torch.Tensor, call: Any) -> torch.Tensor | None:
    """Return the prompts with one token more that may follow them; `None` if plain `generate` would stop there."""
    ends = getattr(call.config, "_eos_token_tensor", None)
    if ends is not None:
        scores = scores.index_fill(1, ends[ends < scores.shape[1]].to(scores.device), -torch.inf)
    best, tokens = scores.max(1)
    if bool(best.isneginf().any()):
        return None
    return torch.cat([ids, tokens[:, None]], 1)


class StatefulRule(TokenRule):
    """A rule whose processors may keep state.

    All rows of a batch emit equally many tokens in a step then: up to the first token that is refused, or ends a text,
    in one of them. So every call has all rows, at the same column, as plain `generate` makes it.

    Attributes:
        processor_seconds (`float`): Time on the host of calls and copies.
        num_processed_nodes (`int`): Number of calls, one for each verified column and each drafted node.
    """

    def __init__(self, found: Sequence[Examined], *arguments: Any):
        super().__init__(*arguments)
        self._found = found
        self._copies: dict[tuple[int, ...], list[Any]] = {}  # processors with state after drafted tokens, by these
        self._watch: UserState | None = None
        self._steps = 0

    @property
    def has_state(self) -> bool:
        """Whether a processor has shown state so far."""
        return any(one.has_state for one in self._found)

    def scores_at(self, raw: torch.Tensor, depth: int, is_asked: Sequence[bool] | None = None) -> torch.Tensor:
        """Return processed scores of drafted tokens; see [`TokenRule.scores_at`]."""
        started, kept = time.perf_counter(), self.processors
        drafting = self._drafting(depth) if is_asked is None or any(is_asked) else []
        self.processors = LogitsProcessorList(drafting)
        try:
            return super().scores_at(raw, depth, is_asked)
        finally:
            self.processors = kept
            self._count(started)

    def _drafting(self, depth: int) -> list[Any]:
        """Return the processors that are asked about the tokens after `depth` drafted ones, copies with their states.

        Rows of a batch have other parents in one call, so that only processors without state are asked.
        """
        length, copies = self.sequences.lengths[0], None
        if self.sequences.batch_size == 1 and self.has_state:
            path = () if self._tried is None else tuple(self._tried.tokens[0, length : length + depth].tolist())
            parents = self._copies.get(path[:-1]) if depth else [one.processor for one in self._found]
            if parents is not None:
                pairs = zip(self._found, parents, strict=True)
                copies = [
                    copied(parent, is_often=True) if one.has_state and one.has_copies else None for one, parent in pairs
                ]
                self._copies[path] = copies
        copies = copies or [None] * len(self._found)
        pairs = zip(self._found, copies, strict=True)
        chosen = (copy if one.has_state else one.processor for one, copy in pairs)
        return [processor for processor in chosen if processor is not None]

    def _accept_stepwise(self, tree: DraftTree, logits: torch.Tensor) -> tuple[Acceptance, torch.Tensor]:
        started = time.perf_counter()
        self._look(was_drafting=True)
        self._copies.clear()
        is_one_by_one = self.sequences.batch_size > 1 and not self.has_state
        result = (super()._accept_stepwise if is_one_by_one else self._accept_together)(tree, logits)
        self._look()
        self._count(started, result[1].shape[1])
        return result

    def _accept_together(self, tree: DraftTree, logits: torch.Tensor) -> tuple[Acceptance, torch.Tensor]:
        """Accept equally many nodes in every row that grows, and process the scores along their paths."""
        rows = torch.arange(logits.shape[0], device=logits.device)
        growing = on_device([not is_done for is_done in self.sequences.done], rows.device).bool()
        draws, node = self.draws_for(tree), torch.zeros_like(rows)
        path, emitted, scores = [node], list[torch.Tensor](), list[torch.Tensor]()
        while True:
            depth = len(emitted)
            scores.append(self._processed_together(logits[rows, node], depth, growing))
            token = self.choose(scores[-1], depth) if tree.q is None else _drawn_by_rejection(tree, scores, *draws)
            emitted.append(token)
            children = (tree.parents == node[:, None]) & (tree.tokens == token[:, None]) & tree.valid
            goes_on = children.any(1) & ~self.sequences.ends(token)
            if depth == tree.max_depth or not any(self.can_be_asked(depth + 1)) or not bool(goes_on[growing].all()):
                break
            self.try_out(depth, token)
            node = torch.where(growing, children.int().argmax(1), node)  # the first child that has the token
            path.append(node)
        missing = tree.max_depth + 1 - len(emitted)
        path, count = path + [node] * missing, torch.full_like(node, len(emitted))
        emitted += [torch.zeros_like(node)] * missing
        return Acceptance(torch.stack(path, 1), count, torch.stack(emitted, 1)), torch.stack(scores, 1)

    def _processed_together(self, raw: torch.Tensor, depth: int, growing: torch.Tensor) -> torch.Tensor:
        """Return what the processors make of logits `(batch, vocab)` after `depth` candidates of every growing row."""
        length = self.sequences.lengths[self.sequences.done.index(False)] + depth
        texts = self.sequences.tokens[:, :length]
        if depth:  # drafted tokens may reach beyond the limit of the text, and widen what is tried
            assert self._tried is not None
            texts = torch.where(growing[:, None], self._tried.tokens[:, :length], texts)
        return self.processors(texts, raw.to(torch.float32, copy=True))

    def advance(self, counts: Sequence[int]) -> None:
        super().advance(counts)
        if self.sequences.finished:
            self._look(is_last=True)

    def _look(self, was_drafting: bool = False, is_last: bool = False) -> None:
        """Compare the state of processors that had none with that after the first step.

        What drafting has changed is put back, if it is compared in every step.

        Raises:
            RuntimeError: If a change comes too late, as rows are not at the same column, or earlier steps were not
                compared.
        """
        watched = {type(one.processor).__name__: one.processor for one in self._found if one.is_watched}
        if not watched:
            return
        if self._watch is None:
            self._watch = None if was_drafting else UserState(watched)
            return
        self._steps += not was_drafting
        is_small = len(self._watch) <= MOST_WATCHED
        if not (is_small or is_last or (not was_drafting and self._steps & (self._steps - 1) == 0)):
            return
        changed = self._watch.restore() if was_drafting else self._watch.changed()
        if changed is None:
            return
        if self.sequences.batch_size > 1 or not is_small:
            raise RuntimeError(
                f"{changed} changed after some tokens: a logits processor that kept no state at first keeps state "
                "now, so that the text may be wrong. Set its attribute stateless to False, or pass one prompt."
            )
        for one in self._found:
            one.has_state, one.is_watched = one.has_state or one.is_watched, False

    def _count(self, started: float, nodes: int = 1) -> None:
        self.processor_seconds += time.perf_counter() - started
        self.num_processed_nodes += nodes


def _drawn_by_rejection(tree: DraftTree, scores: list[torch.Tensor], uniforms: Any, noise: Any) -> torch.Tensor:
    """Return the tokens `(batch,)` that [`accept_rejection`] emits after a chain of accepted nodes, by their scores."""
    assert tree.q is not None
    nodes = slice(len(scores) - 1, len(scores) + 1)  # the last accepted one, and the next if there is one
    chain = DraftTree.chain(tree.tokens[:, nodes], tree.valid[:, nodes], tree.q[:, nodes])
    # scores of the next node decide only what follows it
    of_nodes = torch.stack([scores[-1]] * chain.num_nodes, 1)
    return accept_rejection(
        chain, of_nodes, uniforms[:, nodes.start : nodes.start + chain.num_nodes - 1], noise
    ).tokens[:, 0]


class Processors(Wing):
    """Logits processors whose result may depend on more than the scores."""

    case = PROCESSORS

    def why_not(self, call: Call) -> Iterator[str]:
        found = examined(call.logits_processor, call)
        yield from (f"{one.reason} A draft adds calls, for drafted tokens." for one in found if one.reason)
        if any(one.has_state for one in found) and len(call.tokens) > 1:
            names = " and ".join(type(one.processor).__name__ for one in found if one.has_state)
            if ROTARY_LIMIT in call.rare:
                yield f"{names} keeps state, and rows may wait where the rotary frequencies change. Pass one prompt."
            if not all(type(one) in (EosTokenCriteria, MaxLengthCriteria) for one in call.stopping_criteria):
                yield f"{names} keeps state, and stopping criteria may end rows. Pass one prompt, or drop them."
        if any(one.has_state or one.is_watched for one in found):
            call.rule_class = partial(StatefulRule, found)
