"""Repetition penalty over a window: against a loop over tokens, against transformers' own, and through `generate`."""

import re

import pytest
import torch

from hf_longspec import ContextualPenaltyLogitsProcessor
from tests.pairwise import pairwise

pytestmark = pytest.mark.usefixtures("every_step_speculates")

RAGGED = (33, 3, 13)
NEVER = 1  # an end token that no greedy text of these targets holds
VOCAB = 11


def by_hand(row, scores, penalty, window, exempt=None):
    """One row, one id after the other."""
    scores = list(scores)
    for token in set(row[max(0, len(row) - window) :]) - {exempt}:
        scores[token] = scores[token] * penalty if scores[token] < 0 else scores[token] / penalty
    return scores


@pytest.mark.parametrize(("window", "penalty", "exempt"), pairwise((1, 3, 8, 9, 100), (1.2, 0.7, 1), (None, 4)))
def test_equals_a_loop_over_the_window(penalty, window, exempt):
    generator = torch.Generator().manual_seed(window)
    ids = torch.randint(VOCAB, (3, 9), generator=generator)
    scores = torch.randn(3, VOCAB, generator=generator)
    scores[1, 2], scores[2, ids[2, -1]], scores[0, ids[0, -1]] = -torch.inf, 0.0, -torch.inf
    before = scores.clone()
    processed = ContextualPenaltyLogitsProcessor(penalty, window, pad_token_id=exempt)(ids, scores)
    expected = [
        by_hand(row, given, penalty, window, exempt) for row, given in zip(ids.tolist(), scores.tolist(), strict=True)
    ]
    torch.testing.assert_close(processed, torch.tensor(expected))
    assert torch.equal(scores, before)


def test_an_id_that_cannot_be_emitted_penalises_nothing():
    """Of an embedding that is larger than the head."""
    scores = torch.arange(1.0, VOCAB + 1)[None]
    processed = ContextualPenaltyLogitsProcessor(2.0, 3)(torch.tensor([[3, VOCAB + 2, 4, VOCAB]]), scores)
    assert processed.tolist() == [by_hand([4], scores[0].tolist(), 2.0, 3)]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("penalty", (0.0, float("nan"), float("inf"), "1.2", True)),
        ("window", (0, 8.0, True)),
        ("pad_token_id", (-1, "<pad>")),
    ],
)
def test_bad_values_are_refused(name, values):
    for value in values:
        with pytest.raises(ValueError, match=re.escape(f"{name}={value!r}: ")):
            ContextualPenaltyLogitsProcessor(**{"penalty": 1.2, "window": 8} | {name: value})


def test_padding_in_the_window_is_penalised_unless_it_is_named(plain_run):
    """As in plain `generate`. The padding is the token that the shortest row emits first."""
    run = plain_run("llama", RAGGED, max_new_tokens=8, eos_token_id=NEVER)
    pad = run.generated[1][0]
    ids, texts = run.inputs["input_ids"].masked_fill(run.inputs["attention_mask"] == 0, pad), []
    for named in (None, pad):
        processor = ContextualPenaltyLogitsProcessor(4.0, 12, pad_token_id=named)
        call = {"input_ids": ids, "logits_processor": [processor]}
        texts.append(run.again(None, **call).tolist())
        assert run.again(run.draft("tree"), **call).tolist() == texts[-1]
    assert texts[0][1] != texts[1][1]
