"""Draft chains and trees with another causal language model, which has a cache of its own.

The draft keeps the keys of the accepted nodes. The deepest node of a tree was never its input, so each iteration begins
with the last committed token and the root. With a window, the cache holds the first and the last tokens of the text,
and the cost of a step does not grow with the text. This is the draft of MagicDec
(https://huggingface.co/papers/2408.11049) with StreamingLLM's selection and a model of its own.

A model that was trained with PARD (https://huggingface.co/papers/2504.18583) proposes all tokens of a chain in one
forward: `num_assistant_tokens - 1` mask tokens follow the root, and the logits after the root and each mask propose the
tokens of the chain. Keys of masks are dropped, so the next forward begins with the tokens that were accepted.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.nn.functional import pad
from transformers.utils import logging

from ...attention_backends.contexts import LevelContext, TreeContext
from ...attention_backends.lengths import SeqLens, on_device
from ...generation.beam import Beam
from ...generation.draft_tree import DraftTree
from ...generation.drafter import Binding, Drafter, TreeShape, Verification, drafted_chain, independent_draws, named
from ...generation.sampling import Coupling
from ...generation.target import TargetView
from ...generation.windowed_cache import WindowedCache

logger = logging.get_logger(__name__)

# Tokens that one forward runs to catch up with a text that grew without the draft.
CATCH_UP = 64

Shape = int | list[int]


@dataclass(frozen=True)
class AssistantSettings:
    """Settings of one call, which are keys of `draft.generation_config`.

    Args:
        shapes (`Sequence[int | list[int]]`): Chains by the number of drafted tokens, and trees by the nodes of each
            level. The first one is the configured one.
        window (`int`, *optional*): Number of last tokens that the draft keeps.
        sinks (`int`): Number of first tokens that it keeps besides.
        is_drawn (`bool`): When sampling, whether tokens are drawn from the draft's own distribution.
        chunk_size (`int`): Tokens per forward of the prefill.
        mask_token (`int`, *optional*): Mask token of PARD.
    """

    shapes: Sequence[Shape]
    window: int | None
    sinks: int
    is_drawn: bool
    chunk_size: int
    mask_token: int | None


def size_of(shape: Shape) -> tuple[int, int]:
    """Return the number of nodes of a chain or a tree, root included, and its depth.

    >>> size_of(3), size_of([4, 2])
    ((4, 3), (7, 2))
    """
    return (shape + 1, shape) if isinstance(shape, int) else (sum(shape) + 1, len(shape))


class AssistantDrafter(Drafter):
    """Draft chains or trees with a causal language model.

    Args:
        binding ([`Binding`]): Target, cache and rule of this call.
        assistant ([`TargetView`]): The model that drafts.
        settings ([`AssistantSettings`]): Settings of this call.
    """

    def __init__(self, binding: Binding, assistant: TargetView, settings: AssistantSettings):
        super().__init__(binding)
        self.assistant = assistant
        self.settings = settings
        self.shape = settings.shapes[0]
        sizes = [size_of(shape) for shape in settings.shapes]
        self.num_nodes, self.max_depth = (max(part) for part in zip(*sizes, strict=True))
        embedding = assistant.model.get_input_embeddings().weight
        self.device, self.num_embeddings = assistant.model.device, embedding.shape[0]
        self.coupling = Coupling(binding.rule)
        slots = max(CATCH_UP, 2 * self.num_nodes)
        shape = binding.cache.batch_size, binding.max_length, slots, settings.window, settings.sinks
        self.cache: WindowedCache = binding.part(
            (WindowedCache, assistant.model, *shape), lambda: WindowedCache(assistant.config, *shape)
        )
        self.cache.reset()
        self._is_switched = False
        self._proposed_chain = True
        # Committed tokens that are no input of the draft yet, and their number in every row.
        self.pending = torch.zeros(binding.cache.batch_size, 0, dtype=torch.long, device=self.device)
        self.counts = [0] * binding.cache.batch_size

    @cached_property
    def trees(self) -> tuple[TreeShape, ...]:
        """Shapes of the chains and trees."""
        return named((shape, *size_of(shape)) for shape in self.settings.shapes)

    def choose(self, tree: int) -> None:
        """Propose chains or trees of this index from now on."""
        self.shape = self.settings.shapes[tree]

    @property
    def state_bytes(self) -> int:
        """Bytes of the draft's cache."""
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
        """Run the prompts, or what is missing of them."""
        self.resume(texts, verification)

    def resume(self, texts: Sequence[torch.Tensor], verification: Verification) -> None:
        """Run the tokens that were committed without the draft. The last one waits for the root."""
        with self.attention(), torch.no_grad():
            self._warn_of_length(max(map(len, texts)))
            texts = [text.to(self.device) for text in texts]
            missing = [len(text) - held for text, held in zip(texts, self.cache.positions, strict=True)]
            if not max(self.cache.lengths.host) or max(missing) > (self.settings.window or max(map(len, texts))):
                self._prefill(texts)
            else:
                self._catch_up(texts)
        last = torch.stack([text[-1] for text in texts])[:, None]
        # PARD's steps have one width from the first one on
        self.pending = last if self.settings.mask_token is None else pad(last, (0, self.max_depth - 1))
        self.counts = [1] * len(texts)

    def propose(self, root: torch.Tensor) -> DraftTree:
        """Return a chain or a tree of candidates after `root` `(batch,)`."""
        with self.attention():
            is_chain = isinstance(self.shape, int)
            tree = self._chain(root, self.shape) if isinstance(self.shape, int) else self._beam(root, self.shape)
        self.cache.rows.lengths = self.prefix  # the nodes stay after it, in their order, until the next step
        self._proposed_chain = is_chain
        return tree

    def observe(self, verification: Verification) -> None:
        """Keep the keys of accepted nodes that were an input, and remember the tokens that were none."""
        if self.settings.mask_token is None and not self.foreign_depth:
            self._keep_nodes(verification)
        else:
            self._keep_root(verification)
        self.cache.trim()
        if self.settings.mask_token is None and not self.foreign_depth:
            self.cache.rows.lengths = self.cache.lengths.plus(-1)

    def _keep_nodes(self, verification: Verification) -> None:
        """Keep all accepted nodes. The last one, which may never have been an input, is run again."""
        assert verification.tree is not None
        counts = verification.num_nodes
        self.cache.commit(None if self._proposed_chain else verification.path.to(self.device), counts)
        last = verification.tree.tokens.gather(1, verification.last_nodes[:, None]).to(self.device)
        grows = counts.on(self.device)[:, None] > 0
        self.pending, self.counts = torch.where(grows, last, self.pending[:, :1]), [1] * len(counts.host)

    def _keep_root(self, verification: Verification) -> None:
        """Keep the root alone: masks follow it, or nodes that others proposed are on the path."""
        kept = [tokens[:-1] for tokens in verification.tokens]
        width = max(verification.path.shape[1] - 1, 1)
        self.pending = on_device([row + [0] * (width - len(row)) for row in map(list, kept)], self.device)
        self.counts = [len(row) for row in kept]
        self.cache.commit(None, [int(count > 0) for count in verification.num_nodes.host])

    def _chain(self, root: torch.Tensor, length: int) -> DraftTree:
        """Return a chain of drafted tokens, one forward for each, or one for all with PARD."""
        mask_token = self.settings.mask_token
        first = self._first(root, 0 if mask_token is None else length - 1)

        def logits_after(depth: int, token: torch.Tensor) -> torch.Tensor:
            if mask_token is not None:
                logits = first[:, depth]
            else:
                logits = (self._after(token) if depth else first)[:, 0]
            return self._of_target(logits, root.device)

        draws = independent_draws(self.binding, root, length) if self.settings.is_drawn else None
        return drafted_chain(self.binding.rule, root, length, logits_after, draws)

    def _beam(self, root: torch.Tensor, widths: list[int]) -> DraftTree:
        """Return the tree of a beam, one forward for each level."""
        beam, known = Beam(root), self.coupling.known(len(widths))
        for depth, width in enumerate(widths):
            logits = self._level(beam, depth) if depth else self._first(root)
            scores = self.coupling.scores(self._of_target(logits, root.device), known, depth, beam.paths)
            beam.grow(scores, width)
        return DraftTree.of_fields(beam.fields(), len(widths))

    def _first(self, root: torch.Tensor, masks: int = 0) -> torch.Tensor:
        """Run pending tokens, root and masks, and return the logits `(B, 1 + masks, V)` from the root on."""
        counts, root = self.counts, root.to(self.device)[:, None]
        if min(counts) == self.pending.shape[1]:  # no padding
            tokens, valid, first = torch.cat([self.pending, root], 1), None, None
            if masks:
                tokens = pad(tokens, (0, masks), value=self.settings.mask_token)
        else:
            padded = pad(self.pending, (0, 1 + masks), value=self.settings.mask_token or 0)
            first = on_device(counts, self.device)[:, None]
            places = torch.arange(padded.shape[1], device=self.device)
            mask_token = self.settings.mask_token or 0
            tokens = torch.where(places < first, padded, torch.where(places == first, root, mask_token))
            valid = places <= first + masks
        start = self.cache.lengths
        logits = self._run_chain(tokens, valid)
        self.prefix = start.plus(min(counts)) if len(set(counts)) == 1 else SeqLens(_sum(start.host, counts))
        self.cache.rows.lengths = self.prefix.plus(1)
        if first is None:
            return logits[:, -1 - masks :]
        wanted = first + torch.arange(1 + masks, device=self.device)
        return logits.gather(1, wanted[..., None].expand(-1, -1, logits.shape[-1]))

    def _run_chain(self, tokens: torch.Tensor, valid: torch.Tensor | None, is_fixed: bool = True) -> torch.Tensor:
        """Return the logits `(B, N, V)` of a chain after the committed tokens; it is staged."""
        tree, start = DraftTree.chain(tokens, valid), self.cache.lengths
        slots = start.on(self.device)[:, None] + tree.depths
        context = TreeContext(start, slots, tree.mask, windows=self.assistant.windows)
        return self._run(tree.tokens, slots, context, is_fixed)

    def _after(self, token: torch.Tensor) -> torch.Tensor:
        """Run the newest token of a chain, and return its logits `(B, 1, V)`. All before it is its prefix."""
        logits = self._run_chain(token.to(self.device)[:, None], None)
        self.cache.rows.lengths = self.cache.lengths.plus(1)
        return logits

    def _level(self, beam: Beam, depth: int) -> torch.Tensor:
        """Run the newest level of a tree, and return its logits `(B, n, V)`."""
        prefix = self.prefix.plus(1)  # the root included, which all nodes see
        mask = beam.reach[:, :, 1:].to(self.device)
        depths = [d for d, level in enumerate(beam.levels[1:]) for _ in range(level.shape[1])]
        node_slots = prefix.on(self.device)[:, None] + on_device(depths, self.device)
        slots = node_slots[:, -mask.shape[1] :]
        self.cache.rows.lengths = prefix.plus(mask.shape[2] - mask.shape[1])
        context = LevelContext(prefix, slots, mask, node_positions=node_slots, windows=self.assistant.windows)
        return self._run(beam.tokens.to(self.device), slots, context, True)

    def _run(self, tokens: torch.Tensor, slots: torch.Tensor, context: Any, is_fixed: bool) -> torch.Tensor:
        """Run nodes that would lie in `slots` if the cache were the text so far, and return their logits."""
        count = tokens.shape[1]
        if count > self.cache.tree_slots:
            self.cache.reserve(self.cache.most, count)
        self.cache.stage(count)
        positions = self.cache.true_positions(slots)
        if max(self.cache.positions) + count > self._last_position:
            positions = positions.clamp_max(self._last_position)
        mask = context.mask[:, None]
        logits, _ = self.assistant.step(self._known(tokens), positions, self.cache, mask, context, is_fixed)
        return logits

    @cached_property
    def _last_position(self) -> int:
        """The last position that any token may have; a model with a table of positions has none beyond its end."""
        last = self.binding.max_length - 1
        if any("rotary_emb" in name for name, _ in self.assistant.model.named_modules()):
            return last
        return min(last, (getattr(self.assistant.config, "max_position_embeddings", None) or last + 1) - 1)

    def _known(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the tokens; those beyond the draft's vocabulary, which are padding of the target's, are replaced."""
        if self.num_embeddings >= self.binding.target.vocab_size:
            return tokens
        return tokens.clamp_max(self.num_embeddings - 1)

    def _of_target(self, logits: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return logits over the target's vocabulary; the two differ by padding."""
        missing = self.binding.target.vocab_size - logits.shape[-1]
        logits = logits.to(device)
        if not missing:
            return logits
        return pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits[..., :missing]

    def _prefill(self, texts: Sequence[torch.Tensor]) -> None:
        """Run whole texts but for their last tokens, or their sinks and last windows, under the draft's own masks."""
        self.cache.rollback()
        self.cache.reset()
        kept = [self.cache.kept_of(len(text) - 1) for text in texts]
        width = max(map(len, kept))
        places = on_device([row + [0] * (width - len(row)) for row in kept], self.device)
        tokens = torch.stack([text[row] for text, row in zip(texts, places, strict=True)])
        extra = self.assistant.keeping(torch.zeros(1, dtype=torch.long, device=self.device))
        places = places.clamp_max(self._last_position)
        for begin in range(0, width, self.settings.chunk_size):
            chunk = slice(begin, begin + self.settings.chunk_size)
            self.assistant.model(
                input_ids=self._known(tokens[:, chunk]),
                position_ids=places[:, chunk],
                past_key_values=self.cache,
                use_cache=True,
                **extra,
            )
        self.cache.dropped = SeqLens([len(text) - 1 - len(row) for text, row in zip(texts, kept, strict=True)])
        self.cache.set_lengths([len(row) for row in kept])

    def _catch_up(self, texts: Sequence[torch.Tensor]) -> None:
        """Run the tokens that are missing but for the last one, a chain of at most `CATCH_UP` at a time."""
        held = zip(self.cache.lengths.host, self._missing(texts), strict=True)
        self.cache.set_lengths([length + min(0, missing) for length, missing in held])  # the last one is run again
        while any(counts := self._missing(texts)):
            rows = [
                text[start : start + count]
                for text, start, count in zip(texts, self.cache.positions, counts, strict=True)
            ]
            tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
            valid = torch.arange(tokens.shape[1], device=self.device) < on_device(counts, self.device)[:, None]
            self._run_chain(tokens, valid, is_fixed=False)
            self.cache.commit(None, counts)
            self.cache.trim()

    def _missing(self, texts: Sequence[torch.Tensor]) -> list[int]:
        held = zip(texts, self.cache.positions, strict=True)
        return [min(CATCH_UP, len(text) - 1 - start) for text, start in held]

    def _warn_of_length(self, length: int) -> None:
        most = getattr(self.assistant.config, "max_position_embeddings", None)
        if most and length > most:
            logger.warning_once(
                f"the prompt has {length} tokens, and {type(self.assistant.model).__name__}, which drafts, has "
                f"{most} positions: the text stays exact, but fewer drafts may be accepted."
            )


def _sum(lengths: Sequence[int], counts: Sequence[int]) -> list[int]:
    return [length + count for length, count in zip(lengths, counts, strict=True)]
