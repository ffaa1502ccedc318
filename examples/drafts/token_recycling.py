"""Token Recycling: a table of the target's candidates after each token, and a static tree that is read from it.

A draft outside of the package, which shows one that reads the target's logits and drafts a tree. Import this file
before `TokenRecyclingDraftModel.from_target(target)`, or before a saved draft is loaded.

Token Recycling, https://huggingface.co/papers/2408.08696. Every verification computes the target's logits after all
nodes of a tree, also after those that are refused. The best candidates after each node's token are written to a table,
and the next tree is read from it: the children of a node are the candidates after its token. Each row has a table of
its own. The paper keeps the table between calls; here it starts with the successors of each token in the prompt.
"""

from collections.abc import Sequence
from functools import lru_cache
from heapq import heappop, heappush
from itertools import pairwise
from typing import Any, ClassVar

import torch

import hf_longspec
from hf_longspec.modeling.settings import Setting

# Assumed chance that the candidate of each rank is the next token. Only their ratios matter, for the shape of the tree.
CHANCES = tuple(0.5 / (rank + 1) ** 1.5 for rank in range(16))


class TokenRecyclingConfig(hf_longspec.DraftConfig):
    model_type = "longspec_token_recycling"


class TokenRecyclingDraftModel(hf_longspec.DraftModel):
    """Propose what the target itself ranked highest after earlier occurrences of each token.

    ```python
    draft = TokenRecyclingDraftModel.from_target(target)
    target.generate(**inputs, assistant_model=draft)
    ```
    """

    config_class = TokenRecyclingConfig
    weightless: ClassVar[bool] = True
    # the sizes of the paper, whose 80 nodes would fill half of a tile of 128 rows
    settings: ClassVar[dict[str, Any]] = {
        "num_nodes": Setting(64, "Number of nodes of the tree, root included.", int, least=2, most=512),
        "max_depth": Setting(6, "Depth of the deepest node.", int, most=32),
        # as many as chances are assumed for
        "num_candidates": Setting(8, "Number of candidates after each token.", int, most=len(CHANCES)),
    }

    def make_drafter(self, binding: hf_longspec.Binding) -> "TokenRecyclingDrafter":
        return TokenRecyclingDrafter(binding, self)

    def max_nodes(self, target: Any) -> int:
        return int(self.setting("num_nodes"))


class TokenRecyclingDrafter(hf_longspec.Drafter):
    """Propose static trees from a table of candidates.

    `table` `(B, vocab + 1, candidates)` holds the candidates after each token of each row, best first; -1 for none. The
    last entry of a row takes writes that are not kept.
    """

    def __init__(self, binding: hf_longspec.Binding, draft: TokenRecyclingDraftModel):
        super().__init__(binding)
        self.num_candidates = min(draft.setting("num_candidates"), binding.target.vocab_size)
        self._tree = likely_tree(draft.setting("num_nodes"), draft.setting("max_depth"), self.num_candidates)
        self.num_nodes = 1 + len(self._tree)
        self.max_depth = self._tree[-1][2]
        self.table: torch.Tensor | None = None

    @property
    def seed_tokens(self) -> int:
        """As many as a tree has nodes, so that the table begins with the candidates after these tokens."""
        return self.num_nodes

    @property
    def state_bytes(self) -> int:
        return 0 if self.table is None else self.table.nbytes

    def row_states(self) -> Sequence[torch.Tensor]:
        assert self.table is not None
        return (self.table,)

    def start(self, texts: Sequence[torch.Tensor], verification: hf_longspec.Verification) -> None:
        """Fill the table with the successors of each token in the prompt, then with the target's candidates."""
        device, shape = texts[0].device, (len(texts), self.binding.target.vocab_size + 1, self.num_candidates)
        self.table = torch.full(shape, -1, dtype=torch.int32, device=device)
        for row, text in enumerate(texts):
            for token, candidates in successors(text.tolist(), self.num_candidates).items():
                self.table[row, token] = torch.tensor(candidates, dtype=torch.int32, device=device)
        self.observe(verification)

    def resume(self, texts: Sequence[torch.Tensor], verification: hf_longspec.Verification) -> None:
        """Write the candidates after the last tokens of the texts, and keep the table."""
        self.observe(verification)

    def propose(self, root: torch.Tensor) -> hf_longspec.DraftTree:
        """Return the static tree after `root` `(batch,)`; nodes without a candidate are padding."""
        assert self.table is not None
        rows = torch.arange(len(root), device=root.device)
        tokens, valid = [root], [torch.ones_like(root, dtype=torch.bool)]
        for parent, rank, _ in self._tree:
            child = self.table[rows, tokens[parent], rank].long()
            valid.append(valid[parent] & (child >= 0))
            tokens.append(child.clamp_min(0))
        parents = torch.tensor([-1, *(parent for parent, _, _ in self._tree)], device=root.device)
        all_tokens = torch.stack(tokens, 1)
        return hf_longspec.DraftTree(
            all_tokens, parents.expand_as(all_tokens), torch.stack(valid, 1), max_depth=self.max_depth
        )

    def observe(self, verification: hf_longspec.Verification) -> None:
        """Write the best candidates after the tokens of all nodes to the table, accepted or not.

        A token may occur at several nodes. The last node of the path with this token wins, else the last node.
        """
        tree, logits = verification.tree, verification.logits
        assert self.table is not None and tree is not None and logits is not None
        tokens, valid, nodes = tree.tokens, tree.valid, tree.tokens.shape[1]
        on_path = torch.zeros_like(tokens, dtype=torch.bool)
        on_path.scatter_(1, verification.path, True)
        place = torch.arange(nodes, device=tokens.device).expand_as(tokens)
        weight = torch.where(valid, place + nodes * on_path, -1)
        same = tokens[:, :, None] == tokens[:, None, :]
        beaten = (same & (weight[:, None, :] > weight[:, :, None])).any(-1)
        rows = torch.arange(len(tokens), device=tokens.device)[:, None]
        written = torch.where(valid & ~beaten, tokens, self.table.shape[1] - 1)
        self.table[rows, written] = logits.topk(self.num_candidates, dim=-1).indices.to(self.table)


@lru_cache(maxsize=64)
def likely_tree(num_nodes: int, max_depth: int, num_candidates: int) -> tuple[tuple[int, int, int], ...]:
    """Return the nodes of the tree with the largest sum of chances, the root left out, level by level.

    The chance of a node is the product of `CHANCES` along its path. A node is the index of its parent, its rank among
    the parent's children, and its depth.

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


hf_longspec.register_draft(TokenRecyclingConfig, TokenRecyclingDraftModel)
