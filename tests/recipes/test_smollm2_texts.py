"""The texts that drafts of SmolLM2 are trained on: prompts, and conversations of prompts and answers; its figure."""

import json
import os
import subprocess
import sys

import pytest

from tests.scripts import PROJECT, script


@pytest.fixture
def rows_of(monkeypatch, tmp_path):
    """`rows_of(command, options)`: the rows that a command writes."""
    program = script("conversations", "recipes/smollm2")

    def run(*options):
        output = tmp_path / "rows.jsonl"
        monkeypatch.setattr(sys, "argv", ["conversations.py", *map(str, options), "--output", str(output)])
        program.main()
        return [json.loads(line) for line in output.read_text().splitlines()]

    return run


def test_a_user_is_about_to_speak(rows_of):
    rows = rows_of("users", "--rows", 7)
    assert len(rows) == 7 and len({row["prompt"] for row in rows}) == 5
    assert all(row["prompt"].endswith("<|im_start|>user\n") for row in rows)


def test_requests_and_pieces_are_mixed(rows_of, tmp_path):
    novels, requests = tmp_path / "novels" / "inner", tmp_path / "requests.jsonl"
    novels.mkdir(parents=True)
    (novels / "a.txt").write_text("\n".join(f"It was line {number} of the story." for number in range(600)))
    (novels / "b.py").write_text("no text" * 2000)
    # an answer that is too short, one twice, and one with a separator that is no end of a line
    asked = ["Hm?", "What is a median good for?", "What is a median good for?", "Plan a trip\u2028to Norway."]
    requests.write_text("".join(json.dumps({"row": row, "text": text}) + "\n" for row, text in enumerate(asked)))
    rows = rows_of("prompts", "--requests", requests, "--novels", tmp_path / "novels", "--pieces", 5, "--functions", 4)
    texts = [row["prompt"] for row in rows]
    assert len(texts) == 2 + 5 + 4 and {asked[1], asked[3]} <= set(texts)
    assert sum("of the story" in text for text in texts) == 5 and not any("no text" in text for text in texts)
    code = [text for text in texts if "```python" in text]
    assert len(code) == 4 and all("def " in text or "class " in text for text in code)
    again = rows_of("prompts", "--requests", requests, "--novels", tmp_path / "novels", "--pieces", 5, "--functions", 4)
    assert again == rows


def test_answers_follow_their_prompts(rows_of, tmp_path):
    prompts, first, second = (tmp_path / name for name in ("prompts.jsonl", "first.jsonl", "second.jsonl"))
    prompts.write_text("".join(json.dumps({"prompt": f"question {row}"}) + "\n" for row in range(4)))
    first.write_text('{"row": 2, "text": "answer 2"}\n{"row": 1, "error": "no memory"}\n')
    second.write_text('{"row": 0, "text": "answer 0"}\n')
    rows = rows_of("join", "--prompts", prompts, "--answers", first, "--answers", second)
    assert [[turn["content"] for turn in row["messages"]] for row in rows] == [
        ["question 2", "answer 2"],
        ["question 0", "answer 0"],
    ]
    assert [turn["role"] for turn in rows[0]["messages"]] == ["user", "assistant"]


def test_the_figure_is_measured_for_each_batch(tmp_path):
    """By the script for a GPU, on the bundled target."""
    settings = {"TARGET": "hub_cards/tiny-target", "DRAFTS": "ngram", "CONTEXTS": "64", "DTYPE": "float32"}
    settings |= {"TOKENS": "4", "REPEATS": "1", "BATCHES": "1 2", "PYTHON": sys.executable}
    command = ["sh", "recipes/smollm2/gpu_figure.sh", str(tmp_path)]
    subprocess.run(command, cwd=PROJECT, env=os.environ | settings, check=True, capture_output=True)
    for batch in "12":
        rows = [json.loads(line) for line in (tmp_path / f"batch-{batch}.jsonl").read_text().splitlines()]
        assert len(rows) > 2 and "identical" in (tmp_path / f"batch-{batch}.txt").read_text()
