"""How many drafted tokens would be accepted, estimated while training."""

from collections.abc import Sequence

import torch


def counted(hits: torch.Tensor, groups: torch.Tensor, num_groups: int) -> torch.Tensor:
    """Hits and places of each group of places.

    Args:
        hits (`torch.BoolTensor` of shape `(n,)`): Whether the draft's most likely token is the wanted one.
        groups (`torch.LongTensor` of shape `(n,)`): Group of each place.
        num_groups (`int`): How many there are.

    Returns:
        `torch.DoubleTensor` of shape `(num_groups, 2)`.

    >>> counted(torch.tensor([True, False, True]), torch.tensor([1, 1, 2]), 3).tolist()
    [[0.0, 0.0], [1.0, 2.0], [1.0, 1.0]]
    """
    counts = torch.zeros(num_groups, 2, dtype=torch.float64, device=hits.device)
    return counts.index_add_(0, groups, torch.stack([hits, torch.ones_like(hits)], 1).to(counts.dtype))


def acceptance(first_gap: int, counts: Sequence[Sequence[float]]) -> dict[str, float]:
    """Share of hits of every gap, and what it lets expect of tau.

    Drafting at depth d has gap d + 1, so the shares are those of the levels of a draft tree with one branch. The
    estimate takes the levels for independent, `1 + a1 + a1 a2 + ...` with the bonus token, and is left out unless every
    gap from 1 on was seen.

    Args:
        first_gap (`int`): Gap of the first entry; they rise by one.
        counts (`Sequence`): Hits and places of each gap.

    >>> acceptance(1, [(3, 4), (2, 4)])
    {'acceptance_gap_1': 0.75, 'acceptance_gap_2': 0.5, 'estimated_tau': 2.125}
    """
    shares = {gap: hits / places for gap, (hits, places) in enumerate(counts, start=first_gap) if places}
    logs = {f"acceptance_gap_{gap}": share for gap, share in shares.items()}
    if first_gap == 1 and len(shares) == len(counts):
        tau = chain = 1.0
        for share in shares.values():
            chain *= share
            tau += chain
        logs["estimated_tau"] = tau
    return logs
