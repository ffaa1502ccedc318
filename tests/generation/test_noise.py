"""Noise rows: one per batch row and position, independent of the steps that read them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_longspec.generation.sampling import BLOCK, NoiseRows
from hf_longspec.generation.verification import draw_noise

VOCAB = 5
CPU = torch.device("cpu")


def seeded(batch_size):
    torch.manual_seed(0)
    return NoiseRows(batch_size, VOCAB, CPU)


# Steps, each with the number of noise rows that it reads and the number of tokens that each batch row then emits.
steps = st.lists(st.integers(1, 4).flatmap(lambda n: st.tuples(st.just(n), st.tuples(*[st.integers(0, n)] * 3))))


@given(steps=steps)
def test_the_noise_of_a_position_does_not_depend_on_steps(steps):
    straight = seeded(3).rows(sum(count for count, _ in steps) + 1)
    noise, emitted = seeded(3), [0, 0, 0]
    for count, accepted in steps:
        seen = noise.rows(count)
        for row, start in enumerate(emitted):
            assert torch.equal(seen[row], straight[row, start : start + count])
        noise.advance(accepted)
        emitted = [start + more for start, more in zip(emitted, accepted, strict=True)]


@pytest.mark.parametrize(("batch_size", "vocab_size"), [(1, 48), (3, 1001)])
def test_rows_are_single_draws_of_a_generator_per_batch_row(batch_size, vocab_size):
    """A seed gives the same numbers as in the first release."""
    torch.manual_seed(7)
    noise = NoiseRows(batch_size, vocab_size, CPU)
    torch.manual_seed(7)
    for row, seed in enumerate(torch.randint(2**62, (batch_size + 1,)).tolist()[1:]):
        generator = torch.Generator().manual_seed(seed)
        expected = [draw_noise(vocab_size, generator=generator) for _ in range(6)]
        for count in (1, 4, 2, 6):
            assert torch.equal(noise.rows(count)[row], torch.stack(expected[:count]))


def test_tokens_emitted_without_noise_use_no_noise_row():
    """Rejection sampling emits tokens without a noise row, and later draws continue after the last drawn row."""
    noise, expected = seeded(2), seeded(2).rows(BLOCK + 2)
    noise.rows(2)
    noise.advance([BLOCK + 3, 1])
    assert torch.equal(noise.rows(2)[0], expected[0, BLOCK:]) and torch.equal(noise.rows(2)[1], expected[1, 1:3])
