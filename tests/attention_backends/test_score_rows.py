"""Scores that the Triton kernels write while they attend, against the second pass over the keys that they replace."""

from dataclasses import replace

import pytest
import torch

from hf_longspec.attention_backends.scores import ScoreCapture
from hf_longspec.attention_backends.torch_backend import TORCH_BACKEND
from hf_longspec.attention_backends.triton.backend import TRITON_BACKEND
from hf_longspec.generation.selection import select_top
from tests.attention_backends.test_hybrid_tree import SCALING, build
from tests.attention_backends.test_triton_prefix import SCORE_ERROR

pytestmark = pytest.mark.usefixtures("small_tiles", "poisoned_memory")

# nodes, groups, prefix lengths, last nodes, window, softcap, sinks
CASES = [
    pytest.param(1, 2, (100,), (0,), None, None, False, id="lone_root"),
    pytest.param(5, 3, (90, 33), (4, 2), None, None, False, id="ragged_padded"),
    pytest.param(7, 4, (64, 65, 0), (6, 0, 3), None, 2.0, True, id="softcap_sinks_and_no_prefix"),
    pytest.param(9, 1, (130,), (8,), 40, None, True, id="window_with_sinks"),
]


def attend(backend, capture, case):
    nodes, groups, lengths, window, softcap, sinks = case
    context, query, key, value = build(lengths, nodes, groups=groups)
    context.capture = capture
    options = {"scaling": SCALING, "sliding_window": window, "softcap": softcap}
    options["sinks"] = torch.linspace(-1.0, 1.0, query.shape[1]) if sinks else None
    return context.attend(backend, 0, query, key.nan_to_num(), value.nan_to_num(), **options)


def captured(backend, last, case, **options):
    capture = ScoreCapture(torch.tensor(last), **options)
    out = attend(backend, capture, case)
    return out, capture.scores.get(0)


@pytest.mark.parametrize("granularity", ["layer", "kv_head"])
@pytest.mark.parametrize("score", ["logits", "weights"])
@pytest.mark.parametrize(("nodes", "groups", "lengths", "last", "window", "softcap", "sinks"), CASES)
def test_the_selection_is_that_of_the_second_pass(
    kernel_device, monkeypatch, nodes, groups, lengths, last, window, softcap, sinks, score, granularity
):
    if kernel_device.type != "cpu":
        pytest.skip("compares with a backend on the CPU")
    case, options = (nodes, groups, lengths, window, softcap, sinks), {"score": score, "granularity": granularity}
    expected_out, expected = captured(TORCH_BACKEND, last, case, **options)

    def collect(self, *args, **more):
        raise AssertionError("the keys were read a second time")

    monkeypatch.setattr(ScoreCapture, "collect", collect)
    out, found = captured(TRITON_BACKEND, last, case, **options)
    torch.testing.assert_close(out, expected_out, rtol=0, atol=SCORE_ERROR)
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
    ("options", "groups"),
    [
        ({"rows": "all_rows"}, 3),
        ({"rows": "each_row"}, 3),
        ({"score": "quest"}, 3),
        ({"score": "weights"}, 9),  # 18 rows of two nodes do not fit in one program of 16
    ],
    ids=["all_rows", "each_row", "quest", "too_many_heads"],
)
def test_other_scores_take_the_second_pass(kernel_device, options, groups):
    """And give what they give on the torch backend."""
    case = (5, groups, (90, 33), None, None, False)
    found, expected = (captured(backend, (4, 2), case, **options)[1] for backend in (TRITON_BACKEND, TORCH_BACKEND))
    assert found.shape == expected.shape
    for row, length in enumerate((90, 33)):
        torch.testing.assert_close(found[row, ..., :length], expected[row, ..., :length], rtol=0, atol=1e-4)


def test_a_backend_without_score_rows_takes_the_second_pass(kernel_device):
    case = (5, 3, (90, 33), None, None, False)
    backend = replace(TRITON_BACKEND, scored_attention=None)
    _, found = captured(backend, (4, 2), case, score="weights")
    _, expected = captured(TRITON_BACKEND, (4, 2), case, score="weights")
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=2 * SCORE_ERROR)
