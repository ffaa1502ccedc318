"""A target divided among two processes (`tp_plan="auto"`, gloo): the texts are those of the undivided target."""

import json
from functools import partial

import pytest
from torch.multiprocessing import start_processes

from tests.robustness.drafts import make_draft
from tests.robustness.tensor_parallel_worker import KINDS, LENGTHS, NEW, RANKS, choices, gate_with, main
from tests.tiny_targets import generate, tiny_target


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The records of two ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    tiny_target("llama").save_pretrained(folder / "target")
    start_processes(main, (str(folder / "target"), str(folder)), RANKS, start_method="spawn")
    records = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]
    assert [seen["size"] for seen in records] == [RANKS] * RANKS  # the target is divided
    return records


@pytest.fixture(scope="module")
def whole():
    """The same in one process."""
    run = partial(generate, tiny_target("llama"), lengths=LENGTHS, max_new_tokens=NEW)
    run.model = run.args[0]
    return run


@pytest.mark.parametrize("kind", KINDS)
def test_every_draft(ranks, whole, kind):
    """Greedy and sampled text, and the same numbers of accepted tokens: no rank drafts from its own heads alone."""
    draft = make_draft(kind, whole.model)
    expected = whole(draft).tolist()
    histogram = draft.last_speculation.acceptance_histogram
    assert expected == whole(None).tolist()
    # with the first rank's seed, although every rank has its own
    sampled = whole(make_draft(kind, whole.model), do_sample=True, temperature=1.3, top_k=0).tolist()
    for seen in ranks:
        assert seen["greedy"]["none"] == seen["greedy"][kind] == expected
        assert seen["sampled"][kind] == sampled
        assert seen["histograms"][kind] == histogram
    assert kind == "ngram" or sum(histogram[1:]) > 0


def test_ranks_stop_together(ranks, whole):
    """The first rank's criterion decides; the other rank's never says stop."""
    width = max(LENGTHS) + 5
    expected = [row[:width] for row in whole(None).tolist()]
    assert [seen["stopped"] for seen in ranks] == [expected] * RANKS


def test_ranks_follow_the_gate_of_the_first(ranks):
    """Their clocks differ, and so would their decisions."""
    assert [seen["gate"] for seen in ranks] == [list(map(list, choices(gate_with(None), seed=0)))] * RANKS
    assert choices(gate_with(None), seed=1) != choices(gate_with(None), seed=0)


def test_compiled_steps_are_refused(ranks):
    for seen in ranks:
        assert seen["refused"].startswith("compile='compile'")
