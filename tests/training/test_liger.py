"""Liger's own kernel against our loss in chunks, in float32; interpreted by Triton where there is no GPU.

Liger Kernel is not among the requirements of the tests: `pip install liger-kernel` (0.8.5 was run).
"""

from types import SimpleNamespace

import pytest
import torch

from hf_longspec.attention_backends.triton.config import INTERPRETED
from hf_longspec.generation.target_ends import TargetEnds
from hf_longspec.testing import tiny_target
from hf_longspec.training import liger
from hf_longspec.training.losses import cross_entropy, head_loss

pytest.importorskip("liger_kernel")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(DEVICE.type == "cpu" and not INTERPRETED, reason="no GPU, and Triton compiles")
# Sums of 37 losses around 10, and gradients of up to 0.1, in float32 in another order.
LOSS_ERROR, GRADIENT_ERROR = 1e-5, 1e-6


def test_loss_and_gradient():
    """Without a softcap, whose tanh the interpreter lacks."""
    model = tiny_target("llama").to(DEVICE)
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    hidden = (3 * torch.randn(37, model.config.hidden_size, generator=generator)).to(DEVICE)
    labels = torch.randint(model.config.vocab_size, (37,), generator=generator).to(DEVICE)
    ends = TargetEnds(model)
    ours = hidden.clone().requires_grad_()
    expected, _ = head_loss(ours[None], ends.head, cross_entropy(labels), 16)
    (2 * expected.sum()).backward()  # a slope other than 1
    fused = liger.liger_cross_entropy(ends, SimpleNamespace(is_cuda=True))
    theirs = hidden.clone().requires_grad_()
    found = fused(theirs, labels)
    (2 * found).backward()
    assert found.item() == pytest.approx(expected.item(), rel=LOSS_ERROR)
    assert ours.grad.abs().max() > 0.01
    torch.testing.assert_close(theirs.grad, ours.grad, rtol=LOSS_ERROR, atol=GRADIENT_ERROR)
