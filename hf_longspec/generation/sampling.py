"""From raw logits to the target's choice: processors, noise, and drafts that are ranked by both.

[`TokenRule`] processes the logits of every node with the node's own prefix and takes the argmax or draws one token.
[`Coupling`] ranks candidates as the target would choose them if the draft's logits were its own. The target's choice
depends on its logits, on the processors and, when it samples, on the noise of the position. The last two are known
while drafting. A draft that applies both proposes the very token that the target will draw whenever the two
distributions agree. The target's choice does not depend on the draft, so the distribution of the text, and the text
for a given seed, stay the same. https://huggingface.co/papers/2408.07978 bounds the acceptance of one such draw; here
all candidates of a tree are ranked this way.
"""

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation import logits_process
from transformers.generation.logits_process import (
    LogitsProcessor,
    LogitsProcessorList,
    PrefixConstrainedLogitsProcessor,
)

from ..attention_backends.lengths import on_device
from .draft_tree import DraftTree
from .sequences import Sequences, TextBuffer
from .target import FixedStep, TargetView
from .verification import (
    Acceptance,
    accept_greedy,
    accept_rejection,
    accept_sampled,
    along_path,
    draw_noise,
    drawn,
    packed,
    perturbed_log_probs,
    walk_lazily,
)

# Processors whose result depends on the logits of one position only, so that they may run on all nodes at once.
# A custom processor of this kind declares `history_free = True`. A processor that depends on the last tokens only
# declares `history_window`, their number. Its cost then does not grow with the text, and it may be called with any
# number of rows of `history_window` tokens, one for each node.
HISTORY_FREE = {
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "InfNanRemoveLogitsProcessor",
    "LogitNormalization",
    "MinPLogitsWarper",
    "SuppressTokensLogitsProcessor",
    "TemperatureLogitsWarper",
    "TopHLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "TypicalLogitsWarper",
}
# Processors that compute with tensors and numbers alone, so that they can be part of a graph, as can
# [`ContextualPenaltyLogitsProcessor`].
IN_GRAPHS = {"TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper"}


def declared(processor: Any, name: str) -> Any:
    """Return what a processor declares by the attribute `name`; `None` if nothing.

    A class declares it for its own `__call__`, and not for that of a subclass.
    """
    if name not in getattr(processor, "__dict__", ()):
        for cls in type(processor).__mro__:
            if name in vars(cls):
                break
            if "__call__" in vars(cls):
                return None
    return getattr(processor, name, None)


def is_of_transformers(processor: Any, names: set[str]) -> bool:
    """Return whether a processor is of one of these classes of transformers, as they are, with plain attributes."""
    kind: Any = type(processor)
    if kind.__name__ not in names or vars(logits_process).get(kind.__name__) != kind:
        return False
    values = vars(processor).values()
    packages = {type(one).__module__.split(".")[0] for one in values}
    is_plain = packages <= {"builtins", "torch"} and not any(map(callable, values))
    return is_plain and getattr(kind.__call__, "__globals__", None) is vars(logits_process)


def is_history_free(processor: Any) -> bool:
    """Return whether the result of a processor depends on the scores alone."""
    return bool(declared(processor, "history_free")) or is_of_transformers(processor, HISTORY_FREE)


def is_made_of_tensors(processor: Any) -> bool:
    """Return whether a processor can be part of a graph."""
    return type(processor) is ContextualPenaltyLogitsProcessor or is_of_transformers(processor, IN_GRAPHS)


def longest_window(processors: LogitsProcessorList) -> int | None:
    """Return the number of last tokens that the processors depend on; `None` if one may depend on all."""
    longest = 1  # some processors read the batch size from the tokens
    for processor in processors:
        if not is_history_free(processor):
            window = declared(processor, "history_window")
            if window is None:
                return None
            longest = max(longest, window)
    return longest


class ContextualPenaltyLogitsProcessor(LogitsProcessor):
    """Repetition penalty over the last `window` tokens, prompt included. A repeated id is penalised only once.

    TokenSwift's contextual penalty, https://huggingface.co/papers/2502.18890, section 3.4 and Eq. 3. In a text of
    100,000 tokens nearly every token has occurred, so a penalty on all of them has no effect.

    A positive score is divided by the penalty and a negative one multiplied, as in transformers'
    `RepetitionPenaltyLogitsProcessor` (CTRL, https://huggingface.co/papers/1909.05858). A call touches at most `window`
    scores of each row. With a draft, every node of the tree is penalised by the window that ends at that node.

    The window is a part of the `input_ids` of `generate`, which contain the left padding of a batch. While padding is
    in the window, the padding id is penalised. Pass `pad_token_id` if the padding id is a token that the model may
    emit, such as the end of the text.

    Args:
        penalty (`float`): Values above 1 make repetition less likely, values below 1 more likely.
        window (`int`): Number of last tokens in which a repetition counts, at least 1.
        pad_token_id (`int`, *optional*):
            Id that is never penalised. If it is the padding id, a row's scores do not depend on its padding.

    >>> processor = ContextualPenaltyLogitsProcessor(penalty=2.0, window=2)
    >>> processor(torch.tensor([[0, 1, 2]]), torch.tensor([[8.0, 8.0, -8.0, 8.0]])).tolist()
    [[8.0, 4.0, -16.0, 8.0]]
    """

    def __init__(self, penalty: float, window: int, pad_token_id: int | None = None):
        if isinstance(penalty, bool) or not isinstance(penalty, int | float) or not 0 < penalty < math.inf:
            raise ValueError(f"penalty={penalty!r}: expected a number above 0. 1.0 is no penalty; 1.2 is usual.")
        if isinstance(window, bool) or not isinstance(window, int) or window < 1:
            raise ValueError(
                f"window={window!r}: expected a number of tokens of at least 1. To penalise the whole text, use "
                "generate(repetition_penalty=...)."
            )
        if pad_token_id is not None and (not isinstance(pad_token_id, int) or pad_token_id < 0):
            raise ValueError(f"pad_token_id={pad_token_id!r}: expected a token id, or None to penalise every token.")
        self.penalty = penalty
        self.window = window
        self.pad_token_id = pad_token_id

    @property
    def history_window(self) -> int:
        """Number of last tokens that a call needs; the decoding loop passes only these."""
        return self.window

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return a penalised copy of `scores` `(batch, vocab)` that follow `input_ids` `(batch, length)`."""
        # one extra column for ids without a logit, as some embeddings are larger than the head
        copy = torch.nn.functional.pad(scores, (0, 1))
        recent = input_ids[:, -self.window :].clamp_max(scores.shape[1])
        seen = copy.gather(1, recent)
        penalised = torch.where(seen < 0, seen * self.penalty, seen / self.penalty)
        if self.pad_token_id is not None:
            penalised = torch.where(recent == self.pad_token_id, seen, penalised)
        # an id that occurs twice is written twice with the same value
        return copy.scatter_(1, recent, penalised)[:, :-1]


# Rows of noise that are drawn at once. Fewer would be more launches on a GPU, more would be wasted by short texts.
BLOCK = 8


class NoiseRows:
    """Noise for sampling: row t of a batch row decides its t-th generated token.

    Every batch row has its own generator, seeded from `source`, by default torch's own, and draws its noise rows in the
    order of its positions. Rows that a step did not use are kept. The sampled text therefore depends on the seed alone,
    not on the draft tree, the other rows or where a rejection happened.
    """

    def __init__(
        self,
        batch_size: int,
        vocab_size: int,
        device: torch.device,
        ranks: Any = None,
        source: torch.Generator | None = None,
    ):
        seeds = torch.randint(2**62, (batch_size + 1,), generator=source).tolist()
        if ranks is not None:
            seeds = ranks.first(seeds)
        self.vocab_size = vocab_size
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seeds[0])  # of draws that are not tied to a position
        self._generators = [torch.Generator(device).manual_seed(seed) for seed in seeds[1:]]
        self._noise: list[list[torch.Tensor]] = [[] for _ in range(batch_size)]

    def rows(self, count: int) -> torch.Tensor:
        """Return the noise `(batch, count, vocab)` of the next `count` tokens of every row. Do not write to it."""
        for generator, of_row in zip(self._generators, self._noise, strict=True):
            # Blocks of one size: on a GPU the random numbers depend on the size of the draw, which must not depend on
            # the step.
            while len(of_row) < count:
                of_row += draw_noise(BLOCK, self.vocab_size, generator=generator, device=self.device).unbind()
        rows = [noise for of_row in self._noise for noise in of_row[:count]]
        noise = rows[0] if len(rows) == 1 else torch.stack(rows)
        return noise.view(-1, count, self.vocab_size)

    def draw(self, count: int) -> torch.Tensor:
        """Return noise `(count, batch, vocab)` that is not tied to a position."""
        shape = count, len(self._generators), self.vocab_size
        return draw_noise(*shape, generator=self.generator, device=self.device)

    def advance(self, counts: Sequence[int]) -> None:
        """Forget the noise of tokens that have been emitted."""
        for of_row, count in zip(self._noise, counts, strict=True):
            del of_row[:count]


class TokenRule:
    """Choose tokens as the target does, and accept the nodes of a draft tree under this rule.

    Attributes:
        processor_seconds (`float`): Time on the host of processors with state and of grammars.
        num_processed_nodes (`int`): Number of their nodes.
    """

    processor_seconds = 0.0
    num_processed_nodes = 0
    # whether tokens that a draft has drawn are accepted by rejection; otherwise it ranks them by the target's noise
    takes_drawn_tokens = True

    def __init__(self, processors: LogitsProcessorList, do_sample: bool, sequences: Sequences, noise: NoiseRows | None):
        self.processors = processors
        self.do_sample = do_sample
        self.sequences = sequences
        self.noise: Any = noise
        self.history_free = all(is_history_free(processor) for processor in processors)
        self.history_window = longest_window(processors)
        # whether every processor may be asked about texts that plain decoding does not reach
        self.takes_any_text = all(is_history_free(one) or is_made_of_tensors(one) for one in processors)
        # whether the processors may be part of a graph, and the settings that such a graph depends on
        self.is_made_of_tensors = all(map(is_made_of_tensors, processors))
        settings = ((type(processor), *vars(processor).items()) for processor in processors)
        self.key = (do_sample, *settings) if self.is_made_of_tensors else ()
        # texts with candidates after them, made when they are needed
        self._tried: TextBuffer | None = None

    def coupling(self) -> "Coupling":
        """Return what ranks candidates by this rule."""
        return Coupling(self)

    def scores_at(self, raw: torch.Tensor, depth: int, is_asked: Sequence[bool] | None = None) -> torch.Tensor:
        """Return processed scores `(batch, vocab)` of logits at `depth` places after the last emitted token.

        Write the tokens in between with [`TokenRule.try_out`] first. Processors are not asked about texts that plain
        decoding cannot reach: of rows that have ended, as long as the limit, or that `is_asked` (one value per row)
        leaves out; by default those with an end token in between. Such rows keep raw scores.
        """
        raw = raw.float()
        if not self.processors:
            return raw
        scores = raw.clone()
        for length, rows in self._asked_rows(depth, is_asked).items():
            start = 0 if self.history_window is None else max(0, length - self.history_window)
            ids = self._texts_of(rows, start, length, depth)
            if len(rows) == len(raw):
                return self.processors(ids, scores)
            index = on_device(rows, raw.device)
            scores[index] = self._processed(ids, raw, rows)[index]
        return scores

    def _asked_rows(self, depth: int, is_asked: Sequence[bool] | None) -> dict[int, list[int]]:
        """Return the rows that processors are asked about, by the length of their texts with `depth` candidates."""
        lengths, groups = self.sequences.lengths, defaultdict[int, list[int]](list)
        if is_asked is None:
            is_asked = [True] * len(lengths)
            if depth:
                assert self._tried is not None
                places = on_device([range(length, length + depth) for length in lengths], self.sequences.device)
                is_asked = (~self.sequences.ends(self._tried.tokens.gather(1, places)).any(1)).tolist()
        for row, can_be in enumerate(self.can_be_asked(depth)):
            if can_be and is_asked[row]:
                groups[lengths[row] + depth].append(row)
        return groups

    def can_be_asked(self, depth: int) -> list[bool]:
        """Return for each row whether plain decoding may process scores at `depth` places after its last token."""
        ends = zip(self.sequences.lengths, self.sequences.done, strict=True)
        return [not is_done and length + depth < self.sequences.max_length for length, is_done in ends]

    def _texts_of(self, rows: list[int], start: int, end: int, depth: int) -> torch.Tensor:
        """Return the columns `start` to `end` of a batch in which `rows` have `depth` candidates at their ends.

        Processors get the whole batch, as some have a parameter for each row. The other rows have the text of one of
        `rows`.
        """
        texts = self._tried.tokens if depth and self._tried is not None else self.sequences.tokens
        sources = [row if row in rows else rows[0] for row in range(self.sequences.batch_size)]
        return texts[on_device(sources, texts.device), start:end]

    def _processed(self, ids: torch.Tensor, scores: torch.Tensor, rows: list[int]) -> torch.Tensor:
        """Process scores of a batch of which only `rows` count. A constraint per row is asked about these alone."""
        index = on_device(rows, scores.device)
        for processor in self.processors:
            if type(processor) is PrefixConstrainedLogitsProcessor:
                allowed, own = processor._prefix_allowed_tokens_fn, copy.copy(processor)
                own._prefix_allowed_tokens_fn = lambda place, text, ask=allowed: ask(rows[place], text)
                scores = scores.index_copy(0, index, own(ids[index], scores[index]))
            else:
                scores = processor(ids, scores)
        return scores

    def try_out(self, depth: int, tokens: torch.Tensor) -> None:
        """Write candidate tokens `(batch,)` at `depth` places after the emitted ones, as input of processors.

        They are written to a copy of the texts, which is made once per call and gets the tokens of every step. The
        emitted tokens themselves are never followed by candidates.
        """
        if self._tried is None:
            self._tried = self.sequences.buffer.copy()
        self._tried.read()
        self._tried.write([length + depth for length in self.sequences.lengths], tokens)

    def scores_of_level(self, logits: torch.Tensor, paths: torch.Tensor, is_asked: torch.Tensor) -> torch.Tensor:
        """Return processed scores of logits `(B, n, V)` after drafted tokens `paths` `(B, n, depth)`.

        Paths that cannot be accepted, of which `is_asked` `(B, n)` is False, keep raw scores.
        """
        scores = []
        for raw, path, can_be in zip(logits.unbind(1), paths.unbind(1), is_asked.T.tolist(), strict=True):
            for depth, tokens in enumerate(path.unbind(1)):
                self.try_out(depth, tokens)
            scores.append(self.scores_at(raw, path.shape[1], can_be))
        return torch.stack(scores, 1)

    def choose(self, scores: torch.Tensor, depth: int = 0) -> torch.Tensor:
        """Return the token `(batch,)` that the rule chooses by `scores`, with the noise row of `depth`.

        It is -1 if none can be drawn.
        """
        if not self.do_sample:
            return scores.argmax(-1)
        return drawn(scores, self.noise.rows(depth + 1)[:, depth])

    def accept(
        self, tree: DraftTree, logits: torch.Tensor, with_scores: bool = False
    ) -> tuple[Acceptance, torch.Tensor | None]:
        """Accept nodes by raw logits `(batch, N, vocab)`, up to the first token that the target does not choose.

        With `with_scores`, return also the processed scores `(batch, M, vocab)` along the path.
        """
        texts = None
        if not self.history_free:
            recent = self.recent() if tree.is_chain and self.takes_any_text else None
            if recent is None:
                acceptance, scores = self._accept_stepwise(tree, logits)
                return acceptance, scores if with_scores else None
            texts = torch.cat([recent, tree.tokens[:, 1:]], 1).unfold(1, recent.shape[1], 1)
        scores = warped(self.processors, logits, texts)
        acceptance = self.accept_scored(tree, scores, *self.draws_for(tree))
        return acceptance, along_path(scores, acceptance.path) if with_scores else None

    def draws_for(self, tree: DraftTree) -> tuple[torch.Tensor, ...]:
        """Return the random numbers that the acceptance of a tree depends on; none if the rule is greedy.

        The noise `(batch, max_depth + 1, vocab)` of the next tokens if candidates are coupled. Uniform numbers
        `(batch, N - 1)` and noise `(batch, vocab)` for a tree with `q`.
        """
        if not self.do_sample:
            return ()
        if tree.q is None:
            return (self.noise.rows(tree.max_depth + 1),)
        (batch_size, num_nodes, vocab_size), device = tree.q.shape, tree.q.device
        generator = self.noise.generator
        uniforms = torch.empty(batch_size, num_nodes - 1, device=device).uniform_(generator=generator)
        return uniforms, draw_noise(batch_size, vocab_size, generator=generator, device=device)

    def accept_scored(self, tree: DraftTree, scores: torch.Tensor, *draws: torch.Tensor) -> Acceptance:
        """Accept the nodes of a tree by processed scores `(batch, N, vocab)` and `draws_for` it.

        It may be part of a graph.
        """
        if not draws:
            return accept_greedy(tree, scores)
        if tree.q is None:
            return accept_sampled(tree, scores, *draws)
        return accept_rejection(tree, scores, *draws)

    @property
    def fits_graphs(self) -> bool:
        """Whether `accept_scored` of all nodes' logits may be part of a graph."""
        return self.history_free and self.is_made_of_tensors

    def advance(self, counts: Sequence[int]) -> None:
        """Advance the noise by the number of tokens that each row emitted."""
        if self.noise is not None:
            self.noise.advance(counts)

    @property
    def has_recent(self) -> bool:
        """Whether processors depend on at most `history_window` last tokens, and every row has that many."""
        return self.history_window is not None and min(self.sequences.lengths) >= self.history_window

    def recent(self) -> torch.Tensor | None:
        """Return the last `history_window` tokens `(batch, window)`; `None` unless `has_recent`."""
        window, lengths = self.history_window, self.sequences.lengths
        if window is None or not self.has_recent:
            return None
        if min(lengths) == max(lengths):
            # a copy, as the strides of a view differ between calls and would need another graph
            return self.sequences.tokens[:, lengths[0] - window : lengths[0]].clone()
        return torch.stack([row[end - window : end] for row, end in zip(self.sequences.tokens, lengths, strict=True)])

    def _accept_stepwise(self, tree: DraftTree, logits: torch.Tensor) -> tuple[Acceptance, torch.Tensor]:
        """Process the logits of one path only, each node with the prefix that leads to it.

        It is the path that the target chooses, or all that may be accepted of a chain whose tokens were drawn from `q`.
        """
        rows = torch.arange(logits.shape[0], device=logits.device)
        scores: list[torch.Tensor] = []
        goes_on = torch.ones_like(rows, dtype=torch.bool)

        def choose(depth: int, node: torch.Tensor, is_walking: torch.Tensor) -> torch.Tensor:
            nonlocal goes_on
            scores.append(self.scores_at(logits[rows, node], depth, (is_walking & goes_on).tolist()))
            if tree.q is None:
                token = self.choose(scores[-1], depth)
            else:
                token = tree.tokens[:, min(depth + 1, tree.max_depth)]
                goes_on = goes_on & ~scores[-1][rows, token].isneginf()
            goes_on = goes_on & ~self.sequences.ends(token)
            if depth < tree.max_depth:
                self.try_out(depth, token.clamp_min(0))
            return token

        acceptance = walk_lazily(tree, choose)
        of_path = torch.stack(scores, 1)
        return acceptance if tree.q is None else self.accept_scored(tree, of_path, *self.draws_for(tree)), of_path


def accept_packed(
    rule: Any, tree: DraftTree, logits: torch.Tensor, with_scores: bool, target: TargetView, cache: Any
) -> tuple[Acceptance, torch.Tensor | None, torch.Tensor]:
    """Return the result of [`TokenRule.accept`] of a rule, and what the host reads of it, see [`packed`].

    It runs as a graph after a captured step of the target that left these logits.
    """
    steps = target.steps
    if not with_scores and logits is steps.logits and rule.fits_graphs:
        # the result of another target's graph is copied
        q = tree.q if any(tree.q is result for result in steps.results) else None
        copied = () if tree.q is q else (tree.q,)
        step = Accept(target.model, cache, logits, q, bool(copied), rule, tree.max_depth, tree.is_chain)
        result = steps.run(step, tree.tokens, tree.parents, tree.valid, *copied, *rule.draws_for(tree))
        if result is not None:
            *fields, next_root, whole = result
            acceptance = Acceptance(*fields)
            acceptance.__dict__["next_root"] = next_root  # fills the cached property
            return acceptance, None, whole
    acceptance, scores = rule.accept(tree, logits, with_scores)
    return acceptance, scores, packed(acceptance, tree.valid)


@dataclass(eq=False)
class Accept(FixedStep):
    """The acceptance of the nodes of a tree."""

    logits: torch.Tensor
    q: torch.Tensor | None  # result of another graph
    is_copied: bool  # whether `q` is an input instead
    rule: TokenRule
    max_depth: int
    is_chain: bool

    @property
    def key(self) -> tuple:
        places = self.logits.data_ptr(), None if self.q is None else self.q.data_ptr()
        return *self.logits.shape, *places, self.is_copied, self.max_depth, self.is_chain, self.rule.key

    def run(self, *inputs: torch.Tensor) -> Any:
        tokens, parents, valid, *draws = inputs
        q, draws = (draws[0], draws[1:]) if self.is_copied else (self.q, draws)
        tree = DraftTree(tokens, parents, valid, q, is_chain=self.is_chain, max_depth=self.max_depth)
        acceptance = self.rule.accept_scored(tree, warped(self.rule.processors, self.logits), *draws)
        fields = acceptance.path, acceptance.num_nodes, acceptance.tokens
        return *fields, acceptance.next_root, packed(acceptance, valid)


def warped(
    processors: Sequence[LogitsProcessor], logits: torch.Tensor, texts: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the scores of logits `(B, N, vocab)` by processors that depend on the last tokens at most.

    All nodes are processed at once, and the function may be part of a graph. `texts` `(B, N, window)` are the last
    tokens of the text that ends with each node; processors that do not depend on tokens do without them.
    """
    if not processors:
        return logits.float()
    scores = logits.reshape(-1, logits.shape[-1]).to(torch.float32, copy=True)
    if texts is None:
        texts = torch.zeros(len(scores), 1, dtype=torch.long, device=scores.device)
    texts = texts.reshape(len(scores), -1)
    for processor in processors:
        scores = processor(texts, scores)
    return scores.view(logits.shape)


# A token whose perturbed log-probability is lower than the largest one by x counts as exp(-2 x) times as likely to be
# chosen. Chains do not depend on this factor, trees little: with 4+4+4+3 nodes of the bundled draft tau was 3.30, 3.45,
# 3.54, 3.50 at 0.5, 1, 2, 3.3.
SHARPNESS = 2.0


Paths = torch.Tensor | Callable[[], torch.Tensor]


class Coupling:
    """Compute the scores that candidates are ranked by."""

    def __init__(self, rule: TokenRule | None):
        self._rule = rule if rule is not None and (rule.do_sample or rule.processors) else None
        # a graph must not read the texts, which grow
        self._device = None if rule is None else rule.sequences.device
        # paths of the nodes of the last level, which of them were asked about, and which tokens these allow
        self._level: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    @property
    def is_plain(self) -> bool:
        """Whether `scores` returns the logits."""
        return self._rule is None

    @property
    def fits_graphs(self) -> bool:
        """Whether `scores` may be part of a graph now. It may not while a text is shorter than a processor's window."""
        return self._rule is None or (self._rule.is_made_of_tensors and self._rule.has_recent)

    @property
    def key(self) -> tuple:
        """Settings that such a graph depends on."""
        return self._rule.key if self._rule is not None and self.fits_graphs else ()

    def known(self, depths: int) -> tuple[torch.Tensor, ...]:
        """Return the tensors besides logits that decide the next `depths` tokens.

        Noise `(B, depths, V)` if the target samples, and last tokens `(B, window)` if processors depend on them alone.
        """
        if self._rule is None:
            return ()
        noise = (self._rule.noise.rows(depths),) if self._rule.do_sample else ()
        recent = None if self._rule.history_free else self._rule.recent()
        return noise if recent is None else (*noise, recent)

    def scores(self, logits: torch.Tensor, known: Sequence[torch.Tensor], depth: int, paths: Paths) -> torch.Tensor:
        """Return the log-probability `(B, n, V)` that each token is chosen, up to a constant per node.

        `logits` `(B, n, V)` are the draft's, after nodes of one depth (`(B, 1, V)` if they are the same after all of
        them), and `paths` the drafted tokens `(B, n, depth)` that lead to them, or a function that returns these, which
        is called only if a processor needs them.
        """
        rule = self._rule
        if rule is None:
            return logits
        logits = logits.to(self._device)  # from the device of the head, if the target is sharded
        noise = known[0] if rule.do_sample else None
        recent = known[-1] if len(known) > rule.do_sample else None  # last tokens `(B, window)`
        if rule.history_free:
            scores = warped(rule.processors, logits)
        else:
            tokens = paths() if callable(paths) else paths
            logits = logits.expand(-1, tokens.shape[1], -1)
            is_asked = (
                None if recent is not None and rule.takes_any_text else self._can_be_accepted(rule, tokens, depth)
            )
            if recent is not None:
                texts = torch.cat([recent[:, None].expand(-1, logits.shape[1], -1), tokens], 2)[..., depth:]
                if is_asked is not None:  # in place of others, the text of a row that grows
                    texts = torch.where(is_asked[..., None], texts, recent[rule.sequences.done.index(False)])
                scores = warped(rule.processors, logits, texts)
            else:
                assert is_asked is not None
                scores = rule.scores_of_level(logits, tokens, is_asked)
            if is_asked is not None:
                self._level = tokens, is_asked, ~scores.isneginf()
        return scores if noise is None else SHARPNESS * perturbed_log_probs(scores, noise[:, depth, None])

    def _can_be_accepted(self, rule: TokenRule, paths: torch.Tensor, depth: int) -> torch.Tensor:
        """Return which paths `(B, n, depth)` can be accepted, as `(B, n)`, by the scores of the level above.

        Each token is allowed after its parent, no token is an end token, and the text is not longer than it may be.
        """
        can_be = on_device(rule.can_be_asked(depth), paths.device).bool()[:, None].expand(paths.shape[:2])
        if not depth or self._level is None:
            return can_be
        above, was_asked, is_allowed = self._level
        token = paths[:, None, :, -1].expand(-1, above.shape[1], -1)
        is_allowed = is_allowed.gather(2, token).transpose(1, 2)  # [B, n, nodes of the level above]
        is_child = (paths[:, :, None, :-1] == above[:, None]).all(-1) & was_asked[:, None]
        return can_be & (is_child & is_allowed).any(-1) & ~rule.sequences.ends(paths).any(-1)
