"""Memory stays flat over many calls: nothing of a call is kept when it has returned."""

import gc

import psutil
import pytest
import torch

from tests.robustness.drafts import KINDS, make_draft
from tests.tiny_targets import generate, tiny_target

# The allocator of libc keeps freed memory and splits it anew: after the warm-up the process was seen to move by less
# than 2 MB either way. One kept cache of a call is 0.3 MB, so 36 calls that leak would show as 11 MB.
SLACK = 8 * 2**20
WARM_UP = 24


def call(model, draft, index):
    """One short call whose shapes change with its index."""
    lengths = [(33, 3, 13), (150,), (70, 41)][index % 3]
    options = {"max_new_tokens": 3 + index % 4, "return_dict_in_generate": True, "output_scores": True}
    return generate(model, draft, lengths, seed=index, do_sample=index % 2 == 1, **options)


def live_tensors():
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def check(calls):
    """The process gains neither memory nor live tensors over calls of all kinds."""
    model, process = tiny_target("llama"), psutil.Process()
    drafts = [make_draft(kind, model) for kind in KINDS]
    for index in range(WARM_UP + calls):
        if index == WARM_UP:
            size, tensors = process.memory_info().rss, live_tensors()
        call(model, drafts[index % len(drafts)], index // len(drafts))
    assert live_tensors() <= tensors and process.memory_info().rss - size < SLACK


def test_many_calls():
    check(36)


@pytest.mark.soak
def test_two_thousand_calls():
    check(2000)
