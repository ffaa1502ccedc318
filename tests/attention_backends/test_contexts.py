"""The contexts of a step: what they pass on, keep and share, and steps of a draft, against attention in float64."""

from dataclasses import replace

import pytest
import torch

from hf_longspec.attention_backends import torch_backend
from hf_longspec.attention_backends.contexts import SparseContext
from hf_longspec.attention_backends.lengths import SeqLens
from hf_longspec.attention_backends.registry import merge_attention_states
from hf_longspec.attention_backends.torch_backend import TORCH_BACKEND
from tests.attention_backends.oracle import SCALING, assert_within_budget, attended, expected_tree, tree_case
from tests.attention_backends.reference import prefix_attention
from tests.pairwise import pairwise


def test_layers_with_different_windows_share_a_context(monkeypatch):
    context, query, key, value = tree_case((90, 90), 17)
    for dense_keys in (0, 60, 4096):
        context = replace(context)
        monkeypatch.setattr(torch_backend, "DENSE_KEYS", dense_keys)
        # 92: slot 0 of the 90 is hidden from the deepest nodes only
        for window in (None, 3, 40, 92, None, 200, 3):
            exact, plain = expected_tree(context, query, key, value, window, None, None)
            state = attended(context, TORCH_BACKEND, query, key, value, sliding_window=window)
            assert_within_budget(state, exact, plain)


def test_the_mask_of_a_step_is_built_once(monkeypatch):
    context, query, key, value = tree_case((90,), 5)
    built = []
    monkeypatch.setattr(torch_backend, "pack_mask", lambda *args: built.append(1) or torch.zeros(1, 1, 15, 95))
    for layer in range(6):
        context.attend(TORCH_BACKEND, layer, query, key, value, scaling=SCALING)
    assert (len(built), context.calls) == (1, list(range(6)))


def drafting_case(batch=2, slots=40):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(batch, 6, 1, 16, generator=generator)
    key, value = (torch.randn(batch, 2, slots, 16, generator=generator) for _ in range(2))
    dense = (slots, slots - 11)[:batch]
    context = SparseContext(
        lengths=SeqLens((9, 6)[:batch]),
        positions=torch.tensor(dense)[:, None] - 1,
        dense_lengths=SeqLens(dense),
        dense_layers=frozenset({0, 3}),
    )
    return context, query, key, value


@pytest.mark.parametrize(("layer_idx", "softcap", "sinks"), pairwise((0, 1), (None, 2.0), (False, True)))
def test_layers_of_a_drafting_step(layer_idx, softcap, sinks):
    """A window of 8 binds the dense layer and means nothing in the compact buffer."""
    context, query, key, value = drafting_case()
    sinks = torch.linspace(-1.0, 2.0, 6) if sinks else None
    dense = layer_idx in context.dense_layers
    lengths = context.dense_lengths if dense else context.lengths
    key[1, :, lengths.host[1] :], value[1, :, lengths.host[1] :] = torch.nan, torch.nan
    where = {"positions": context.positions, "sliding_window": 8} if dense else {}

    def exact(dtype):
        inputs = (x.to(dtype) for x in (query, key, value))
        state = prefix_attention(*inputs, lengths, scaling=0.4, softcap=softcap, **where)
        return merge_attention_states([state], None if sinks is None else sinks.to(dtype))

    options = {"scaling": 0.4, "sliding_window": 8, "softcap": softcap, "sinks": sinks}
    out = context.attend(TORCH_BACKEND, layer_idx, query, key, value, **options)
    truth = exact(torch.float64)
    assert_within_budget((out, truth[1].float()), truth, exact(torch.float32)[0])
    assert len(context.calls) == 1


@pytest.mark.parametrize("make", [lambda: tree_case((9, 6), 3)[0], lambda: drafting_case()[0]], ids=["tree", "draft"])
def test_to_moves_the_tensors_and_shares_the_rest(make):
    context = make()
    assert context.to(None) is context.to("cpu") is context.to(torch.device("cpu"), non_blocking=True) is context
    moved = context.to("meta", non_blocking=True)
    tensors = [value for value in vars(moved).values() if isinstance(value, torch.Tensor)]
    assert tensors and {x.device.type for x in (*tensors, moved.lengths.on("meta"))} == {"meta"}
    shared = [name for name, value in vars(context).items() if not isinstance(value, torch.Tensor) and name != "_memo"]
    assert "calls" in shared and all(getattr(moved, name) is getattr(context, name) for name in shared)
    assert context.to("meta") is moved.to("meta") is moved  # one copy per device, however many layers ask
