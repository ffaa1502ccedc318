"""TokenSwift: heads on the target's hidden state propose the tokens that follow, in one step for all of them.

TokenSwift, https://huggingface.co/papers/2502.18890. Head i reads the residual stream after the target's last layer at
one token, and ranks candidates for the token i places after the target's own prediction. Every combination of the best
candidates becomes a path of the tree. The hidden state comes from one of two places:

    partial_kv      the paper's: one more forward of the target on the root, over a partial KV cache of fixed size
                    (section 3.3). The target's own prediction is the first level, the heads are the others.
    verify_hidden   the verification, which computed the state at the last accepted token. The target's prediction there
                    is the root, so the heads alone make the tree, which is one level less deep.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from operator import mul
from typing import Any, cast

import torch

from ...attention_backends.lengths import SeqLens, on_device
from ...attention_backends.scores import QueryCapture, ScoreCapture
from ...generation.cache import SpeculativeCache
from ...generation.draft_tree import DraftTree, num_static_nodes, static_tree
from ...generation.drafter import Binding, Drafter, Verification, last_of
from ...generation.sampling import Coupling
from ...generation.target import FixedStep, TargetView
from ...generation.target_modules import PartOfHead, TargetEnds
from ..shared.sparse_caches import SINK_TOKENS, CompactCache, gather_entries
from ..shared.vocabulary import of_all_tokens, part_of_head

POLICIES = ("dynamic", "static", "full")


@dataclass(frozen=True)
class PartialKVPolicy:
    """Assign tokens to the slots of one layer's buffer, for one row and KV head.

    A build orders entries by importance: the sinks, then the newest, then the others by falling score. Later tokens
    take the free slots, and then the slots of the least important entries. The next build is due when only the sinks
    are left to replace. The buffer therefore always holds the last `recent` tokens and all tokens since the build.

    Source: https://huggingface.co/papers/2502.18890, section 3.3. The paper does not guarantee recent tokens.
    """

    budget: int  # number of entries in the buffer
    recent: int  # number of newest entries that a build keeps regardless of their score
    dynamic: bool = True  # whether tokens after the first build enter the buffer

    def size(self, built: int) -> int:
        """Return the number of entries that a build of the first `built` tokens keeps."""
        return min(built, self.budget)

    def room(self, built: int) -> int:
        """Return the number of tokens that fit after a build of `built` tokens."""
        return self.budget - min(self.size(built), SINK_TOKENS) if self.dynamic else 0

    def used(self, built: int, length: int) -> int:
        """Return the number of used slots for `length` committed tokens, `built` of them committed before the build."""
        return min(self.budget, self.size(built) + (length - built)) if self.dynamic else self.size(built)

    def is_due(self, built: int | None, length: int) -> bool:
        """Return whether a row needs a build before it can hold `length` tokens. `built` is `None` before the first."""
        return built is None or (self.dynamic and length - built > self.room(built))

    def slot(self, built: int, token: int) -> int:
        """Return the slot of token number `token` after a build of the first `built` tokens."""
        free = self.size(built) + token - built
        return free if free < self.budget else self.budget - 1 - (token - built)

    def select(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the tokens `(K, size(built))` that a build keeps by scores `(K, built)`, most important first."""
        heads, built = scores.shape
        size = self.size(built)
        sinks = min(SINK_TOKENS, size)
        recent = min(self.recent, size - sinks)
        # newest first, so that replacements in this part drop the oldest
        numbers = torch.arange(built, device=scores.device)
        certain = torch.cat([numbers[:sinks], numbers[built - recent :].flip(0)])
        best = scores[:, sinks : built - recent].topk(size - sinks - recent, dim=-1).indices + sinks
        return torch.cat([certain.expand(heads, -1), best], dim=-1)


class PartialCache(CompactCache):
    """Copies of entries of the target's cache that a [`PartialKVPolicy`] chooses per row, layer and KV head.

    After every commit the entries of new tokens are copied. Other entries do not move until the next build.
    """

    def __init__(self, cache: SpeculativeCache, dense_layers: frozenset[int], policy: PartialKVPolicy):
        super().__init__(cache, dense_layers)
        self.policy = policy
        self.built: list[int | None]  # tokens of each row at its last build
        self.copied: list[int]  # tokens of each row at the last `catch_up`
        self.forget()

    def forget(self) -> None:
        """Forget all builds, and keep the buffers."""
        self.built, self.copied = [None] * self.cache.batch_size, [0] * self.cache.batch_size

    def take(self, row: int, other: "PartialCache", of: int = 0) -> None:
        """Replace the entries of a row by those of row `of` of another such cache."""
        self.built[row], self.copied[row] = other.built[of], other.copied[of]
        used = list(self.used.lengths.host)
        used[row] = other.used.lengths.host[of]
        self.used.lengths = SeqLens(used)
        self.share_dense()
        for index in self.sparse_layers:
            layer, taken = self.layers[index], other.layers[index]
            if not layer.is_initialized:
                self._allocate(index)
            layer.keys[row], layer.values[row] = taken.keys[of], taken.values[of]

    def due(self, count: int) -> list[int]:
        """Return the rows that need a build before `count` more tokens are committed."""
        if self.dense_layers == self.keyed_layers:
            return []
        lengths = self.cache.lengths.host
        return [row for row, built in enumerate(self.built) if self.policy.is_due(built, lengths[row] + count)]

    def build(self, row: int, length: int, scores_of: Callable[[int], torch.Tensor]) -> None:
        """Choose the entries of a row again among its first `length` tokens.

        Args:
            scores_of (`Callable`): Function from the index of a layer to the scores `(1 or K, length)` of these tokens.
        """
        one = slice(row, row + 1)
        for index in self.sparse_layers:
            source, layer = self.cache.layers[index], self.layers[index]
            scores = scores_of(index)
            if scores.shape[0] not in (1, source.keys.shape[1]):  # attention computes other heads from the cached ones
                scores = scores.sum(0, keepdim=True)
            entries = self.policy.select(scores).to(source.keys.device)[None]
            if not layer.is_initialized:
                self._allocate(index)
            layer.keys[one, :, : entries.shape[-1]] = gather_entries(source.keys[one], entries)
            layer.values[one, :, : entries.shape[-1]] = gather_entries(source.values[one], entries)
        self.built[row] = self.copied[row] = length

    def catch_up(self, width: int, target: TargetView) -> None:
        """Copy the entries that were committed since the last call. Every row must have been built.

        Args:
            width (`int`): Most tokens that a step commits. Steps that commit fewer run the same graph.
        """
        self.share_dense()
        lengths = self.cache.lengths.host
        if not self.sparse_layers:
            return
        built = [length or 0 for length in self.built]
        ends = [self.policy.used(*row) for row in zip(built, lengths, strict=True)]
        self.used.lengths = SeqLens(ends)
        if self.policy.dynamic and self.copied != list(lengths):
            self._copy_new(built, ends, width, target)
        self.copied = list(lengths)

    def _copy_new(self, built: list[int], ends: list[int], width: int, target: TargetView) -> None:
        """Copy the entries of the tokens that were committed since `copied` to their slots."""
        lengths = self.cache.lengths.host
        count = max(length - copied for length, copied in zip(lengths, self.copied, strict=True))
        if target.steps.captures:
            count = max(count, width)
        rows = []
        for first, copied, length, end in zip(built, self.copied, lengths, ends, strict=True):
            tokens, missing = range(copied, length), count - (length - copied)
            # rows with fewer tokens write to the slot after all entries, which is never read
            source = [*tokens, *[0] * missing]
            slots = [self.policy.slot(first, token) for token in tokens] + [self.policy.budget] * missing
            rows.append([*source, *slots, end])
        devices = {self.cache.layers[index].keys.device for index in self.sparse_layers}
        for device in devices:
            table = on_device(list(zip(*rows, strict=True)), device)
            if len(devices) == 1:
                self.used.lengths = SeqLens(ends, table[-1])
            layers = tuple(i for i in self.sparse_layers if self.cache.layers[i].keys.device == device)
            target.run(self.copy_new, self, table, layers=layers, layouts=(self.layout, self.cache.layout))

    def copy_new(self, table: torch.Tensor, layers: tuple[int, ...], layouts: tuple) -> tuple[()]:
        """Copy entries of these layers by a table `(2 n + 1, B)` of slots and lengths. It may be part of a graph."""
        old, new = table[:-1].unflatten(0, (2, -1)).transpose(1, 2)  # slots of the target's cache and of the buffer
        row = torch.arange(old.shape[0], device=old.device)[:, None]
        for source, layer in ((self.cache.layers[index], self.layers[index]) for index in layers):
            layer.keys[row, :, new] = source.keys[row, :, old]
            layer.values[row, :, new] = source.values[row, :, old]
        return ()

    def _allocate(self, index: int) -> None:
        """Allocate the buffers of one layer: the budget, and a slot for the token of the drafting step."""
        source, layer = self.cache.layers[index], self.layers[index]
        batch, heads, _, _ = source.keys.shape
        slots = self.policy.budget + 1
        layer.place(
            source.keys.new_zeros(batch, heads, slots, source.keys.shape[3]),
            source.values.new_zeros(batch, heads, slots, source.values.shape[3]),
        )


SELF_DRAFTS = ("verify_hidden", "partial_kv")


class TokenSwiftDrafter(Drafter):
    """Draft a tree of fixed shape from one hidden state."""

    def __init__(self, binding: Binding, draft: Any):
        super().__init__(binding)
        self.draft = draft
        self.widths = self.largest = draft.levels()
        self.num_nodes = num_static_nodes(self.widths)
        self.max_depth = len(self.widths)
        # Graphs hold the addresses of the heads' weights: those of a copy are dropped with it.
        self._holder = draft.placed_at(draft.place(binding.target.model))
        self.heads, self.ends = self._holder.heads, TargetEnds(binding.target.model)
        self.part_of_head = None if draft.d2t is None else part_of_head(self._holder, self.ends, binding)
        self.coupling = binding.coupling()
        self.wants_hidden = draft.setting("self_draft") == "verify_hidden"
        self.partial = None if self.wants_hidden else self._partial_cache()
        self.due: list[int] = []

    @property
    def state_bytes(self) -> int:
        return 0 if self.partial is None else self.partial.nbytes

    def propose(self, root: torch.Tensor) -> DraftTree:
        """Return the tree of all combinations of the best candidates for the next tokens after `root` `(batch,)`."""
        self.widths = self.widths_now
        if self.partial is None:
            levels = self._rank(root, self.hidden)
        else:
            logits, hidden = self.partial.step(self.binding.target, root, self.binding.max_length, with_hidden=True)
            assert hidden is not None
            levels = self._rank(root, hidden, logits)
        return static_tree(root, levels, self.widths)

    def level_sizes(self, widths: Sequence[int]) -> Sequence[int]:
        """Return the number of nodes of each level, each of which has all candidates."""
        return list(accumulate(widths, mul))

    def row_states(self) -> Sequence[torch.Tensor]:
        return (self.hidden,)

    def take(self, row: int, other: Any, of: int = 0) -> None:
        if self.partial is None:
            super().take(row, other, of)
        else:
            self.partial.take(row, other.partial, of)

    def capture(self, tree: DraftTree) -> QueryCapture | ScoreCapture | None:
        """Return a capture for the scores of entries if a build is due after this verification."""
        self.due = [] if self.partial is None else self.partial.due(max(tree.max_depth, self.ngram_depth) + 1)
        if self.partial is None or not self.due:
            return None  # scoring costs a pass over all keys
        skipped = self.partial.dense_layers
        if not self.binding.target.has_latent_cache:
            return QueryCapture(skipped)
        # All heads share one latent, so there is one selection per layer, by scores that are comparable between heads.
        # Keys exist during the forward only, so all nodes are scored there.
        return ScoreCapture(
            tree.last_node,
            rows="each_row",
            score="weights",
            skipped_layers=skipped,
            sum_ranks=self.binding.target.sum_ranks,
        )

    def observe(self, verification: Verification) -> None:
        """Keep the hidden state at the last accepted token, or bring the partial cache up to date."""
        if self.partial is None:
            hidden = verification.hidden
            assert hidden is not None
            device = hidden.device
            of_path = verification.path.to(device), verification.num_nodes.on(device)
            self.hidden = self.binding.target.run(_last_hidden, self.binding.cache, hidden, *of_path)
            return
        for row in self.due:
            length, node = verification.prefix_lengths.host[row], verification.last_nodes[row : row + 1]
            scores_of = partial(verification.capture.of_node, row=row, node=node, length=length)
            self.partial.build(row, length, scores_of)
        self.partial.catch_up(verification.path.shape[1], self.binding.target)

    def _rank(self, root: torch.Tensor, hidden: torch.Tensor, *target_logits: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the candidates of every level, see [`Levels`], computed in one graph if possible."""
        inputs, known = (root, hidden, *target_logits), self.coupling.known(len(self.widths))
        settings = self.heads, self.ends, self.part_of_head, self.coupling, tuple(self.widths), len(target_logits)
        holder = self._holder if self._holder is not self.draft else self.part_of_head or self.draft
        levels, steps = Levels(self.draft, holder, *settings), self.binding.target.steps
        found = steps.run(levels, *inputs, *known) if self.coupling.fits_graphs else None
        if found is not None:
            return cast(Sequence[torch.Tensor], found)
        if not self.heads.sequential:
            levels.logits = steps.run(HeadLogits(self.draft, holder, *settings), *inputs)
        return levels.run(*inputs, *known)

    def _partial_cache(self) -> PartialCache:
        target, kind = self.binding.target, self.draft.setting("partial_kv_policy")
        policy = PartialKVPolicy(
            budget=min(self.draft.setting("partial_kv_budget"), self.binding.max_length),
            recent=self.draft.setting("partial_kv_recent"),
            dynamic=kind == "dynamic",
        )
        keep_all = frozenset(range(target.num_layers))
        shape = self.binding.cache, keep_all if kind == "full" else target.sliding_layers, policy
        partial: PartialCache = self.binding.part((PartialCache, *shape), lambda: PartialCache(*shape))
        partial.forget()
        return partial


def _last_hidden(hidden: torch.Tensor, path: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return the hidden state `(B, hidden)` at the last of the kept nodes of each row. It may be part of a graph."""
    return hidden[torch.arange(len(hidden), device=hidden.device), last_of(path, counts)]


@dataclass(eq=False)
class HeadLogits(FixedStep):
    """Logits `(levels, B, draft vocabulary)` of all heads, which are not sequential."""

    heads: Any  # the heads of the draft
    ends: TargetEnds  # embedding and head of the target
    part_of_head: PartOfHead | None  # its head for the draft's tokens, if these are not all
    coupling: Coupling  # by which noise candidates are ranked
    widths: tuple[int, ...]  # number of candidates of each level
    num_own: int  # number of levels that the target's own logits decide: 0 or 1

    @property
    def key(self) -> tuple:
        return self.coupling.key, self.widths, self.num_own

    def run(self, *inputs: torch.Tensor) -> Any:
        """Compute from the inputs of [`Levels`]."""
        states = self.heads(inputs[1][:, None])[: len(self.widths) - self.num_own, :, 0]
        logits = self.logits_of(states.transpose(0, 1))  # rows first: each may have an adapter of its own
        return logits.transpose(0, 1)

    def logits_of(self, states: torch.Tensor) -> torch.Tensor:
        """Return logits `(..., draft vocabulary)` of normalised states `(..., hidden)`."""
        return (self.part_of_head or self.ends.head)(states)


@dataclass(eq=False)
class Levels(HeadLogits):
    """The best candidates of every level.

    Tokens `(B, n * width)` of each level. With sequential heads they are `width` children of each of the n nodes above.
    Other heads do not depend on drafted tokens, so n is 1: all nodes have the same children, ranked for the best path.
    """

    logits: torch.Tensor | None = None  # `(levels, B, draft vocabulary)` of the heads, if they are computed

    def run(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Compute from roots `(B,)`, hidden states `(B, hidden)`, `num_own` logits `(B, vocab)`, noise and texts.

        The logits are the target's for the first level. See [`Coupling.known`] for noise and texts.
        """
        heads, ends = self.heads, self.ends
        root, hidden, *known = inputs
        ready, known = list(known[: self.num_own]), known[self.num_own :]  # a graph of torch 2.11 has a tuple here
        if not heads.sequential:
            ready.extend((HeadLogits.run(self, *inputs) if self.logits is None else self.logits).unbind())
        states, nodes, levels = hidden[:, None], root[:, None], []
        paths = nodes[..., None][..., :0]
        for depth, width in enumerate(self.widths):
            if depth < len(ready):
                scores = ready[depth][:, None]
            else:
                head = heads.layers[depth - self.num_own]
                states = head(states, ends.embed(nodes).to(states))
                scores = self.logits_of(head.post_layernorm(states))
            part = self.part_of_head if depth >= self.num_own else None
            if part is not None and not self.coupling.is_plain:  # noise and processors are those of the target's tokens
                scores, part = of_all_tokens(scores, part.token_ids, ends.config.vocab_size), None
            scores = self.coupling.scores(scores, known, depth, paths)
            best = scores.topk(width).indices  # [B, n, width]
            best = (best if part is None else part.token_ids[best]).to(root.device)
            levels.append(best.flatten(1))
            followed = best if heads.sequential else best[..., :1]
            states, nodes = states.repeat_interleave(followed.shape[2], 1), followed.flatten(1)
            paths = torch.cat([paths.repeat_interleave(followed.shape[2], 1), nodes[..., None]], 2)
        return tuple(levels)
