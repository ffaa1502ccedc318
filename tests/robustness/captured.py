"""Captured steps of a decoder of transformers, on a simulated CUDA device."""

from typing import Any
from unittest import mock

import torch

from hf_longspec.generation.compiled import cuda_graphs
from hf_longspec.generation.special_cases import masked
from tests.generation.test_captured_states import on_device
from tests.robustness.enumeration import Outcome, Stock, make, with_capturable_experts

# Parts of the device's errors in a capture, and how the table puts them.
REASONS = {"write by": "copies from the host", "read by": "waits for the device"}


def captured(stock: Stock, batch: str) -> Outcome:
    """The result of random trees with captured steps: `identical` with graphs, or `refused` with the reason."""
    notes: list[Any] = []
    with_capturable_experts(stock.model)
    with (
        on_device(stock.model, draft := make(stock, "tree", batch)) as (cuda, placed),
        mock.patch.object(cuda_graphs.logger, "warning", lambda *message: notes.append(message)),
        mock.patch.object(masked, "MOST_OF_MASK", 1.0),  # the weights of tiny models have few bytes
    ):
        inputs = {name: cuda.place(value) for name, value in stock.arguments(batch).items()}
        try:
            text = placed.generate(**inputs, assistant_model=draft)
        except ValueError:  # an operation that the CPU does not have
            return Outcome("refused", "not simulated")
        if notes or not cuda.replays:
            reason = str(notes[0][2]) if notes else "no graph"
            return Outcome("refused", next((short for part, short in REASONS.items() if part in reason), reason))
        # of equal scores, `topk` takes others on a CPU
        if not torch.equal(cuda.fetch(text), stock.text(batch)) and not torch.equal(text, placed.generate(**inputs)):
            return Outcome("different")
    return Outcome("identical")
