"""What the contexts of a step have in common; what each of them holds is tested with it."""

from dataclasses import dataclass

import torch

from hf_longspec.attention_backends.contexts import CallCounter, StepContext


@dataclass
class Context(StepContext):
    places: torch.Tensor
    calls: CallCounter


def test_a_context_moves_once_and_takes_along_what_later_fields_hold():
    context = Context(torch.tensor([4, 2]), (4, 2), torch.tensor([[1], [0]]), CallCounter())
    assert context.to(None) is context.to("cpu") is context
    moved = context.to("meta", non_blocking=True)
    assert type(moved) is Context and (moved.calls, moved.host_lengths) == (context.calls, (4, 2))
    assert moved.lengths.device.type == moved.places.device.type == "meta"
    assert context.lengths.device.type == context.places.device.type == "cpu"
    assert context.to("meta") is moved.to("meta") is moved


def test_what_a_step_remembers_is_its_own():
    context = Context(torch.tensor([4]), (4,), torch.tensor([[1]]), CallCounter())
    context._memo["positions"] = context.lengths
    assert "positions" not in context.to("meta")._memo


def test_the_counter_says_what_it_counted():
    assert repr(CallCounter()) == "CallCounter(total=0)"
