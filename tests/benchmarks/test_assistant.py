"""The comparison with transformers' assisted generation runs, and compares the texts."""

from benchmarks.assistant import main


def test_a_small_run(capsys):
    main(["--layers", "2", "--length", "40", "--tokens", "6", "--turns", "1", "--gamma", "2"])
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("turn 0: transformers ") and printed[-1].startswith("tau ")
    assert 1 <= float(printed[-1].split()[1]) <= 3
