"""The rules of draft trees that the decoding loop relies on."""

import torch

from hf_longspec.generation.draft_tree import DraftTree, tree_depths, tree_mask


def check_tree(tree: DraftTree) -> None:
    """Fail if a tree breaks a rule of its class."""
    tokens, parents, valid = tree.tokens, tree.parents, tree.valid
    nodes = torch.arange(tree.num_nodes, device=tokens.device)
    drafted = valid & (nodes > 0)
    assert tokens.dim() == 2 and tokens.shape == parents.shape == valid.shape and valid.dtype == torch.bool
    assert valid[:, 0].all() and (parents[:, 0] == -1).all()
    assert not (drafted & ((parents < 0) | (parents >= nodes))).any(), "a parent does not come before its child"
    assert not (drafted & ~valid.gather(1, parents.clamp(0, tree.num_nodes - 1))).any(), "a child of padding"
    assert (tree_depths(tree_mask(parents, valid)) <= tree.max_depth).all()
    assert not tree.is_chain or not (drafted & (parents != nodes - 1)).any()
    if tree.q is not None:
        assert tree.q.shape[:2] == tokens.shape and (tree.q >= 0).all()
        # float16 distributions over a vocabulary of 150,000 sum to 1 within this
        assert not (drafted & ((tree.q.double().sum(-1) - 1).abs() > 1e-2)).any()
