"""Scores that the Triton kernels write while they attend, against a second pass over the keys, by torch.

`attention_backends/test_scores.py` compares the second pass with loops.
"""

from dataclasses import replace

import pytest
import torch

from hf_longspec.attention_backends.scores import ScoreCapture
from hf_longspec.attention_backends.torch_backend import TORCH_BACKEND
from hf_longspec.attention_backends.triton.backend import TRITON_BACKEND
from hf_longspec.modeling.shared.sparse_caches import select_top
from tests.attention_backends.oracle import SCALING, tree_case
from tests.attention_backends.triton.machine import on
from tests.pairwise import pairwise

pytestmark = pytest.mark.usefixtures("small_tiles", "poisoned_memory")

CPU = torch.device("cpu")
# Sums of 16 products of standard normal numbers, of up to 14 rows: 1e-6 each.
SCORE_ERROR = 2e-5


# nodes, groups, prefix lengths, last nodes, window, softcap, sinks
CASES = {
    "lone_root": (1, 2, (100,), (0,), None, None, False),
    "ragged_padded": (5, 3, (90, 33), (4, 2), None, None, False),
    "softcap_sinks_and_no_prefix": (7, 4, (64, 65, 0), (6, 0, 3), None, 2.0, True),
    "window_with_sinks": (9, 1, (130,), (8,), 40, None, True),
}


def captured(backend, device, last, case, **options):
    """Output and scores on the CPU, computed on the device."""
    nodes, groups, lengths, window, softcap, sinks = case
    context, query, key, value = tree_case(lengths, nodes, groups=groups)
    context = context.to(device)
    context.capture = ScoreCapture(torch.tensor(last, device=device), **options)
    options = {"scaling": SCALING, "sliding_window": window, "softcap": softcap}
    options["sinks"] = torch.linspace(-1.0, 1.0, query.shape[1], device=device) if sinks else None
    out = context.attend(backend, 0, *on(device, query, key.nan_to_num(), value.nan_to_num()), **options)
    return out.cpu(), context.capture.scores[0].cpu()


@pytest.mark.parametrize(
    ("name", "score", "granularity"), pairwise(tuple(CASES), ("logits", "weights"), ("layer", "kv_head"))
)
def test_the_selection_is_that_of_the_second_pass(kernel_device, monkeypatch, name, score, granularity):
    nodes, groups, lengths, last, window, softcap, sinks = CASES[name]
    case, options = (nodes, groups, lengths, window, softcap, sinks), {"score": score, "granularity": granularity}
    expected_out, expected = captured(TORCH_BACKEND, CPU, last, case, **options)

    def collect(self, *args, **more):
        raise AssertionError("the keys were read a second time")

    monkeypatch.setattr(ScoreCapture, "collect", collect)
    out, found = captured(TRITON_BACKEND, kernel_device, last, case, **options)
    torch.testing.assert_close(out, expected_out, rtol=0, atol=SCORE_ERROR)
    for row, length in enumerate(lengths):  # arbitrary, here as it was allocated: nothing is written there
        assert found[row, :, length:].isnan().all()
    found = found[..., : max(lengths)]  # those of all slots of the buffer
    assert found.shape == expected.shape == (len(lengths), 1 if granularity == "layer" else 2, max(lengths))
    for row, length in enumerate(lengths):
        # the first is a sum over the heads of both KV heads
        torch.testing.assert_close(found[row, :, :length], expected[row, :, :length], rtol=0, atol=2 * SCORE_ERROR)
    prefix, count = torch.tensor(lengths), 20
    chosen, wanted = (select_top(scores.clone(), prefix, count) for scores in (found, expected))
    for row, length in enumerate(lengths):
        own = min(count, length)
        assert torch.equal(chosen[row, :, :own].sort(-1).values, wanted[row, :, :own].sort(-1).values)


@pytest.mark.parametrize(
    ("backend", "options", "groups"),
    [
        (TRITON_BACKEND, {"rows": "all_rows"}, 3),
        (TRITON_BACKEND, {"rows": "each_row"}, 3),
        (TRITON_BACKEND, {"score": "weights"}, 9),  # 18 rows of two nodes do not fit in one program of 16
        (replace(TRITON_BACKEND, attention_with_scores=None), {"score": "weights"}, 3),
    ],
    ids=["all_rows", "each_row", "too_many_heads", "no_score_rows"],
)
def test_other_scores_take_the_second_pass(kernel_device, backend, options, groups):
    """And give what they give on the torch backend."""
    case = (5, groups, (90, 33), None, None, False)
    _, found = captured(backend, kernel_device, (4, 2), case, **options)
    _, expected = captured(TORCH_BACKEND, CPU, (4, 2), case, **options)
    assert found.shape == expected.shape
    for row, length in enumerate((90, 33)):
        torch.testing.assert_close(found[row, ..., :length], expected[row, ..., :length], rtol=0, atol=1e-4)
