"""Choosing a backend, and explaining why there is none; merging what backends return for parts of the keys."""

import pytest
import torch

from hf_longspec.attention_backends import registry
from hf_longspec.attention_backends.registry import (
    AttentionBackend,
    AttentionCall,
    merge_attention_states,
    nothing_visible,
    register_backend,
    select,
)
from tests.attention_backends.oracle import relative_error
from tests.attention_backends.reference import tree_attention

CALL = AttentionCall(torch.device("cpu"), torch.bfloat16, 96, 96)


@pytest.fixture
def shelf(monkeypatch):
    """A registry of our own."""
    for name in ("_backends", "_priorities"):
        monkeypatch.setattr(registry, name, {})
    select.cache_clear()
    yield
    select.cache_clear()


def backend(name, reason=None):
    def why_not(call):
        return reason(call) if callable(reason) else reason

    return AttentionBackend(name, *[lambda: None] * 3, why_not)


def test_the_highest_priority_that_accepts_runs(shelf):
    register_backend(backend("slow"), priority=1)
    register_backend(backend("fast", lambda call: "cannot apply softcap" if call.softcap else None), priority=5)
    register_backend(backend("by_name_only"))
    assert registry.backend_names() == ["fast", "slow", "by_name_only"]
    assert select(CALL).name == "fast"
    assert select(CALL._replace(softcap=30.0)).name == "slow"
    assert select(CALL, "by_name_only").name == "by_name_only"
    register_backend(backend("faster"), priority=9)
    assert select(CALL).name == "faster"  # what was chosen before is not remembered for ever


def test_the_error_says_everything(shelf):
    register_backend(backend("hf_longspec_torch", "cannot apply softcap"), priority=1)
    register_backend(backend("hf_longspec_triton", "needs a GPU"), priority=5)
    register_backend(backend("hf_longspec_reference"))
    with pytest.raises(ValueError) as error:
        select(AttentionCall(torch.device("cpu"), torch.bfloat16, 96, 96, softcap=50.0, sinks=True))
    assert str(error.value).splitlines() == [
        "no attention backend supports this call "
        "(device=cpu, dtype=bfloat16, head_dim=96, value_dim=96, softcap=50.0, sinks=True):",
        "  hf_longspec_triton: needs a GPU",
        "  hf_longspec_torch: cannot apply softcap",
        "Load the model in float32, float16 or bfloat16, call generate() without assistant_model, or add a backend: "
        "see the kernel recipe in CONTRIBUTING.md.",
    ]


def test_unknown_and_duplicate_names(shelf):
    fast = register_backend(backend("fast"), priority=5)
    assert register_backend(fast, priority=5) is fast  # importing twice is no error
    with pytest.raises(ValueError, match=r"'quick' is not an attention backend\. Choose one of fast"):
        select(CALL, "quick")
    with pytest.raises(ValueError, match="named 'fast' exists already"):
        register_backend(backend("fast"))


def parts_of(cuts, dtype=torch.float64, keys=12):
    """Queries, keys, values and a mask under which a query sees nothing in any part; the states of the parts."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 3, 8, generator=generator, dtype=torch.float64)
    key, value = (torch.randn(2, 2, keys, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    visible = torch.rand(2, 1, 3, keys, generator=generator) < 0.5
    visible[0, :, 1] = False
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    places = [slice(a, b) for a, b in zip([0, *cuts], [*cuts, keys], strict=True)]
    states = [tree_attention(query, key[:, :, p], value[:, :, p], visible[..., p], scaling=0.5) for p in places]
    return (query, key, value, visible), states


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("cuts", [[], [5], [1, 2, 11], list(range(1, 12))], ids=str)
def test_parts_make_the_whole(cuts, with_sinks):
    """A sink is one more key without a value, whatever the number of parts."""
    (query, key, value, visible), states = parts_of(cuts)
    scores = (query @ key.repeat_interleave(2, 1).transpose(2, 3) * 0.5).masked_fill(~visible, -torch.inf)
    sinks = torch.tensor([-1.0, 0.0, 2.0, 5.0], dtype=torch.float64) if with_sinks else None
    if with_sinks:
        scores = torch.cat([scores, sinks.view(1, 4, 1, 1).expand(2, -1, 3, 1)], dim=-1)
    out, lse = merge_attention_states(states, sinks)
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=1e-12, atol=1e-12)
    weights = scores.softmax(-1).nan_to_num(0.0)[..., :12]
    torch.testing.assert_close(out, weights @ value.repeat_interleave(2, 1), rtol=1e-12, atol=1e-12)
    assert not out[0, :, 1].any()


def test_merging_nothing_changes_nothing():
    (query, _, value, _), (state,) = parts_of([])
    for parts in ([nothing_visible(query, value), state], [state, nothing_visible(query, value)]):
        for actual, expected in zip(merge_attention_states(parts), state, strict=True):
            assert torch.equal(actual, expected)


def test_bfloat16_parts_are_weighed_in_float32():
    """The merge adds nothing to the error of rounding its result once."""
    _, parts = parts_of([150], torch.bfloat16, keys=400)
    out, _ = merge_attention_states(parts)
    exact, _ = merge_attention_states([(part.double(), lse.double()) for part, lse in parts])
    assert relative_error(out, exact) <= 1.01 * relative_error(exact.to(torch.bfloat16), exact)
