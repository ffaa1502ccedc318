"""`generate --data`: every row once and in order, as plain `generate` continues it, also after an interruption."""

import json
import multiprocessing
import os
import socket
import sys
import time

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_longspec.cli import app
from hf_longspec.cli import rows as module
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
    output = tmp_path / "new" / "texts.jsonl"
    result = run_command(*arguments(tiny, data, output, "--batch", 2))
    assert result.exit_code == 0, result.output
    records = read(output)
    assert [record["row"] for record in records] == list(range(len(TEXTS)))
    assert [record["text"] for record in records] == expected
    assert [record["prompt_tokens"] for record in records] == list(map(len, TEXTS))
    assert {record["new_tokens"] for record in records} == {NEW} and list(output.parent.iterdir()) == [output]


def test_a_row_that_fails_is_written_as_such(tiny, tmp_path, expected):
    data = write(
        tmp_path / "data.jsonl", [{"text": TEXTS[0]}, {"text": None}, {"text": "x" * 17_000}, {"text": TEXTS[1]}]
    )
    output = tmp_path / "out.jsonl"
    result = run_command(*arguments(tiny, data, output, "--column", "text"))
    assert result.exit_code == 1 and "4 rows" in result.stderr and "2 failed" in result.stderr
    first, missing, long, last = read(output)
    assert (first["text"], last["text"]) == (expected[0], expected[1])
    assert "no prompt" in missing["error"] and "17000 tokens" in long["error"]


def test_a_batch_that_fails_is_tried_row_by_row(tiny, data, tmp_path, expected, monkeypatch):
    from transformers import LlamaForCausalLM

    calls = []

    def too_large(_, ids, **options):
        calls.append(len(ids))
        if len(ids) > 1 or ids.shape[1] == 1:
            raise torch.OutOfMemoryError("out of memory")

    before(monkeypatch, LlamaForCausalLM, "generate", too_large)
    output = tmp_path / "out.jsonl"
    assert run_command(*arguments(tiny, data, output, "--batch", 3)).exit_code == 1
    assert calls == [3, 1, 1, 1, 2, 1, 1]
    found = [record.get("text") for record in read(output)]
    assert found == [None if len(text) == 1 else answer for text, answer in zip(TEXTS, expected, strict=True)]


def test_an_interrupted_run_is_continued(tiny, data, tmp_path, expected, monkeypatch):
    output, part = tmp_path / "out.jsonl", tmp_path / "out.jsonl.part0"
    decoded = []

    def interrupt(_, batch):
        decoded.append(batch)
        if len(decoded) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        before(patch, module.Rows, "decode", interrupt)
        assert run_command(*arguments(tiny, data, output, "--batch", 2)).exit_code == 130
    assert len(read(part)) == 2 and not output.exists()
    with part.open("a") as file:
        file.write('{"row": 1, "te')  # as a full disk leaves it
    refused = run_command(*arguments(tiny, data, output))
    assert refused.exit_code == 2 and "2 finished rows" in refused.stderr and "--resume" in refused.stderr
    assert run_command(*arguments(tiny, data, output, "--resume")).exit_code == 0
    assert [record["text"] for record in read(output)] == expected and not part.exists()
    again = run_command(*arguments(tiny, data, output, "--resume"))
    assert again.exit_code == 0 and "no tokens yet" in again.stderr


# Forks of one process without threads that has imported torch and transformers, which takes seconds.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([__name__])


def main(environment, options):
    """The program in a process of its own."""
    os.environ |= environment
    sys.argv = ["hf-longspec", *options]
    app.main()


def start(tiny, data, output, process, port):
    """One of two processes, as `torchrun` starts them."""
    places = {"RANK": process, "LOCAL_RANK": process, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environment = {name: str(value) for name, value in places.items()}
    options = arguments(tiny, data, output, "--batch", 1, "--resume", "--device", "cpu")
    started = FORKS.Process(target=main, args=(environment, list(map(str, options))))
    started.start()
    return started


def test_two_processes_one_killed_and_both_restarted(tiny, tmp_path, expected):
    data = write(tmp_path / "prompts.jsonl", [{"prompt": text} for text in TEXTS * MANY])
    output = tmp_path / "out.jsonl"
    for is_killed in (True, False):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        both = [start(tiny, data, output, process, port) for process in (0, 1)]
        try:
            while is_killed and len(module.finished(tmp_path / "out.jsonl.part1")) < 2:
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
