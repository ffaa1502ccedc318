"""TokenSwift heads: shapes, numbers, saving and refusals."""

import pytest
import torch

from hf_longspec import TokenSwiftDraftModel
from tests.modeling.tokenswift.restated_heads import restated_heads
from tests.rounding import rounding


@pytest.fixture
def make_draft(llama):
    """`make_draft(chained=False)`: heads whose norms and linear layers all matter."""

    def make(**overrides):
        draft = TokenSwiftDraftModel.from_target(llama, **overrides)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for weight in draft.parameters():
                noise = torch.randn(weight.shape, generator=generator)
                weight.copy_(noise * 0.3 if weight.dim() == 2 else 1 + 0.4 * noise)
        return draft

    return make


@pytest.fixture
def hidden():
    return torch.randn(2, 7, 64, generator=torch.Generator().manual_seed(4)) * 5


@pytest.mark.parametrize(
    ("num_heads", "kind", "length"),
    [(1, {}, 7), (5, {}, 7), (3, {"chained": False}, 7), *((3, {"sequential": True}, length) for length in (1, 3, 7))],
    ids=str,
)
def test_the_heads_are_the_restated_ones(make_draft, hidden, num_heads, kind, length):
    draft, hidden = make_draft(num_heads=num_heads, **kind), hidden[:, :length]
    embedded = torch.randn(2, length, 64, generator=torch.Generator().manual_seed(5)) if "sequential" in kind else None
    with torch.no_grad():
        found = draft(hidden) if embedded is None else draft(hidden, embedded)
    assert found.shape == (num_heads, 2, length, 64) and found.dtype == torch.float32
    sizes = num_heads, draft.config.rms_norm_eps, draft.config.chained
    expected = restated_heads(draft.state_dict(), "heads.layers.", hidden, *sizes, embedded)
    torch.testing.assert_close(found.double(), expected, **rounding(expected, layers=num_heads))
