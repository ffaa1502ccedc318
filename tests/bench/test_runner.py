"""What a runner measures, in which order, and what it leaves out, by a clock that only measurements move."""

import pytest

from hf_longspec.bench.results import of_kind, read_records
from hf_longspec.bench.runner import Runner


@pytest.fixture
def runner(tmp_path):
    """`runner(seconds, resume)`: a runner with its clock in `now`."""

    def make(seconds, resume=None):
        now = [0.0]
        made = Runner(tmp_path / "r.jsonl", "bench", None, seconds, {}, resume=resume, now=lambda: now[0])
        made.now = now
        return made

    return make


def measure(file, name, turn, seconds, log, **options):
    """A measurement of so many seconds, after a warm-up that takes none; both are noted."""

    def run():
        log.append((name, turn))
        file.now[0] += seconds
        return {"seconds": seconds}

    place = {"method": name, "turn": turn}
    return file.measure("run", place, run, lambda: log.append((name, "warm")), **options)


def test_a_measurement_is_made_once_after_one_warm_up(runner, tmp_path):
    log = []
    with runner(100) as file:
        for turn in (0, 1, 0):
            measure(file, "a", turn, 1.0, log)
    assert log == [("a", "warm"), ("a", 0), ("a", 1)]
    with runner(100, resume=True) as file:
        assert measure(file, "a", 1, 1.0, log)["seconds"] == 1.0
        measure(file, "a", 2, 1.0, log)
    assert log[3:] == [("a", "warm"), ("a", 2)]
    assert [run["turn"] for run in of_kind(read_records(tmp_path / "r.jsonl"), "run")] == [0, 1, 2]


def test_what_took_longer_than_is_left_is_left_out_and_the_rest_goes_on(runner):
    log = []
    with runner(10) as file:
        for turn in range(3):
            for name, seconds in (("slow", 5.0), ("fast", 1.0)):
                measure(file, name, turn, seconds, log)
    assert [entry for entry in log if entry[1] != "warm"] == [("slow", 0), ("fast", 0), ("fast", 1), ("fast", 2)]
    assert [(r["reason"], r["method"]) for r in of_kind(file.records, "skipped")] == [("no time left", "slow")]
    with runner(10) as file:  # one length for all
        for name, seconds in (("slow", 6.0), ("fast", 1.0)):
            measure(file, name, 0, seconds, [], alike=())
    assert [r["method"] for r in of_kind(file.records, "skipped")] == ["fast"]


def test_a_refusal_is_written_once_and_an_error_ends_the_run(runner):
    def refuse():
        raise ValueError("window=0: expected 1 or more.\nDetails.")

    with runner(10) as file:
        for turn in range(2):
            assert file.measure("run", {"method": "a", "turn": turn}, refuse) is None
    assert [(r["reason"], r["method"]) for r in of_kind(file.records, "skipped")] == [
        ("window=0: expected 1 or more.", "a")
    ]
    with pytest.raises(ZeroDivisionError), runner(10) as file:
        file.measure("run", {"method": "a"}, lambda: {"value": 1 / 0})
    assert not of_kind(file.records, "end")
