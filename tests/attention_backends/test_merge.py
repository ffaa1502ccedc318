"""merge_attention_states: parts of the keys give what all keys give at once."""

import pytest
import torch

from hf_longspec.attention_backends.registry import merge_attention_states, nothing_visible
from tests.attention_backends.oracle import relative_error
from tests.attention_backends.reference import tree_attention


def setup(dtype=torch.float64, keys=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(2, 4, 3, 8, generator=generator, dtype=torch.float64)
    key, value = (torch.randn(2, 2, keys, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    visible = torch.rand(2, 1, 3, keys, generator=generator) < 0.5
    visible[0, :, 1] = False  # sees nothing in any part
    return query.to(dtype), key.to(dtype), value.to(dtype), visible


def parts_of(query, key, value, visible, cuts):
    return [
        tree_attention(query, key[:, :, a:b], value[:, :, a:b], visible[..., a:b], scaling=0.5)
        for a, b in zip([0, *cuts], [*cuts, key.shape[2]], strict=True)
    ]


@pytest.mark.parametrize("cuts", [[], [5], [1, 2, 11], list(range(1, 12))], ids=str)
def test_parts_make_the_whole(cuts):
    inputs = setup()
    out, lse = merge_attention_states(parts_of(*inputs, cuts))
    exact, exact_lse = tree_attention(*inputs, scaling=0.5)
    torch.testing.assert_close(out, exact, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, exact_lse, rtol=1e-12, atol=1e-12)
    assert not out[0, :, 1].any()
    assert (lse[0, :, 1] == -torch.inf).all()


@pytest.mark.parametrize("cuts", [[], [3], [3, 7]], ids=str)
def test_a_sink_is_one_more_key_without_a_value(cuts):
    query, key, value, visible = setup()
    sinks = torch.tensor([-1.0, 0.0, 2.0, 5.0], dtype=torch.float64)
    out, lse = merge_attention_states(parts_of(query, key, value, visible, cuts), sinks)
    scores = (query @ key.repeat_interleave(2, 1).transpose(2, 3) * 0.5).masked_fill(~visible, -torch.inf)
    scores = torch.cat([scores, sinks.view(1, 4, 1, 1).expand(2, -1, 3, 1)], dim=-1)
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    torch.testing.assert_close(out, scores.softmax(-1)[..., :-1] @ value.repeat_interleave(2, 1))
    assert not out[0, :, 1].any()


def test_merging_nothing_changes_nothing():
    query, key, value, visible = setup()
    state = tree_attention(query, key, value, visible, scaling=0.5)
    for parts in ([nothing_visible(query, value), state], [state, nothing_visible(query, value)]):
        for actual, expected in zip(merge_attention_states(parts), state, strict=True):
            assert torch.equal(actual, expected)


def test_bfloat16_parts_are_weighed_in_float32():
    """The merge adds nothing to the error of rounding its result once."""
    parts = parts_of(*setup(torch.bfloat16, keys=400), [150])
    out, _ = merge_attention_states(parts)
    exact, _ = merge_attention_states([(part.double(), lse.double()) for part, lse in parts])
    assert relative_error(out, exact) <= 1.01 * relative_error(exact.to(torch.bfloat16), exact)


def test_large_log_sum_exps_do_not_overflow():
    out = torch.ones(1, 1, 1, 2)
    lse = torch.full((1, 1, 1), 500.0)
    merged, merged_lse = merge_attention_states([(out, lse), (3 * out, lse)])
    assert torch.equal(merged, 2 * out)
    torch.testing.assert_close(merged_lse, lse + torch.tensor(2.0).log())


def test_no_parts():
    with pytest.raises(ValueError, match="parts is empty"):
        merge_attention_states([])
