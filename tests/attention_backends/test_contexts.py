"""The contexts of a step: what they pass on, keep and share. test_parity.py compares their attention."""

from dataclasses import replace

import torch

from hf_longspec.attention_backends import torch_backend
from hf_longspec.attention_backends.torch_backend import TORCH_BACKEND
from tests.attention_backends.oracle import SCALING, assert_within_budget, attended, expected_tree, tree_case


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


def test_to_moves_the_tensors_and_shares_the_rest():
    context = tree_case((9, 6), 3)[0]
    assert context.to(None) is context.to("cpu") is context.to(torch.device("cpu"), non_blocking=True) is context
    moved = context.to("meta", non_blocking=True)
    tensors = [value for value in vars(moved).values() if isinstance(value, torch.Tensor)]
    assert tensors and {x.device.type for x in (*tensors, moved.lengths.on("meta"))} == {"meta"}
    shared = [name for name, value in vars(context).items() if not isinstance(value, torch.Tensor) and name != "_memo"]
    assert "calls" in shared and all(getattr(moved, name) is getattr(context, name) for name in shared)
    assert context.to("meta") is moved.to("meta") is moved  # one copy per device, however many layers ask
