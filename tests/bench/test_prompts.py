"""Prompts from documents and data sets: layouts on hand-made lines, windows, padding."""

import ast
import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer

from benchmarks.harness import load_prompts
from hf_longspec.bench.prompts import (
    HELD_OUT,
    LAYOUTS,
    Document,
    DocumentPrompts,
    cut_windows,
    num_disjoint,
    read_source,
    window_starts,
)

LINES = {
    "LongBench-v2": (
        {"context": "Long.", "question": "Why?", "choice_A": "a", "choice_B": "b", "choice_C": "c", "choice_D": "d"},
        "Long.",
        "\n\nWhy?\n(A) a\n(B) b\n(C) c\n(D) d\nAnswer:",
    ),
    "LongBench, also its RepoBench-P and LCC": ({"context": "Code.", "input": "x ="}, "Code.", "\n\nx =\n"),
    "RepoBench-P": (
        {
            "context": [{"path": "a.py", "identifier": "f", "snippet": "def f(): ..."}],
            "import_statement": "from a import f",
            "code": "f(",
        },
        "# a.py\ndef f(): ...",
        "\n\nfrom a import f\n\nf(\n",
    ),
    "LCC": ({"context": "import os\n", "gt": "os.x"}, "import os\n", ""),
    "QMSum": (
        {
            "meeting_transcripts": [{"speaker": "A", "content": "Hello."}, {"speaker": "B", "content": "Bye."}],
            "general_query_list": [{"query": "Summarize.", "answer": "x"}],
            "specific_query_list": [{"query": "Who?", "answer": "y"}],
        },
        "A: Hello.\nB: Bye.",
        "\n\nSummarize.\n",
    ),
    "Spec-Bench": ({"question_id": 1, "category": "writing", "turns": ["First.", "Second."]}, "First.", ""),
    "AIME": ({"id": 60, "problem": "Find x.", "answer": "4"}, "Find x.", ""),
    "CodeElo": (
        {"description": "Sort.", "input": "n", "output": "sorted", "interaction": "", "note": "None."},
        "Sort.\n\nInput\nn\n\nOutput\nsorted\n\nNote\nNone.",
        "",
    ),
    "texts, such as PG-19": ({"short_book_title": "T", "text": "Once."}, "Once.", ""),
}


def write(path, *records):
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("name", [layout.name for layout in LAYOUTS])
def test_every_layout_is_known_by_its_keys(name, tmp_path):
    record, body, tail = LINES[name]
    documents, found = read_source(write(tmp_path / "d.jsonl", record, record))
    assert found == name
    assert [(d.name, d.body, d.tail) for d in documents] == [("d.jsonl:1", body, tail), ("d.jsonl:2", body, tail)]


def test_an_array_is_read_too(tmp_path):
    (tmp_path / "test.json").write_text(json.dumps([LINES["CodeElo"][0]]), encoding="utf-8")
    (tmp_path / "lines.json").write_text(json.dumps({"text": "a"}) + "\n" + json.dumps({"text": "b"}), encoding="utf-8")
    assert read_source(str(tmp_path / "test.json"))[1] == "CodeElo"
    assert [d.body for d in read_source(str(tmp_path / "lines.json"))[0]] == ["a", "b"]


def test_line_separators_inside_a_text_do_not_cut_it(tmp_path):
    text = "one\u2028two\x85three\x0bfour"
    documents, _ = read_source(write(tmp_path / "d.jsonl", {"text": text}))
    assert [document.body for document in documents] == [text]


def test_unknown_keys_are_refused_with_the_layouts_and_the_keys(tmp_path):
    path = write(tmp_path / "d.jsonl", {"prompt": "x", "label": 1})
    with pytest.raises(ValueError, match="line 1: its keys are prompt, label; expected LongBench-v2 ") as error:
        read_source(path)
    assert all(layout.name in str(error.value) for layout in LAYOUTS)


def test_a_line_of_another_layout_is_refused(tmp_path):
    path = write(tmp_path / "d.jsonl", {"text": "x"}, {"turns": ["x"]})
    with pytest.raises(ValueError, match=r"line 2: its keys are turns; expected texts, such as PG-19 \(text\)"):
        read_source(path)


@pytest.mark.parametrize(
    "record",
    [
        {"turns": []},
        {"meeting_transcripts": ["Hello."]},
        {"meeting_transcripts": [], "general_query_list": [{"answer": "x"}]},
        {"context": ["a.py"], "import_statement": "import a", "code": "f("},
    ],
    ids=lambda record: next(iter(record)),
)
def test_values_of_another_form_are_refused_with_their_line(record, tmp_path):
    sound = next(line for line, _, _ in LINES.values() if record.keys() <= line.keys())
    with pytest.raises(ValueError, match=r"line 2: its keys are those of .*, and what they hold is not"):
        read_source(write(tmp_path / "d.jsonl", sound, record))


def test_files_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "d.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"d.jsonl is not UTF-8 text"):
        read_source(str(tmp_path / "d.jsonl"))


def test_broken_lines_and_missing_files_are_refused(tmp_path):
    (tmp_path / "d.jsonl").write_text('{"text": "x"}\n{"text"\n', encoding="utf-8")
    with pytest.raises(ValueError, match="line 2: no JSON object"):
        read_source(str(tmp_path / "d.jsonl"))
    with pytest.raises(ValueError, match="no such file or folder"):
        read_source(str(tmp_path / "absent.jsonl"))
    (tmp_path / "empty.jsonl").write_text("\n", encoding="utf-8")
    with pytest.raises(ValueError, match="is empty"):
        read_source(str(tmp_path / "empty.jsonl"))


def test_folders_hold_texts_or_else_json_lines(tmp_path):
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "b.txt").write_text("B", encoding="utf-8")
    (tmp_path / "books" / "a.txt").write_text("A", encoding="utf-8")
    assert [d.body for d in read_source(str(tmp_path / "books"))[0]] == ["A", "B"]
    (tmp_path / "sets").mkdir()
    write(tmp_path / "sets" / "q.jsonl", {"turns": ["Q"]})
    write(tmp_path / "sets" / "t.jsonl", {"text": "T"})
    documents, layout = read_source(str(tmp_path / "sets"))
    assert [d.body for d in documents] == ["Q", "T"]
    assert layout == "Spec-Bench and texts, such as PG-19"
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match="no file there ends with"):
        read_source(str(tmp_path / "none"))


def tokenizer(text, **_):
    """One token per character."""
    return {"input_ids": [ord(letter) for letter in text]}


def text(ids):
    return "".join(map(chr, ids.tolist()))


def test_prompts_end_with_the_tail():
    prompts = DocumentPrompts(tokenizer, [Document("d", "abcdefghijklmnop", "??")])
    assert [text(prompt) for prompt in prompts.windows(10, 2)] == ["abcdefgh??", "ijklmnop??"]


def test_a_long_tail_keeps_its_end_and_a_quarter_of_the_prompt():
    prompts = DocumentPrompts(tokenizer, [Document("d", "abcdefghijklmnop", "0123456789")])
    assert [text(prompt) for prompt in prompts.windows(8, 2)] == ["abcdef89", "klmnop89"]


def test_documents_take_turns_and_short_ones_are_left_out():
    documents = [Document("a", "a" * 40), Document("b", "b" * 40), Document("c", "c" * 5)]
    found = {text(prompt)[0] for prompt in DocumentPrompts(tokenizer, documents).windows(10, 4)}
    assert found == {"a", "b"}


def test_too_short_documents_are_refused():
    with pytest.raises(ValueError, match="no document has 10 tokens"):
        DocumentPrompts(tokenizer, [Document("c", "c" * 5)]).windows(10, 1)


def test_own_lengths_are_whole_documents_that_fit_from_the_beginning_again():
    documents = [Document("a", "aaa", "?"), Document("b", "b" * 9), Document("c", "cc")]
    prompts = DocumentPrompts(tokenizer, documents)
    assert [text(prompt) for prompt in prompts.own(3, limit=6)] == ["aaa?", "cc", "aaa?"]
    with pytest.raises(ValueError, match="no document has between 1 and 1 tokens"):
        prompts.own(1, limit=1)


def test_disjoint_windows_are_counted():
    prompts = DocumentPrompts(tokenizer, [Document("a", "a" * 25), Document("b", "b" * 9, "?")])
    assert prompts.describe([10, 0]) == {"documents": 2, "tokens": 35, "disjoint_windows": {"10": 3}}
    assert isinstance(prompts.bodies[0], torch.Tensor)


EXAMPLE = Path(__file__).parents[2] / "examples" / "train_tiny_target.py"


def test_held_out_modules_are_those_of_the_training_script():
    assignments = [node for node in ast.parse(EXAMPLE.read_text(encoding="utf-8")).body if isinstance(node, ast.Assign)]
    named = {node.targets[0].id: node.value for node in assignments if isinstance(node.targets[0], ast.Name)}
    assert ast.literal_eval(named["HELD_OUT"]) == HELD_OUT


def test_standard_library_gives_held_out_modules_only():
    names = {document.name for document in read_source("builtin")[0]}
    assert {"argparse.py", "typing.py"} <= names <= {f"{name}.py" for name in HELD_OUT}


@pytest.mark.parametrize("count", [1, 2, 7, 24])
@pytest.mark.parametrize("lengths", [[1000], [1000, 300, 100], [500, 480, 99]], ids=str)
def test_windows_lie_inside_and_are_disjoint_while_there_is_room(lengths, count):
    starts = window_starts(lengths, 100, count)
    assert len(starts) == len(set(starts)) == count
    assert all(0 <= offset <= lengths[document] - 100 for document, offset in starts)
    if count <= max(lengths) // 100 - 1:  # one document alone has room for them
        for document in range(len(lengths)):
            offsets = sorted(offset for index, offset in starts if index == document)
            assert all(b - a >= 100 for a, b in pairwise(offsets))


def test_windows_come_from_every_document_first():
    assert {document for document, _ in window_starts([400, 380, 390], 100, 3)} == {0, 1, 2}


def test_too_short_texts_are_refused_with_their_length():
    with pytest.raises(ValueError, match=r"no document has 100 tokens, the longest has 99\. .*--data"):
        window_starts([99, 5], 100, 1)


def test_cut_windows_are_pieces_of_the_documents():
    cut = cut_windows([torch.arange(50), torch.arange(100, 140)], 10, 4)
    assert cut.shape == (4, 10)
    assert bool((cut.diff(dim=1) == 1).all())


def test_disjoint_windows_are_counted_per_document():
    assert num_disjoint([99, 100, 250], 100) == 3


def test_sources_take_turns(tmp_path, monkeypatch):
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda target: tokenizer)

    for name, letter in (("first", "a"), ("second", "b")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text.txt").write_text(letter * 40)
    tokens, origin = load_prompts("target", [str(tmp_path / "first"), str(tmp_path / "second")], 10, 3)
    assert [chr(row[0]) for row in tokens] == ["a", "b", "a"]
    assert [source["disjoint_windows"] for source in origin["sources"]] == [4, 4]


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_tables_are_read_by_their_keys_or_by_a_column(suffix, tmp_path):
    rows = {"problem": ["Find x.", "Find y."], "answer": ["4", "5"], "notes": ["a", "b"]}
    path = str(tmp_path / f"d.{suffix}")
    getattr(Dataset.from_dict(rows), f"to_{suffix}")(path)
    documents, layout = read_source(path)
    assert (layout, [d.body for d in documents]) == ("AIME", ["Find x.", "Find y."])
    documents, layout = read_source(path, "notes")
    assert (layout, [d.body for d in documents]) == ("column notes", ["a", "b"])
    with pytest.raises(ValueError, match=r"line 1: its keys are problem, answer, notes; expected column body"):
        read_source(path, "body")


def test_a_column_takes_the_place_of_the_layout(tmp_path):
    path = write(tmp_path / "d.jsonl", {"text": "x", "story": "once"})
    assert [d.body for d in read_source(path, "story")[0]] == ["once"]


def test_tables_that_cannot_be_read_are_refused(tmp_path):
    (tmp_path / "d.parquet").write_bytes(b"no table")
    with pytest.raises(ValueError, match="cannot be read as parquet"):
        read_source(str(tmp_path / "d.parquet"))
