"""SparseContext.attend: dense layers read the cache, the others a compact buffer."""

import pytest
import torch

from hf_longspec.attention_backends.contexts import SparseContext
from hf_longspec.attention_backends.merge import merge_attention_states
from hf_longspec.attention_backends.reference import REFERENCE_BACKEND, prefix_attention
from hf_longspec.attention_backends.torch_backend import TORCH_BACKEND
from tests.attention_backends.oracle import assert_within_budget

BACKENDS = [pytest.param(REFERENCE_BACKEND, id="reference"), pytest.param(TORCH_BACKEND, id="torch")]


def build(batch=2, slots=40):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(batch, 6, 1, 16, generator=generator)
    key, value = (torch.randn(batch, 2, slots, 16, generator=generator) for _ in range(2))
    dense = (slots, slots - 11)[:batch]
    context = SparseContext(
        lengths=torch.tensor((9, 6)[:batch]),
        host_lengths=(9, 6)[:batch],
        positions=torch.tensor(dense)[:, None] - 1,
        dense_lengths=torch.tensor(dense),
        dense_host_lengths=dense,
        dense_layers=frozenset({0, 3}),
    )
    return context, query, key, value


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("layer_idx", [0, 1])
def test_layers(layer_idx, softcap, sinks, backend):
    """A window of 8 binds the dense layer and means nothing in the compact buffer."""
    context, query, key, value = build()
    sinks = torch.linspace(-1.0, 2.0, 6) if sinks else None
    dense = layer_idx in context.dense_layers
    lengths = context.dense_lengths if dense else context.lengths
    key[1, :, lengths[1] :], value[1, :, lengths[1] :] = torch.nan, torch.nan
    where = {"positions": context.positions, "sliding_window": 8} if dense else {}

    def exact(dtype):
        inputs = (x.to(dtype) for x in (query, key, value))
        state = prefix_attention(*inputs, lengths, scaling=0.4, softcap=softcap, **where)
        return merge_attention_states([state], None if sinks is None else sinks.to(dtype))

    options = {"scaling": 0.4, "sliding_window": 8, "softcap": softcap, "sinks": sinks}
    out = context.attend(backend, layer_idx, query, key, value, **options)
    truth = exact(torch.float64)
    assert_within_budget((out, truth[1].float()), truth, exact(torch.float32)[0])
    assert context.calls.total == 1


def test_to_moves_the_tensors_and_shares_the_rest():
    context = build()[0]
    assert context.to("cpu") is context
    moved = context.to("meta")
    assert {x.device.type for x in (moved.lengths, moved.positions, moved.dense_lengths)} == {"meta"}
    assert (moved.calls, moved.dense_layers, moved.host_lengths) == (context.calls, frozenset({0, 3}), (9, 6))
    assert moved.dense_host_lengths == (40, 29)
    assert context.to("meta") is moved
