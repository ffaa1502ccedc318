"""Drafts of every kind, and what a call returns, survive copying, pickling and `torch.save`; used ones too."""

import copy
import io
import pickle
from functools import partial
from itertools import cycle

import pytest
import torch

from tests.robustness.drafts import KINDS, make_draft
from tests.tiny_targets import generate, tiny_target


def through_torch(thing):
    """Saved and loaded as a whole object, as old training scripts do."""
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


WAYS = {"pickle": lambda thing: pickle.loads(pickle.dumps(thing)), "deepcopy": copy.deepcopy, "torch": through_torch}


@pytest.fixture(scope="module")
def run():
    run = partial(generate, tiny_target("llama"), return_dict_in_generate=True, output_scores=True)
    run.model, run.text = run.args[0], run(None).sequences.tolist()
    return run


@pytest.mark.parametrize(("kind", "way"), list(zip(KINDS, cycle(WAYS))))
def test_a_draft_and_the_output_of_its_call(run, kind, way):
    draft, way = make_draft(kind, run.model), WAYS[way]
    out = run(draft)
    used = copy.copy(out.speculation)
    again = way(out)
    assert again.sequences.tolist() == run.text and again.speculation == used
    assert again.speculation.to_dict() == used.to_dict() and str(again.speculation) == str(used)
    assert again.past_key_values.get_seq_length() == out.past_key_values.get_seq_length()
    assert all(torch.equal(*pair) for pair in zip(again.scores, out.scores, strict=True))
    twin = way(draft)
    assert twin is not draft and type(twin) is type(draft)
    assert twin.generation_config.to_dict() == draft.generation_config.to_dict()
    assert twin.config.to_dict() == draft.config.to_dict() and twin.last_speculation == used
    for name, weight in draft.state_dict().items():
        copied = twin.state_dict()[name]
        assert torch.equal(copied, weight) and copied.data_ptr() != weight.data_ptr()
    out = run(twin)
    assert out.sequences.tolist() == run.text
    assert out.speculation.acceptance_histogram == used.acceptance_histogram  # it drafts the same
    assert draft.last_speculation == used  # the twin has statistics of its own
