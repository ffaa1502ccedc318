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


def growth(calls, keep=False, warm_up=WARM_UP):
    """Bytes by which the process grew over `calls` calls of all kinds, and live tensors that it gained."""
    model = tiny_target("llama")
    drafts = [make_draft(kind, model) for kind in KINDS]
    kept, process, start = [], psutil.Process(), None
    for index in range(warm_up + calls):
        if index == warm_up:
            start = process.memory_info().rss, live_tensors()
        out = call(model, drafts[index % len(drafts)], index // len(drafts))
        if keep:
            kept.append(out)
    del out
    return process.memory_info().rss - start[0], live_tensors() - start[1]


def live_tensors():
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def check(calls):
    size, tensors = growth(calls)
    assert tensors <= 0 and size < SLACK


def test_many_calls():
    check(36)


@pytest.mark.soak
def test_two_thousand_calls():
    check(2000)
