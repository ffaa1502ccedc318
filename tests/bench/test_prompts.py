"""Prompts from texts, JSON lines and data sets: columns, windows, padding."""

import ast
import json
from itertools import pairwise
from pathlib import Path

import pytest
from datasets import Dataset

from hf_longspec.bench.prompts import DocumentPrompts, window_starts
from hf_longspec.bench.sources import HELD_OUT, Document, read_source, read_sources


def write(path, *records):
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return str(path)


def test_lines_are_read_by_column_with_their_category_also_with_separators_inside(tmp_path):
    """A list stands for its first text, as the turns of a conversation."""
    texts = ["one\u2028two\x85three\x0bfour", "b"]
    path = write(tmp_path / "d.jsonl", *({"text": each, "turns": ["Q?", each], "category": "math"} for each in texts))
    assert [(d.name, d.text, d.category) for d in read_source(path)] == [
        ("d.jsonl:1", texts[0], "math"),
        ("d.jsonl:2", "b", "math"),
    ]
    assert [d.text for d in read_source(path, "turns")] == ["Q?", "Q?"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "x", "label": 1}', "row 1: text is not a text; the keys are prompt, label"),
        ('{"text": "x"}\n{"text": []}', "row 2: text is not a text"),
        ('{"text": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING X"]}', "row 1: .* SPEED-Bench"),
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
    assert [d.text for d in read_source(str(tmp_path / "books"))] == ["A", "B"]
    (tmp_path / "sets").mkdir()
    for split, count in (("train", 2), ("test", 300)):
        rows = Dataset.from_list([{"report": f"{split} {number}", "category": 3} for number in range(count)])
        rows.to_parquet(str(tmp_path / "sets" / f"{split}.parquet"))
    found = read_source(str(tmp_path / "sets"), "report")
    assert len(found) == 256 and (found[1].text, found[1].category) == ("test 1", "")
    for absent in (tmp_path / "absent", "no/such/set"):
        with pytest.raises(ValueError, match="--data"):
            read_source(str(absent))


def tokenizer(text, **_):
    """One token per character."""
    return {"input_ids": [ord(letter) for letter in text]}


def text(ids):
    return "".join(map(chr, ids.tolist()))


def test_documents_take_turns_and_short_ones_are_left_out():
    documents = [Document("a", "a" * 40), Document("b", "b" * 38), Document("c", "c" * 5)]
    found = DocumentPrompts(tokenizer, documents).windows(10, 2)
    assert sorted(text(prompt.ids)[0] for prompt in found) == ["a", "b"]


def test_own_lengths_are_whole_documents_that_fit_from_the_beginning_again():
    documents = [Document("a", "aaa?"), Document("b", "b" * 9), Document("c", "cc")]
    prompts = DocumentPrompts(tokenizer, documents)
    assert [text(prompt.ids) for prompt in prompts.own(3, limit=6)] == ["aaa?", "cc", "aaa?"]
    with pytest.raises(ValueError, match="no document has between 1 and 1 tokens"):
        prompts.own(1, limit=1)


def test_disjoint_windows_are_counted_per_document():
    prompts = DocumentPrompts(tokenizer, [Document("a", "a" * 25), Document("b", "b" * 10)])
    assert prompts.describe([10, 0]) == {"documents": 2, "tokens": 35, "disjoint_windows": {"10": 3}}


SCRIPT = Path(__file__).parents[2] / "recipes" / "train_tiny_target.py"


def test_held_out_modules_are_those_of_the_training_script():
    assignments = [node for node in ast.parse(SCRIPT.read_text(encoding="utf-8")).body if isinstance(node, ast.Assign)]
    named = {node.targets[0].id: node.value for node in assignments if isinstance(node.targets[0], ast.Name)}
    assert ast.literal_eval(named["HELD_OUT"]) == HELD_OUT


def test_standard_library_gives_held_out_modules_only():
    names = {document.name for document in read_source("builtin")}
    assert {"argparse.py", "typing.py"} <= names <= {f"{name}.py" for name in HELD_OUT}


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
    with pytest.raises(ValueError, match=r"no document has 100 tokens, the longest has 99\. .*--data"):
        window_starts([99, 5], 100, 1)


def test_several_sources_take_turns_and_name_documents_without_a_category(tmp_path):
    first = write(tmp_path / "speed.jsonl", {"text": "a", "category": "math"}, {"text": "b"}, {"text": "c"})
    second = write(tmp_path / "books.jsonl", {"text": "d"})
    found = [(document.text, document.category) for document in read_sources([first, second])]
    assert found == [("a", "math"), ("d", "books"), ("b", "speed"), ("c", "speed")]
    assert [document.category for document in read_sources([second])] == [""]


class ChatTokenizer:
    """A token per character, and a template."""

    chat_template, __call__ = "given", staticmethod(tokenizer)

    def apply_chat_template(self, messages, **options):
        assert options == {"tokenize": False, "add_generation_prompt": True}
        return f"[{messages[0]['role']}]{messages[0]['content']}[model]"


def test_a_chat_template_surrounds_every_prompt():
    documents = [Document("a", "b" * 50, "first"), Document("c", "d" * 40, "second")]
    prompts = DocumentPrompts(ChatTokenizer(), documents, chat=True)
    windows = prompts.windows(40, 4)
    found = [text(prompt.ids) for prompt in windows]
    assert {len(each) for each in found} == {40}
    assert all(each.startswith("[user]") and each.endswith("[model]") for each in found)
    expected = ["first" if "b" in each else "second" for each in found]
    assert [prompt.category for prompt in windows] == expected and set(expected) == {"first", "second"}
    (whole,) = prompts.own(1, 100)
    assert (text(whole.ids), whole.category) == ("[user]" + "b" * 50 + "[model]", "first")


def test_tokenizers_without_a_usable_chat_template_are_refused():
    class Shouting(ChatTokenizer):
        def apply_chat_template(self, messages, **_):
            return messages[0]["content"].upper()

    for tokenizer, message in ((lambda text, **_: {"input_ids": []}, "no chat template"), (Shouting(), "writes")):
        with pytest.raises(ValueError, match=f"--chat: .*{message}"):
            DocumentPrompts(tokenizer, [Document("a", "b")], chat=True)
