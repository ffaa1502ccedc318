"""Prompts from texts, JSON lines and data sets: columns, windows, chat templates."""

import ast
import json
from itertools import pairwise
from pathlib import Path

import pytest
from datasets import Dataset

from hf_longspec.cli import CommandError, bench
from hf_longspec.cli.texts import HELD_OUT, prompts_of, read_source, window_starts


def test_lines_are_read_by_column_also_with_separators_inside(tmp_path):
    """A list stands for its first text, as the turns of a conversation."""
    texts = ["one\u2028two\x85three\x0bfour", "b"]
    path = tmp_path / "d.jsonl"
    lines = (json.dumps({"text": each, "turns": ["Q?", each]}, ensure_ascii=False) + "\n" for each in texts)
    path.write_text("".join(lines), encoding="utf-8")
    assert read_source(str(path)) == texts and read_source(str(path), "turns") == ["Q?", "Q?"]
    path.write_text('{"prompt": "a"}\n{"prompt": 1}\n{"prompt": ""}\n[2]\n')
    assert list(prompts_of(str(path), None)) == ["a", None, None, None]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "x", "label": 1}', "row 1: text is not a text; the keys are prompt, label"),
        ('{"text": "x"}\n{"text": []}', "row 2: text is not a text"),
        ("[1]", "row 1: text is not a text; the keys are none, it is a list"),
        ('{"text": "x"}\n{"text"\n', "line 2: "),
        ("\n", "has no rows"),
        (b"\xff\xfe\x00", "d.jsonl is not UTF-8"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_line(content, message, tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        read_source(str(path))


def test_a_folder_of_texts_and_a_data_set_as_datasets_reads_it(tmp_path):
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "b.txt").write_text("B", encoding="utf-8")
    (tmp_path / "books" / "a.txt").write_text("A", encoding="utf-8")
    assert read_source(str(tmp_path / "books")) == ["A", "B"]
    (tmp_path / "sets").mkdir()
    for split, count in (("train", 2), ("test", 300)):
        rows = Dataset.from_list([{"report": f"{split} {number}"} for number in range(count)])
        rows.to_parquet(str(tmp_path / "sets" / f"{split}.parquet"))
    found = read_source(str(tmp_path / "sets"), "report")
    assert len(found) == 256 and found[1] == "test 1"
    for absent in (tmp_path / "absent", "no/such/set"):
        with pytest.raises(ValueError, match="--data"):
            read_source(str(absent))


def test_the_standard_library_gives_the_modules_that_the_training_script_leaves_out():
    assert read_source("builtin")[0].startswith("# Author: Steven J. Bethard") and HELD_OUT[0] == "argparse"
    script = Path(__file__).parents[2] / "recipes" / "train_tiny_target.py"
    assignments = [node for node in ast.parse(script.read_text(encoding="utf-8")).body if isinstance(node, ast.Assign)]
    named = {node.targets[0].id: node.value for node in assignments if isinstance(node.targets[0], ast.Name)}
    assert ast.literal_eval(named["HELD_OUT"]) == HELD_OUT


@pytest.mark.parametrize(
    ("lengths", "count"), [([1000], 1), ([1000], 24), ([1000, 300, 100], 7), ([500, 480, 99], 2), ([500, 480, 99], 24)]
)
def test_windows_lie_inside_and_are_disjoint_while_there_is_room(lengths, count):
    starts = window_starts(lengths, 100, count)
    assert len(starts) == len(set(starts)) == count
    assert all(0 <= offset <= lengths[document] - 100 for document, offset in starts)
    if count <= max(lengths) // 100 - 1:  # one document alone has room for them
        for document in range(len(lengths)):
            offsets = sorted(offset for index, offset in starts if index == document)
            assert all(b - a >= 100 for a, b in pairwise(offsets))


def test_too_short_texts_are_refused_with_their_length():
    with pytest.raises(ValueError, match=r"no text has 100 tokens, the longest has 99\. .*--context"):
        window_starts([99, 5], 100, 1)


class ChatTokenizer:
    """A token per character, and a template."""

    chat_template = "given"

    def __call__(self, text, **_):
        return {"input_ids": [ord(letter) for letter in text]}

    def apply_chat_template(self, messages, **options):
        assert options == {"tokenize": False, "add_generation_prompt": True}
        return f"[{messages[0]['role']}]{messages[0]['content']}[model]"


def test_a_chat_template_surrounds_every_window():
    documents = ["b" * 50, "d" * 40, "f"]
    found = ["".join(map(chr, ids)) for ids in bench.prompts_of(ChatTokenizer(), documents, 40, 4, chat=True).tolist()]
    assert {len(each) for each in found} == {40} and {each[6] for each in found} == {"b", "d"}
    assert all(each.startswith("[user]") and each.endswith("[model]") for each in found)
    with pytest.raises(CommandError, match="the chat template alone has 13 tokens"):
        bench.prompts_of(ChatTokenizer(), documents, 13, 4, chat=True)


def test_tokenizers_without_a_usable_chat_template_are_refused():
    class Shouting(ChatTokenizer):
        def apply_chat_template(self, messages, **_):
            return messages[0]["content"].upper()

    for tokenizer, message in (
        (lambda text, **_: {"input_ids": []}, "no chat template"),
        (Shouting(), "does not write"),
    ):
        with pytest.raises(ValueError, match=f"--chat: .*{message}"):
            bench.prompts_of(tokenizer, ["b"], 20, 1, chat=True)
