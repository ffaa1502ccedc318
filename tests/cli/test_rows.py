"""`generate --data`: every row once and in order, as plain `generate` continues it, also after an interruption."""

import json
import multiprocessing
import os
import random
import socket
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_longspec.cli import CommandError, app
from hf_longspec.cli import rows as module
from hf_longspec.cli.work import Work, folder_of
from tests.cli.conftest import run_command
from tests.watching import before

NEW, MANY = 10, 4
TEXTS = [
    "one two three, one two",
    "def f(x):\n    return",
    "a",
    "class Shape:\n    def area(self):\n        ",
    "the sea",
]


@pytest.fixture(scope="module")
def expected(tiny):
    """Texts of plain `generate`, row by row."""
    model = AutoModelForCausalLM.from_pretrained(tiny.target, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tiny.target)
    texts = []
    for text in TEXTS:
        inputs = tokenizer(text, return_tensors="pt")
        out = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
        texts.append(tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    return texts


@pytest.fixture
def data(tmp_path):
    return write(tmp_path / "prompts.jsonl", [{"prompt": text} for text in TEXTS])


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def arguments(tiny, data, output, *more):
    options = {"--target": tiny.target, "--draft": "ngram", "--max-new-tokens": NEW, "--data": data, "--output": output}
    return ["generate", *(part for option in options.items() for part in option), *more]


def test_rows_are_continued_in_batches_and_written_in_order(tiny, data, tmp_path, expected):
    """Under a name with wildcards, beside files of the user that are named as work files might be."""
    output = tmp_path / "new" / "texts[1].jsonl"
    others = [output.with_name(output.name + end) for end in (".new", ".part0", ".part1")]
    output.parent.mkdir()
    for other in others:
        other.write_text("mine")
    result = run_command(*arguments(tiny, data, output, "--batch", 2))
    assert result.exit_code == 0, result.output
    records = read(output)
    assert [record["row"] for record in records] == list(range(len(TEXTS)))
    assert [record["text"] for record in records] == expected
    assert [record["prompt_tokens"] for record in records] == list(map(len, TEXTS))
    assert {record["new_tokens"] for record in records} == {NEW}
    assert sorted(output.parent.iterdir()) == [output, *others] and {other.read_text() for other in others} == {"mine"}


def test_a_row_that_fails_is_written_as_such_and_tried_again(tiny, tmp_path, expected, monkeypatch):
    texts = [TEXTS[0], None, "x" * 17_000, "a lone \ud800", TEXTS[4]]
    data = write(tmp_path / "data.jsonl", [{"text": text} for text in texts])
    output = tmp_path / "out.jsonl"
    result = run_command(*arguments(tiny, data, output, "--column", "text"))
    assert result.exit_code == 1 and "5 rows" in result.stderr and "3 failed" in result.stderr
    first, missing, long, surrogate, last = read(output)
    assert (first["text"], last["text"]) == (expected[0], expected[4])
    assert "no prompt" in missing["error"] and "17000 tokens" in long["error"] and surrogate["error"]
    write(data, [{"text": text} for text in TEXTS])
    decoded = []
    before(monkeypatch, module.RowDecoder, "finish", lambda _, row, *__: decoded.append(row))
    assert run_command(*arguments(tiny, data, output, "--column", "text", "--resume")).exit_code == 0
    assert [record["text"] for record in read(output)] == expected and sorted(decoded) == [1, 2, 3]


def test_a_row_that_fails_is_tried_alone(tiny, data, tmp_path, expected, monkeypatch):
    from transformers import LlamaForCausalLM

    calls = []

    def too_large(_, ids, **options):
        calls.append(ids.shape[1])
        if ids.shape[1] == 1:
            raise torch.OutOfMemoryError("out of memory")

    before(monkeypatch, LlamaForCausalLM, "generate", too_large)
    output = tmp_path / "out.jsonl"
    assert run_command(*arguments(tiny, data, output, "--batch", 3)).exit_code == 1
    assert calls == [*sorted(map(len, TEXTS), reverse=True), 1]
    found = [record.get("text") for record in read(output)]
    assert found == [None if len(text) == 1 else answer for text, answer in zip(TEXTS, expected, strict=True)]


def test_an_interrupted_run_is_continued(tiny, data, tmp_path, expected, monkeypatch):
    output = tmp_path / "out.jsonl"
    part = folder_of(output) / "rows-0.jsonl"
    decoded = []

    def interrupt(_, row, *__):
        decoded.append(row)
        if len(decoded) == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        before(patch, module.RowDecoder, "finish", interrupt)
        assert run_command(*arguments(tiny, data, output, "--batch", 2)).exit_code == 130
    header, *rows = read(part)
    assert header["data"] == str(data) and len(rows) == 2 and not output.exists()
    with part.open("a") as file:
        file.write('{"row": 1, "te')  # as a full disk leaves it
    refused = run_command(*arguments(tiny, data, output))
    assert refused.exit_code == 2 and "rows-0.jsonl" in refused.stderr and "--resume" in refused.stderr
    other = run_command(*arguments(tiny, data, output, "--resume", "--max-new-tokens", NEW + 1))
    assert other.exit_code == 2 and f"max_new_tokens was {NEW}, now {NEW + 1}" in other.stderr
    assert run_command(*arguments(tiny, data, output, "--resume")).exit_code == 0
    assert [record["text"] for record in read(output)] == expected and not part.parent.exists()
    again = run_command(*arguments(tiny, data, output, "--resume"))
    assert again.exit_code == 0 and "no tokens yet" in again.stderr


def work_of(tmp_path, prompts=TEXTS, **settings):
    return Work(tmp_path / "out.jsonl", "prompts.jsonl", prompts, {"max_new_tokens": NEW, **settings})


def complete(tmp_path):
    """Continue a run without a model; returns the rows that it had to write."""
    work = work_of(tmp_path)
    done = work.finished()
    work.begin(done)
    pending = [row for row in range(len(TEXTS)) if row not in done]
    for process in (0, 1):
        write = work.writer(process)
        for row in pending[process::2]:
            write(row, text=TEXTS[row])
    work.end()
    assert [(record["row"], record["text"]) for record in read(tmp_path / "out.jsonl")] == list(enumerate(TEXTS))
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]
    return pending


def interrupted(tmp_path):
    """A run whose processes wrote three rows and two; returns the file of the first."""
    work = work_of(tmp_path)
    work.begin({})
    for process in (0, 1):
        write = work.writer(process)
        for row in range(process, len(TEXTS), 2):
            write(row, text=TEXTS[row])
    return folder_of(tmp_path / "out.jsonl") / "rows-0.jsonl"


def test_a_file_that_is_cut_off_at_any_byte_costs_its_last_row_alone(tmp_path):
    whole = interrupted(tmp_path).read_bytes()
    for size in range(len(whole) + 1):
        part = interrupted(tmp_path)
        part.write_bytes(whole[:size])
        kept = max(whole[:size].count(b"\n") - 1, 0)
        assert complete(tmp_path) == [0, 2, 4][kept:]
        (tmp_path / "out.jsonl").unlink()


def test_a_run_that_ends_at_any_step_of_merging_is_continued(tmp_path, monkeypatch):
    stop = 0
    while True:
        interrupted(tmp_path)
        steps = iter(range(100))

        def end(*_, steps=steps, stop=stop, **__):
            if next(steps) == stop:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            for name in ("mkdir", "write_text", "replace", "unlink", "rmdir"):
                before(patch, Path, name, end)
            try:
                complete(tmp_path)
            except KeyboardInterrupt:
                stop += 1
            else:
                break
        complete(tmp_path)
        (tmp_path / "out.jsonl").unlink()
    assert stop > 10


@pytest.mark.parametrize("is_finished", [False, True])
@pytest.mark.parametrize(
    ("prompts", "settings", "named"),
    [
        (TEXTS[:3], {}, "3, 4 of its rows"),
        ([*TEXTS[:2], *TEXTS[:1:-1]], {}, "2, 4 of its rows"),
        (["other"] * 5, {}, "0, 1, 2 and 2 more of its rows"),
        (TEXTS, {"seed": 1}, "settings"),
    ],
)
def test_rows_of_other_prompts_or_settings_are_not_kept(tmp_path, prompts, settings, named, is_finished):
    interrupted(tmp_path)
    if is_finished:
        work_of(tmp_path).end()
    with pytest.raises(CommandError, match=named):
        work_of(tmp_path, prompts, **settings).finished()
    assert len(work_of(tmp_path, [*TEXTS, "one more"]).finished()) == len(TEXTS)


def test_rows_of_a_run_that_writes_to_the_same_file_at_the_same_time_are_not_taken(tmp_path):
    """Of more prompts, or of as many others; what is missing is not counted."""
    for prompts in (TEXTS[:2], ["other"] * 5):
        interrupted(tmp_path)
        with pytest.raises(CommandError, match="another run writes to it"):
            work_of(tmp_path, prompts).end()
        assert not (tmp_path / "out.jsonl").exists()


# Forks of one process without threads that has imported torch and transformers, which takes seconds.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([__name__])


def main(environment, options):
    """The program in a process of its own."""
    os.environ |= environment
    sys.argv = ["hf-longspec", *options]
    app.main()


def start(tiny, data, output, process, port, world=2):
    """One of several processes, as `torchrun` starts them."""
    places = {"RANK": process, "LOCAL_RANK": process, "WORLD_SIZE": world}
    places |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environment = {name: str(value) for name, value in places.items()} if world > 1 else {}
    options = arguments(tiny, data, output, "--batch", 1, "--resume", "--device", "cpu")
    started = FORKS.Process(target=main, args=(environment, list(map(str, options))))
    started.start()
    return started


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def written(output, process):
    """Rows of the process in the present part of a run."""
    try:
        return (folder_of(output) / f"rows-{process}.jsonl").read_bytes().count(b"\n") - 1
    except FileNotFoundError:
        return 0


def begun(output):
    """When the present part of a run began to write."""
    try:
        return (folder_of(output) / "rows.jsonl").stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def test_two_processes_one_killed_and_both_restarted(tiny, tmp_path, expected):
    data = write(tmp_path / "prompts.jsonl", [{"prompt": text} for text in TEXTS * MANY])
    output = tmp_path / "out.jsonl"
    for is_killed in (True, False):
        port = free_port()
        both = [start(tiny, data, output, process, port) for process in (0, 1)]
        try:
            while is_killed and written(output, 1) < 2:
                assert all(process.is_alive() for process in both)
                time.sleep(0.01)
            if is_killed:
                both[1].kill()
                both[0].terminate()  # torchrun ends the others
            for process in both:
                process.join(timeout=120)
        finally:
            for process in both:
                process.kill()
    assert [process.exitcode for process in both] == [0, 0]
    records = read(output)
    assert [record["row"] for record in records] == list(range(MANY * len(TEXTS)))
    assert [record["text"] for record in records] == expected * MANY
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "prompts.jsonl"]


@pytest.mark.soak
@pytest.mark.parametrize("world", [1, 2])
def test_fifty_kills_at_random_moments(tiny, tmp_path, expected, world):
    """After rows exist; every row is there once and in order, and every part of the run writes new ones."""
    data = write(tmp_path / "prompts.jsonl", [{"prompt": text} for text in TEXTS * 40])
    output, moments, kills = tmp_path / "out.jsonl", random.Random(0), 0
    while kills < 50 or not output.exists():
        port, last = free_port(), begun(output)
        group = [start(tiny, data, output, process, port, world) for process in range(world)]
        try:
            while kills < 50 and all(process.is_alive() for process in group):
                if begun(output) > last and any(written(output, process) > 0 for process in range(world)):
                    break
                time.sleep(0.002)
            if kills < 50:
                time.sleep(moments.uniform(0, 0.3))
                kills += any(process.is_alive() for process in group)
                for process in moments.sample(group, world):
                    process.kill()
            for process in group:
                process.join(timeout=600)
        finally:
            for process in group:
                process.kill()
        if output.exists():
            records = read(output)
            assert [record["row"] for record in records] == list(range(40 * len(TEXTS)))
            assert [record["text"] for record in records] == expected * 40
            if kills < 50:
                output.unlink()  # the next kill is one of a new run
