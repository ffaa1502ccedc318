"""`generate --data`: every row once, as plain `generate` continues it, also after an interruption."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_longspec import Batcher
from hf_longspec.cli import CommandError, rows
from tests.cli.conftest import run_command
from tests.watching import before

NEW = 10
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


@pytest.fixture
def alone(monkeypatch):
    """Rows that were continued outside of a batch, by the seeds that are set for them."""
    seeds = []
    before(monkeypatch, rows, "set_seed", seeds.append)
    return seeds


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def read(path):
    """The texts of an output by row; every row is there once."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert len({record["row"] for record in records}) == len(records)
    return {record["row"]: record.get("text") for record in records}


def run(tiny, data, output, *more):
    arguments = ["--target", tiny.target, "--draft", "ngram", "--max-new-tokens", NEW, "--data", data]
    return run_command("generate", *arguments, "--output", output, *more)


def test_rows_are_continued_in_batches_and_written_when_they_end(tiny, data, tmp_path, expected, alone):
    """Beside files of the user, under a name with wildcards."""
    output = tmp_path / "new" / "texts[1].jsonl"
    other = output.with_name(output.name + ".new")
    output.parent.mkdir()
    other.write_text("mine")
    result = run(tiny, data, output, "--batch", 2)
    assert result.exit_code == 0 and "5 rows in" in result.stderr, result.output
    assert read(output) == dict(enumerate(expected)) and not alone
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert all(record["prompt_tokens"] == len(TEXTS[record["row"]]) for record in records)
    assert {record["new_tokens"] for record in records} == {NEW} and len({record["digest"] for record in records}) == 5
    assert sorted(output.parent.iterdir()) == [output, other] and other.read_text() == "mine"


def test_shards_have_all_rows(tiny, data, tmp_path, expected):
    found = {}
    for share in (0, 1):
        output = tmp_path / f"{share}.jsonl"
        assert run(tiny, data, output, "--shard", f"{share}/2").exit_code == 0
        assert {row % 2 for row in read(output)} == {share}
        found |= read(output)
    assert found == dict(enumerate(expected))
    refused = run(tiny, data, output, "--shard", "0/2", "--resume")
    assert refused.exit_code == 2 and "2 rows, such as 1, have another prompt" in refused.stderr


def test_a_row_that_fails_is_written_as_such_and_tried_again(tiny, tmp_path, expected, monkeypatch):
    texts = [TEXTS[0], None, "x" * 17_000, "a lone \ud800", TEXTS[4]]
    data = write(tmp_path / "data.jsonl", [{"text": text} for text in texts])
    output = tmp_path / "out.jsonl"
    result = run(tiny, data, output, "--column", "text")
    assert result.exit_code == 1 and "5 rows" in result.stderr and "3 failed" in result.stderr
    assert read(output) == {0: expected[0], 1: None, 2: None, 3: None, 4: expected[4]}
    errors = {record["row"]: record.get("error") for record in map(json.loads, output.read_text().splitlines())}
    assert "no prompt" in errors[1] and "17000 tokens" in errors[2] and errors[3]
    write(data, [{"text": text} for text in TEXTS])
    submitted = []
    before(monkeypatch, Batcher, "submit", lambda _, ids, **how: submitted.append(len(ids)))
    assert run(tiny, data, output, "--column", "text", "--resume").exit_code == 0
    assert read(output) == dict(enumerate(expected)) and sorted(submitted) == sorted(
        len(TEXTS[row]) for row in (1, 2, 3)
    )


@pytest.mark.parametrize("sampled", [(), ("--temperature", 1, "--seed", 20)], ids=["greedy", "sampled"])
def test_rows_that_a_batch_refuses_are_continued_alone(tiny, data, tmp_path, monkeypatch, alone, sampled):
    """One of them, and all: the texts are those of a batch."""
    assert run(tiny, data, tmp_path / "whole.jsonl", *sampled).exit_code == 0 and not alone

    def refuse(batcher, ids, **how):
        if len(ids) == 1:
            raise ValueError("not in a batch")

    with monkeypatch.context() as patch:
        before(patch, Batcher, "submit", refuse)
        assert run(tiny, data, tmp_path / "one.jsonl", *sampled).exit_code == 0
    assert alone == [20 + 2 if sampled else 2]
    before(monkeypatch, Batcher, "__init__", lambda *_: int("no batches"))
    assert run(tiny, data, tmp_path / "none.jsonl", *sampled).exit_code == 0 and len(alone) == 1 + len(TEXTS)
    assert read(tmp_path / "whole.jsonl") == read(tmp_path / "one.jsonl") == read(tmp_path / "none.jsonl")


def test_an_interrupted_run_is_continued(tiny, data, tmp_path, expected, monkeypatch):
    output, written = tmp_path / "out.jsonl", []
    with monkeypatch.context() as patch:
        before(patch, rows.Progress, "update", lambda *_: written.append(len(read(output))) or interrupt_at(3, written))
        assert run(tiny, data, output, "--batch", 2).exit_code == 130
    assert written == [1, 2, 3]  # as soon as a row ends
    with output.open("a") as file:
        file.write('{"row": 1, "te')  # as a full disk leaves it
    refused = run(tiny, data, output)
    assert refused.exit_code == 2 and "out.jsonl. Pass --resume" in refused.stderr and "--resume" in refused.stderr
    kept = output.read_bytes()
    other = run(tiny, data, output, "--resume", "--max-new-tokens", NEW + 1)
    assert other.exit_code == 2 and "other settings" in other.stderr and output.read_bytes() == kept
    assert run(tiny, data, output, "--resume").exit_code == 0 and read(output) == dict(enumerate(expected))
    again = run(tiny, data, output, "--resume")
    assert again.exit_code == 0 and "0 of them new" in again.stderr and read(output) == dict(enumerate(expected))


def interrupt_at(count, calls):
    """Press Ctrl-C in the call of this number."""
    if len(calls) == count:
        raise KeyboardInterrupt


DIGESTS = {row: rows.digest_of(text, {}) for row, text in enumerate(TEXTS)}
LINES = [json.dumps({"row": row, "text": TEXTS[row], "digest": DIGESTS[row]}) for row in (2, 0, 1)]


def test_a_file_that_is_cut_off_at_any_byte_costs_its_last_row_alone(tmp_path):
    output = tmp_path / "out.jsonl"
    whole = "".join(line + "\n" for line in LINES).encode()
    for size in range(len(whole) + 1):
        output.write_bytes(whole[:size])
        assert list(rows.finished_rows(output, DIGESTS)) == [2, 0, 1][: whole[:size].count(b"\n")]


@pytest.mark.parametrize(
    ("lines", "texts", "named"),
    [
        (LINES, [*TEXTS[:2], *TEXTS[:1:-1]], "1 rows, such as 2, have another prompt"),
        (LINES, ["other"] * 5, "2 rows, such as 0, have another prompt"),
        (LINES, TEXTS[:2], "1 rows, such as 2, have another prompt"),
        ([*LINES, '{"name": "mine"}'], TEXTS, "line 4: not a row of this command"),
        ([*LINES, "mine", LINES[0][:9]], TEXTS, "line 4: not a row of this command"),
    ],
)
def test_rows_of_other_prompts_and_other_lines_are_not_kept(tmp_path, lines, texts, named):
    output = tmp_path / "out.jsonl"
    output.write_text("\n".join(lines))
    with pytest.raises(CommandError, match=named):
        rows.finished_rows(output, {row: rows.digest_of(text, {}) for row, text in enumerate(texts)})
