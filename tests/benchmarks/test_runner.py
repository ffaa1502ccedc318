"""What a run measures, in which order, and what it leaves out, by a clock that only measurements move."""

import json

import pytest

from benchmarks.harness import ratios, time_in_turns
from benchmarks.records import of_kind, read_records
from benchmarks.runner import Run

# A row of the page that `batching` has.
ROW = {"draft": "a", "speed": 1.0, "lowest": 1.0, "highest": 1.0, "processor": 1.0, "first": 1.0}


@pytest.fixture
def open_run(tmp_path):
    """`open_run(seconds, **options)`: a run with its clock in `now`."""

    def make(seconds, **options):
        now = [0.0]
        made = Run(tmp_path / "r.jsonl", "batching", seconds, now=lambda: now[0], quiet=True, **options)
        made.now = now
        return made

    return make


def measure(file, name, turn, seconds, log, **options):
    """A measurement of so many seconds, after a warm-up that takes none; both are noted."""

    def run():
        log.append((name, turn))
        file.now[0] += seconds
        return ROW

    place = {"method": name, "turn": turn}
    return file.measure("batching", place, run, lambda: log.append((name, "warm")), **options)


def test_a_measurement_is_made_once_after_one_warm_up_and_an_interrupted_run_goes_on(open_run, tmp_path):
    log, path = [], tmp_path / "r.jsonl"

    def three_and_stop(file):
        for turn in (0, 1, 0):
            measure(file, "a", turn, 1.0, log)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), open_run(100) as file:
        three_and_stop(file)
    assert log == [("a", "warm"), ("a", 0), ("a", 1)]
    assert "The run was not finished." in path.with_suffix(".md").read_text()
    with path.open("a") as cut_off:
        cut_off.write('{"kind": "ba')
    with open_run(100, resume=True) as file:
        assert measure(file, "a", 1, 1.0, log) is not None
        measure(file, "a", 2, 1.0, log)
    assert log[3:] == [("a", "warm"), ("a", 2)]
    records = read_records(path)
    assert [record["turn"] for record in of_kind(records, "batching")] == [0, 1, 2]
    assert of_kind(records, "resumed") and records[-1]["kind"] == "end"


def test_what_took_longer_than_is_left_is_left_out_and_the_rest_goes_on(open_run):
    log = []
    with open_run(10) as file:
        for turn in range(3):
            for name, seconds in (("slow", 5.0), ("fast", 1.0)):
                measure(file, name, turn, seconds, log)
    assert [entry for entry in log if entry[1] != "warm"] == [("slow", 0), ("fast", 0), ("fast", 1), ("fast", 2)]
    assert [(r["reason"], r["method"]) for r in of_kind(file.records, "skipped")] == [("no time left", "slow")]
    with open_run(10) as file:  # one length for all
        for name, seconds in (("slow", 6.0), ("fast", 1.0)):
            measure(file, name, 0, seconds, [], alike=())
    assert [r["method"] for r in of_kind(file.records, "skipped")] == ["fast"]


def test_a_refusal_is_written_once_and_an_error_ends_the_run(open_run):
    def refuse():
        raise ValueError("window=0: expected 1 or more.\nDetails.")

    with open_run(10) as file:
        for turn in range(2):
            assert file.measure("batching", {"method": "a", "turn": turn}, refuse) is None
    assert [r["reason"] for r in of_kind(file.records, "skipped")] == ["window=0: expected 1 or more."]
    with pytest.raises(ZeroDivisionError), open_run(10) as file:
        file.measure("batching", {"method": "a"}, lambda: {"value": 1 / 0})
    assert not of_kind(file.records, "end")


def test_other_settings_and_another_environment_are_not_resumed(open_run, tmp_path):
    with open_run(10, settings={"tokens": (8, 9)}) as file:
        file.write("batching", **ROW)
    content = (tmp_path / "r.jsonl").read_bytes()
    for change, message in ({"settings": {"tokens": [8]}}, r"tokens was \[8, 9\], now \[8\]"), (
        {"settings": {"tokens": [8, 9]}, "facts": {"torch": "0"}}, "torch was .*, now 0",
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            open_run(10, resume=True, **change)
    assert (tmp_path / "r.jsonl").read_bytes() == content
    (tmp_path / "r.jsonl").write_text(json.dumps({"kind": "environment", "benchmark": "gate"}) + "\n")
    with pytest.raises(ValueError, match=r"--resume .* not a result file of `batching`"):
        open_run(10, resume=True)


def test_times_and_ratios_are_taken_within_a_turn():
    seconds = time_in_turns({"a": iter([1.0, 2.0]).__next__, "b": iter([3.0, 4.0]).__next__}, repeats=2)
    assert seconds == {"a": [1.0, 2.0], "b": [3.0, 4.0]}
    # the machine was half as fast in the second repeat: the ratio of medians would be 1.5
    assert ratios([10.0, 5.0, 10.0], [5.0, 2.5, 10.0]) == {"median": 2.0, "low": 1.0, "high": 2.0, "count": 3}
    with pytest.raises(ValueError):
        ratios([1.0, 2.0], [1.0])
