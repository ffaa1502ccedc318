"""Liger's fused linear cross-entropy, where it is installed and runs."""

from collections.abc import Callable

import torch

from ..generation.target_ends import LOGIT_DIVISORS, LOGIT_FACTORS, TargetEnds

try:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
except ImportError:
    LigerFusedLinearCrossEntropyLoss = None

# Liger returns no tokens: acceptance is then estimated at no more places than this of every batch.
SAMPLED_PLACES = 1024


def liger_cross_entropy(
    ends: TargetEnds, hidden: torch.Tensor
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """The summed cross-entropy of tokens, from hidden states like `hidden`, `(n, hidden)`, and labels
    `(n,)`, or `None` without Liger.

    Liger's kernels run on GPUs; they know a head that is one linear layer, with a softcap at most.

    Source: Liger Kernel (https://github.com/linkedin/Liger-Kernel), `LigerFusedLinearCrossEntropyLoss`.
    """
    kind = ends.config.model_type
    if LigerFusedLinearCrossEntropyLoss is None or not hidden.is_cuda or kind in LOGIT_FACTORS | LOGIT_DIVISORS:
        return None
    head = ends.model.get_output_embeddings()
    softcap = getattr(ends.config, "final_logit_softcapping", None)
    fused = LigerFusedLinearCrossEntropyLoss(reduction="sum", softcap=softcap)

    def loss(states: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = fused(head.weight, states.to(head.weight.dtype), labels, getattr(head, "bias", None))
        return total.float()

    return loss
