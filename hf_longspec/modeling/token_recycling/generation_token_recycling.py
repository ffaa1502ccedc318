"""Token Recycling: a table of the target's candidates after each token, and a static tree that is read from it.

Token Recycling, https://huggingface.co/papers/2408.08696. Every verification computes the target's logits after all
nodes of a tree, also after those that are refused. The best candidates after each node's token are written to a table,
and the next tree is read from it: the children of a node are the candidates after its token. Each row has a table of
its own.
"""

from collections.abc import Sequence
from functools import lru_cache
from heapq import heappop, heappush
from itertools import pairwise
from typing import Any

import torch

from ...attention_backends.lengths import on_device
from ...generation.draft_tree import DraftTree
from ...generation.drafter import Binding, Drafter, Verification

# Assumed chance that the candidate of each rank is the next token. Only their ratios matter, for the shape of the tree.
CHANCES = tuple(0.5 / (rank + 1) ** 1.5 for rank in range(16))

# A node of a static tree: index of its parent, rank among the parent's children, depth.
Node = tuple[int, int, int]


@lru_cache(maxsize=64)
def likely_tree(num_nodes: int, max_depth: int, num_candidates: int) -> tuple[Node, ...]:
    """Return the nodes of the tree with the largest sum of chances, the root left out, level by level.

    The chance of a node is the product of `CHANCES` along its path.

    >>> likely_tree(4, 2, 8)
    ((0, 0, 1), (0, 1, 1), (1, 0, 2))
    """
    # heap of minus the chance, path of ranks; a node is added with its next sibling and its first child
    heap: list[tuple[float, tuple[int, ...]]] = [(-CHANCES[0], (0,))]
    paths: list[tuple[int, ...]] = []
    while heap and len(paths) < num_nodes - 1:
        chance, path = heappop(heap)
        paths.append(path)
        if path[-1] + 1 < num_candidates:
            sibling = chance / CHANCES[path[-1]] * CHANCES[path[-1] + 1]
            heappush(heap, (sibling, (*path[:-1], path[-1] + 1)))
        if len(path) < max_depth:
            heappush(heap, (chance * CHANCES[0], (*path, 0)))
    paths.sort(key=lambda path: (len(path), path))
    places = {(): 0} | {path: place for place, path in enumerate(paths, start=1)}
    return tuple((places[path[:-1]], path[-1], len(path)) for path in paths)


class CandidateTable:
    """Candidates after each token of each row, best first; -1 for none. Graphs that read or write it go with it."""

    def __init__(self, batch_size: int, vocab_size: int, num_candidates: int, device: torch.device):
        shape = batch_size, vocab_size + 1, num_candidates  # the last entry of a row takes writes that are not kept
        self.entries = torch.empty(shape, dtype=torch.int32, device=device)
        self._structures: dict[tuple[Node, ...], tuple] = {}

    @property
    def nbytes(self) -> int:
        return self.entries.numel() * self.entries.element_size()

    def fill(self, texts: Sequence[torch.Tensor]) -> None:
        """Forget everything but the successors of each token in the texts `(T,)` of the rows."""
        device, count = self.entries.device, self.entries.shape[2]
        self.entries.fill_(-1)
        for row, text in enumerate(texts):
            if followers := successors(text.tolist(), count):
                self.entries[row, on_device(list(followers), device)] = on_device(
                    list(followers.values()), device
                ).int()

    def structure(self, tree: tuple[Node, ...]) -> tuple[torch.Tensor, torch.Tensor, tuple[slice, ...]]:
        """Return parents and ranks of all nodes but the root, and the places of each level among them."""
        if tree not in self._structures:
            depths = [depth for _, _, depth in tree]
            ends = [at for at in range(1, len(tree) + 1) if at == len(tree) or depths[at] != depths[at - 1]]
            levels = tuple(slice(first, end) for first, end in pairwise([0, *ends]))
            with torch.inference_mode(False):  # the tensors outlive the call, which may run under inference mode
                parents, ranks = on_device(
                    [[node[0] for node in tree], [node[1] for node in tree]], self.entries.device
                )
            self._structures[tree] = parents, ranks, levels
        return self._structures[tree]

    def tree(self, root: torch.Tensor, nodes: tuple[Node, ...]) -> tuple[torch.Tensor, ...]:
        """Return the fields of the static tree after the roots `(B,)`. It may be part of a graph."""
        parents, ranks, levels = self.structure(nodes)
        rows = torch.arange(len(root), device=root.device)[:, None]
        tokens, valid = root[:, None], torch.ones_like(root[:, None], dtype=torch.bool)
        for level in levels:
            above = parents[level]
            children = self.entries[rows, tokens[:, above], ranks[level]].long()
            valid = torch.cat([valid, valid[:, above] & (children >= 0)], 1)
            tokens = torch.cat([tokens, children.clamp_min(0)], 1)
        all_parents = torch.cat([parents.new_full((1,), -1), parents]).expand_as(tokens)
        return DraftTree(tokens, all_parents, valid, max_depth=nodes[-1][2]).fields

    def recycle(
        self, tokens: torch.Tensor, valid: torch.Tensor, path: torch.Tensor, best: torch.Tensor
    ) -> tuple[torch.Tensor]:
        """Write the best candidates after the tokens of all nodes to the table. It may be part of a graph.

        A token may occur at several nodes. The last node of the path with this token wins, else the last node.
        """
        nodes = tokens.shape[1]
        place = torch.arange(nodes, device=tokens.device).expand_as(tokens)
        on_path = torch.zeros_like(tokens, dtype=torch.bool)
        on_path.scatter_(1, path, True)
        weight = torch.where(valid, place + nodes * on_path, -1)
        same = tokens[:, :, None] == tokens[:, None, :]
        beaten = (same & (weight[:, None, :] > weight[:, :, None])).any(-1)
        spare = self.entries.shape[1] - 1
        rows = torch.arange(len(tokens), device=tokens.device)[:, None]
        self.entries[rows, torch.where(valid & ~beaten, tokens, spare)] = best.to(self.entries)
        return (tokens,)  # a graph has a result


class TokenRecyclingDrafter(Drafter):
    """Propose static trees from a table of candidates."""

    def __init__(self, binding: Binding, draft: Any):
        super().__init__(binding)
        self.num_candidates = min(draft.setting("num_candidates"), binding.target.vocab_size)
        self._tree = likely_tree(draft.setting("num_nodes"), draft.setting("max_depth"), self.num_candidates)
        self.num_nodes = 1 + len(self._tree)
        self.max_depth = self._tree[-1][2]
        self.table: CandidateTable | None = None

    @property
    def seed_tokens(self) -> int:
        """As many as a tree has nodes, so that the table begins with the candidates after these tokens."""
        return self.num_nodes

    @property
    def state_bytes(self) -> int:
        return 0 if self.table is None else self.table.nbytes

    def start(self, texts: Sequence[torch.Tensor], verification: Verification) -> None:
        """Fill the table with the successors of each token in the prompt, then with the target's candidates."""
        if self.table is None:
            sizes = len(texts), self.binding.target.vocab_size, self.num_candidates, texts[0].device
            self.table = self.binding.part((CandidateTable, *sizes), lambda: CandidateTable(*sizes))
            self.table.fill(texts)
        self.resume(texts, verification)

    def resume(self, texts: Sequence[torch.Tensor], verification: Verification) -> None:
        """Write the candidates after the last tokens of the texts, which were verified."""
        assert self.table is not None
        self.table.recycle(*self._found(verification))  # as it is: their number differs between calls

    def propose(self, root: torch.Tensor) -> DraftTree:
        """Return the static tree after `root` `(batch,)`; nodes without a candidate are padding."""
        assert self.table is not None
        fields = self.binding.target.run(self.table.tree, self.table, root, nodes=self._tree)
        return DraftTree.of_fields(fields, self.max_depth)

    def row_states(self) -> Sequence[torch.Tensor]:
        assert self.table is not None
        return (self.table.entries,)

    def observe(self, verification: Verification) -> None:
        """Write the candidates after all nodes of the tree, accepted or not."""
        assert self.table is not None
        self.binding.target.run(self.table.recycle, self.table, *self._found(verification))

    def _found(self, verification: Verification) -> tuple[torch.Tensor, ...]:
        """Return tokens and validity of all nodes, the path, and the best candidates after each node."""
        assert verification.tree is not None and verification.logits is not None
        best = verification.logits.topk(self.num_candidates, dim=-1).indices
        return verification.tree.tokens, verification.tree.valid, verification.path, best


def successors(text: Sequence[int], most: int) -> dict[int, list[int]]:
    """Return the latest different successors of each token, the latest first, padded with -1.

    >>> successors([5, 6, 5, 7, 5, 6], 3)
    {5: [6, 7, -1], 6: [5, -1, -1], 7: [5, -1, -1]}
    """
    latest: dict[int, list[int]] = {}
    for token, following in pairwise(text):
        ranking = latest.setdefault(token, [])
        if following in ranking:
            ranking.remove(following)
        ranking.insert(0, following)
        del ranking[most:]
    return {token: ranking + [-1] * (most - len(ranking)) for token, ranking in latest.items()}
