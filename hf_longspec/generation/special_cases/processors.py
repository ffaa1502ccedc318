"""Logits processors of which it is not known that their calls are independent.

Such a processor may keep state anywhere, or look at all rows of a batch, and no examination of it can be complete. A
verification therefore calls it exactly as plain `generate` does: once for every emitted token, in order, with the text
before it and the scores of all rows. Rows of a batch emit equally many tokens in a step then, and rows that have ended
go on with padding. A draft ranks its candidates without it.

Known are processors of transformers, and those that declare `stateless`, `history_free` or `history_window`.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    PrefixConstrainedLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.utils import logging

from ...attention_backends.lengths import SeqLens, on_device
from ..call import PROCESSORS, Call
from ..decoding import Session
from ..draft_tree import DraftTree
from ..drafter import DrafterAround, Verification
from ..sampling import TokenRule, declared, is_history_free, is_of_transformers
from ..special_case import SpecialCase
from ..target import Step
from ..verification import Acceptance

logger = logging.get_logger(__name__)

# Attributes by which a processor says that its result for a row depends on this row alone, and on no other call.
DECLARATIONS = ("stateless", "history_window", "is_grammar")
# Processors of transformers whose result for a row depends on its text and scores alone.
STATELESS = {
    "EncoderNoRepeatNGramLogitsProcessor",
    "EncoderRepetitionPenaltyLogitsProcessor",
    "ExponentialDecayLengthPenalty",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "NoBadWordsLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "RepetitionPenaltyLogitsProcessor",
    "SequenceBiasLogitsProcessor",
    "SuppressTokensAtBeginLogitsProcessor",
    "WatermarkLogitsProcessor",
}


def is_known(processor: Any) -> bool:
    """Return whether the result of a processor for a row depends on its text, its scores and its number alone."""
    if type(processor) is PrefixConstrainedLogitsProcessor:  # runs a function of the user
        return bool(declared(processor._prefix_allowed_tokens_fn, "stateless"))
    if declared(processor, "stateless") is False:
        return False
    is_declared = any(declared(processor, name) for name in DECLARATIONS)
    return is_declared or is_history_free(processor) or is_of_transformers(processor, STATELESS)


class ColumnRule(TokenRule):
    """A rule that processes scores column by column along the accepted path, and emits each column before the next.

    Drafts rank their candidates by the processors that are known.

    Attributes:
        processor_seconds (`float`): Time on the host of all processors.
        num_processed_nodes (`int`): Number of columns.
    """

    fits_graphs = False  # processors that are not known run on the host
    takes_drawn_tokens = False

    def __init__(self, processors: LogitsProcessorList, *arguments: Any):
        super().__init__(LogitsProcessorList(filter(is_known, processors)), *arguments)
        self._all = processors
        self._columns: list[torch.Tensor] = []  # scores of all columns so far, if they are wanted

    def accept(
        self, tree: DraftTree, logits: torch.Tensor, with_scores: bool = False
    ) -> tuple[Acceptance, torch.Tensor | None]:
        """Accept equally many nodes in every row, up to the first that is refused or ends a row."""
        rows = torch.arange(logits.shape[0], device=logits.device)
        is_done = on_device(self.sequences.done, rows.device).bool()
        node = torch.zeros_like(rows)
        path, emitted, scores = list[torch.Tensor](), list[torch.Tensor](), list[torch.Tensor]()
        while True:
            scores.append(self._of_column(logits[rows, node]))
            token = self.choose(scores[-1], len(path))
            token = token.masked_fill(is_done, self.sequences.pad_token_id)
            path.append(node)
            emitted.append(token)
            self._columns += scores[-1:] if with_scores else []
            goes_on = self.sequences.emit_column(token.tolist(), self._scores_of if with_scores else None)
            children = (tree.parents == node[:, None]) & (tree.tokens == token[:, None]) & tree.valid
            if not goes_on or len(path) > tree.max_depth or not bool(children.any(1).all()):
                break
            node = children.int().argmax(1)  # the first child that has the token
        missing = tree.max_depth + 1 - len(path)
        count = torch.full_like(node, len(path))
        tokens = torch.stack(emitted + [torch.zeros_like(node)] * missing, 1)
        return Acceptance(torch.stack(path + [node] * missing, 1), count, tokens), torch.stack(scores, 1)

    def _scores_of(self, sequences: Any, count: int) -> tuple[torch.Tensor, ...]:
        """Return the scores `(batch, vocab)` of the first `count` columns, for stopping criteria."""
        return tuple(self._columns[:count])

    def _of_column(self, raw: torch.Tensor) -> torch.Tensor:
        """Return what all processors make of logits `(batch, vocab)` after the emitted texts."""
        started, sequences = time.perf_counter(), self.sequences
        texts = sequences.tokens[:, : max(sequences.lengths)].clone()  # plain `generate` makes a tensor for each column
        scores = self._all(texts, raw.to(torch.float32, copy=True))
        self.processor_seconds += time.perf_counter() - started
        self.num_processed_nodes += 1
        return scores


class PaddingDrafter(DrafterAround):
    """Replace the trees of rows that have ended by chains of padding. All else is that of another drafter."""

    def __init__(self, inner: Any, sequences: Any):
        super().__init__(inner)
        self._sequences = sequences

    def propose(self, root: torch.Tensor) -> DraftTree:
        """Return the tree of the other drafter after `root` `(batch,)`, in rows that grow."""
        tree = self.inner.propose(root)
        if any(self._sequences.done):
            places = torch.arange(tree.num_nodes, device=root.device)
            is_done = on_device(self._sequences.done, root.device).bool()[:, None]
            valid = places <= tree.max_depth
            tokens = tree.tokens.masked_fill(is_done & (places > 0), self._sequences.pad_token_id)
            parents = torch.where(is_done, torch.where(valid, places - 1, 0), tree.parents)
            padded = replace(tree, tokens=tokens, parents=parents, valid=torch.where(is_done, valid, tree.valid))
            self._proposed = padded, tree
            return padded
        return tree


class ColumnSession(Session):
    """A call of several rows under a [`ColumnRule`]. Rows that have ended go on with padding, as in `generate`."""

    def emit(self, tree: DraftTree, step: Step, is_counted: bool = True) -> Verification:
        """Emit tokens; see [`Session.emit`]. Rows that had ended keep as many nodes as the others."""
        done = self.sequences.done.copy()
        verification = super().emit(tree, step, is_counted)
        if not any(done):
            return verification
        count = max(verification.num_nodes.host)
        padding = [self.sequences.pad_token_id] * count
        tokens = [padding if was_done else row for row, was_done in zip(verification.tokens, done, strict=True)]
        return replace(verification, num_nodes=SeqLens.of([count] * len(done)), tokens=tokens)


class Processors(SpecialCase):
    """Logits processors whose result may depend on more than the scores."""

    case = PROCESSORS

    def change(self, call: Call) -> None:
        """Call processors of which nothing is known column by column."""
        unknown = [type(one).__name__ for one in call.logits_processor if not is_known(one)]
        if not unknown:
            return
        logger.info(
            "%s: called as by generate() without a draft, once for each token, since it declares nothing. The draft "
            "leaves it out. If its result for a row depends on the text, scores and number of the row alone, set its "
            "attribute stateless = True, so that more drafted tokens are accepted.",
            " and ".join(unknown),
        )
        call.rule_class = ColumnRule
        if len(call.tokens) > 1:
            call.session_class = ColumnSession

    def drafter(self, inner: Any, session: Any) -> Any:
        """Return a drafter whose rows grow together, if the processors need that."""
        return PaddingDrafter(inner, session.sequences) if isinstance(session, ColumnSession) else inner

    def why_not(self, call: Call) -> Iterator[str]:
        for processor in call.logits_processor:
            if isinstance(processor, UnbatchedClassifierFreeGuidanceLogitsProcessor):
                name = type(processor).__name__
                yield f"{name} runs the target. Drop it, or the setting that adds it."
